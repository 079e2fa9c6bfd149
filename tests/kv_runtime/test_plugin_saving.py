"""`TieredKVWithDisk`: what leaves the host is written while there is room, and never stands in the way."""

from errno import ENOSPC

from sagellm.core.errors import TierError
from sagellm.core.hooks import Tier
from tests.kv_runtime.disk_engine import FIRST, OTHERS, admit, push_out, settle
from tests.kv_runtime.test_plugin import tokens_of


def test_a_full_disk_stops_saving_for_a_while(start, monkeypatch):
    engine = start()
    plugin = engine.plugin

    def full(key):
        plugin._link.store.abort(key)
        raise TierError("no space left on device")

    monkeypatch.setattr(plugin._link.store, "commit", full)
    push_out(engine)
    events = plugin.report()["events"]
    assert events["failed_saves"] >= 1 and not events.get("saved")
    assert plugin._counts["saves_paused"] >= 1, "later ones are not tried"
    monkeypatch.undo()
    plugin._saver._paused_until_s = 0.0
    for request, tokens in enumerate([FIRST, *OTHERS], 20):
        assert admit(engine, request, tokens) <= 1
        engine.serve(request, tokens)
        settle(engine)
    assert plugin.report()["events"]["saved"] >= 1
    engine.check()


def test_on_a_full_device_old_files_make_way(start, monkeypatch):
    engine = start()
    plugin = engine.plugin
    assert plugin.report()["capacity_blocks"]["nvme"] == plugin._capacity
    push_out(engine)
    settle(engine)

    def full(*args):
        raise OSError(ENOSPC, "No space left on device")

    def serve_again(first_request):
        for request, tokens in enumerate([FIRST, *OTHERS], first_request):
            assert admit(engine, request, tokens) <= 1
            engine.serve(request, tokens)
            settle(engine)

    monkeypatch.setattr(plugin._link.store, "_write", full)
    for tokens, request in zip(OTHERS, range(50, 60), strict=False):
        engine.serve(request, tokens[::-1])
        settle(engine)
    monkeypatch.undo()
    assert plugin._link.store.counters()["lowered capacity"] >= 1
    plugin._catch_up()
    room = plugin._link.store.capacity_blocks(engine.block_bytes)
    assert plugin._manager.num_occupied(Tier.NVME) == plugin._capacity - room > 0
    assert plugin.report()["capacity_blocks"]["nvme"] == room
    plugin._saver._paused_until_s = 0.0
    saved = plugin.report()["events"]["saved"]
    serve_again(70)
    assert plugin.report()["events"]["saved"] > saved, "for each that comes an old one goes"
    assert len(plugin._link.store) <= room
    engine.check()


def test_what_cannot_be_copied_now_is_lost(start):
    engine = start()
    engine.step = lambda: setattr(engine, "late_slots", 0)  # no pass ever makes a copy
    push_out(engine)
    assert engine.plugin._counts["saves_not_copied"] >= 1 and engine.plugin._books.num_blocks(Tier.NVME) == 0


def test_the_disk_holds_no_more_than_it_may(start):
    engine = start(disk_gib=5 * 4096 / 2**30)
    plugin = engine.plugin
    for request in range(12):
        engine.serve(request, tokens_of(request, request + 20, request + 40))
        settle(engine)
        assert plugin._link.store.used_bytes() <= plugin._link.store.capacity_bytes
        assert plugin._books.num_blocks(Tier.NVME) == len(plugin._link.store) <= 5
    engine.check()


def test_with_a_file_and_without_one_they_leave_the_host_together(start):
    """A chain on the host has files for its first blocks, but not for its last ones. No block leaves without its children."""
    engine = start(pool=6, host=6)
    chain = tokens_of(0, 1, 2, 30, 31)
    engine.serve(1, chain)
    engine.serve(2, tokens_of(5, 6, 7, 8, 9, 10))
    plugin, keys = engine.plugin, engine.keys(chain, "").tolist()
    assert plugin._books.num_blocks(Tier.CPU) == 5
    plugin._manager.adopted([plugin._books.block(key) for key in keys[:3]], Tier.NVME, 0.0)
    engine.serve(3, tokens_of(15, 16, 17, 18, 19, 20))
    settle(engine)
    assert set(engine.dropped) and not plugin._counts["drops_refused"]
    assert all(plugin._books.is_on(key, Tier.NVME) for key in keys)
    engine.check()


def test_a_block_whose_notices_were_lost_is_not_saved(start):
    engine = start()
    engine.serve(1, FIRST)
    engine.flush()
    engine.num_lost_notices += 1
    for request, tokens in enumerate(OTHERS, 2):
        engine.serve(request, tokens)
        settle(engine)
    firsts = set(engine.keys(FIRST, "").tolist())
    assert not firsts & set(engine.plugin._link.store.keys())
    assert engine.plugin.report()["plugin"]["saves_without_digest"]


def test_an_orderly_end_saves_what_lies_on_the_host(start):
    engine = start(pool=3, host=6)
    engine.serve(1, FIRST)
    engine.serve(2, OTHERS[0])
    engine.flush()
    books = engine.plugin._books
    assert books.num_blocks(Tier.CPU) == 3 and not books.num_blocks(Tier.NVME)
    engine.plugin.close()
    again = start(pool=3, host=6)
    assert set(again.plugin._link.store.keys()) == set(again.keys(FIRST, "").tolist())
    assert admit(again, 1, FIRST) == 1
    again.serve(1, FIRST)
    assert again.num_matched == 3


def test_an_end_with_a_full_disk_keeps_what_was_used_last(start):
    engine = start(pool=3, host=6, disk_gib=2 * 8192 / 2**30)
    push_out(engine)
    engine.plugin.close()
    assert len(start(pool=3, host=6, disk_gib=2 * 8192 / 2**30).plugin._link.store) == 2
