"""`TieredKVWithDisk`: what leaves the host is written, read again for who waits for it, and never stands in the way."""

import itertools
import random
import threading
from errno import ENOSPC

import numpy as np
import pytest

from sagellm.core.errors import PluginError, TierError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime import tiered_kv_disk
from sagellm.kv_runtime.digests import token_digests
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.opening import Opening
from sagellm.kv_runtime.plugin import TieredKVWithDisk
from tests.kv_runtime.fake_engine import FakeEngine, plugin_with
from tests.kv_runtime.policies import Chooses, make_policy
from tests.kv_runtime.test_plugin import tokens_of, verify

FIRST = tokens_of(0, 1, 2)
OTHERS = [tokens_of(5, 6, 7), tokens_of(10, 11, 12), tokens_of(15, 16, 17)]


def never_loads(name, **options):
    class Policy(Chooses):
        def plan(self, context):
            self.is_worth = lambda key: context.purpose.value == "demote"
            return super().plan(context)

    return Policy(None)


@pytest.fixture
def start(tmp_path):
    """Starts an engine on the same folder; all are closed at the end."""
    engines = []

    def start(pool=4, host=4, make_migration=lambda name, **options: None, wait=True, key_bits=64, **options):
        options = {"disk": tmp_path / "kv", "disk_gib": 1e-3, "deadline_s": 60.0, **options}
        plugin = plugin_with(TieredKVWithDisk, make_policy, make_migration, **options)
        engines.append(FakeEngine(plugin, pool, host, key_bits=key_bits))
        if wait:
            opened(engines[-1])
        return engines[-1]

    yield start
    for engine in engines:
        engine.plugin.close()


def settle(engine):
    """Until nothing is on its way between memory and files."""
    migrator = engine.plugin._link.migrator
    done = threading.Event()
    while migrator.queued_bytes(Tier.CPU, Tier.NVME) or migrator.queued_bytes(Tier.NVME, Tier.CPU):
        done.wait(0.001)
    engine.flush()
    engine.plugin._catch_up()


def opened(engine):
    """The same, once its folder is open and known."""
    engine.plugin._opening.result(60.0)
    while engine.plugin._link is None or engine.plugin._found:
        engine.plugin._catch_up()
    return engine


def push_out(engine, first=FIRST):
    """Serve a request, and others until its blocks are on disk."""
    engine.serve(1, first)
    for request, tokens in enumerate(OTHERS, 2):
        engine.serve(request, tokens)
        settle(engine)
    settle(engine)


def admit(engine, request, tokens):
    """Like an engine that asks before each step; returns how often the answer was no."""
    num_refused = 0
    while not engine.admitted(request, tokens):
        num_refused += 1
        settle(engine)
        engine.step()
    return num_refused


def test_blocks_come_back_from_disk(start, tmp_path):
    engine = start()
    push_out(engine)
    books = engine.plugin._books
    assert books.num_blocks(Tier.NVME) >= 2
    computed = engine.num_computed
    assert admit(engine, 9, FIRST) == 1
    assert engine.serve(9, FIRST)
    assert engine.num_computed - computed < 3
    assert engine.plugin.report()["events"]["loaded"] >= 1
    engine.check()
    report = verify(engine, tmp_path / "log.jsonl")
    assert report.agrees and report.counts["kv_loaded"] and report.counts["kv_saved"] and report.counts["kv_fetch"]


def test_a_restart_knows_what_was_written(start):
    engine = start()
    push_out(engine)
    engine.plugin.close()
    kept = engine.plugin._books.num_blocks(Tier.NVME)
    again = start()
    assert again.plugin._books.num_blocks(Tier.NVME) == kept > 0
    assert admit(again, 1, FIRST) == 1
    again.serve(1, FIRST)
    assert again.num_matched >= 1
    again.check()


def test_another_layout_is_another_world(start):
    engine = start()
    push_out(engine)
    engine.plugin.close()
    plugin = plugin_with(
        TieredKVWithDisk, make_policy, lambda name: None, disk=engine.plugin._config.disk, disk_gib=1e-3
    )
    other = opened(FakeEngine(plugin, 4, 4, layout="another model"))
    assert plugin._books.num_blocks(Tier.NVME) == 0 and other.admitted(1, FIRST)
    plugin.close()


def test_a_damaged_file_is_computed_again(start):
    engine = start()
    push_out(engine)
    for file in engine.plugin._config.disk.glob("*.kv"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert admit(engine, 9, FIRST) == 1, "it waits once, and then goes on without"
    assert engine.serve(9, FIRST)
    events = engine.plugin.report()["events"]
    assert events["failed_loads"] >= 1 and not events.get("loaded")
    assert not engine.reserved
    engine.check()


def test_a_load_that_is_late_is_given_up(start, monkeypatch):
    engine = start()
    push_out(engine)
    plugin, store = engine.plugin, engine.plugin._link.store
    gate, read = threading.Event(), store.read

    def stuck(*args, **kwargs):
        gate.wait(60)
        return read(*args, **kwargs)

    monkeypatch.setattr(store, "read", stuck)
    assert not engine.admitted(9, FIRST, tries=5), "it waits"
    plugin._loader._waits._waits[9].until_s = 0.0
    assert engine.admitted(9, FIRST), "until the deadline"
    assert plugin._counts["loads_late"] == 1 and engine.reserved, "somebody may still write there"
    assert engine.serve(9, FIRST)
    assert all(engine.admitted(number, [*tokens, 1]) for number, tokens in enumerate(OTHERS, 20))
    assert plugin._counts["loads_paused"] and plugin._counts["loads_late"] == 1, "nobody else waits for a device that hangs"
    gate.set()
    settle(engine)
    while engine.reserved:
        engine.plugin._catch_up()
    engine.check()


def test_a_request_that_goes_while_its_blocks_are_read(start):
    engine = start()
    push_out(engine)
    assert not engine.admitted(9, FIRST)
    engine.call("on_request_end", 9)
    settle(engine)
    while engine.reserved:
        engine.plugin._catch_up()
    assert not engine.plugin._loader._waits._waits and not engine.plugin._loader._waits._load_of
    engine.check()


def test_loads_that_are_not_worth_it_are_not_begun(start):
    engine = start(make_migration=never_loads)
    push_out(engine)
    assert engine.admitted(9, FIRST) and engine.plugin.report()["events"]["loads_avoided"] >= 1


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


def test_a_file_of_other_tokens_is_never_loaded(start):
    engine = start()
    push_out(engine)
    plugin = engine.plugin
    assert engine.admitted(9, FIRST, namespace="other adapter"), "the namespace is part of what a file is"
    other = tokens_of(0, 1, 3)
    admit(engine, 10, other)
    engine.serve(10, other)  # the engine compares the bytes that it is given
    assert plugin._counts["loads_failed"] == 0


def test_what_is_needed_at_the_start(start, tmp_path):
    with pytest.raises(PluginError, match="needs a host tier"):
        start(host=0)
    with pytest.raises(PluginError, match="needs `disk`"):
        plugin_with(TieredKVWithDisk, make_policy, lambda name: None)
    with pytest.raises(TierError):
        start(disk_gib=1e-9)
    start()
    with pytest.raises(TierError, match="in use"):
        start()
    with pytest.raises(TierError, match="in use"):
        start(wait=False).serve(1, FIRST)


def test_a_folder_that_takes_long_to_open_stands_in_nobodys_way(start, monkeypatch):
    engine = start()
    push_out(engine)
    engine.plugin.close()
    kept = engine.plugin._books.num_blocks(Tier.NVME)
    gate, blocks_of = threading.Event(), DiskStore._open

    def slow(store, drop_other):
        gate.wait(60)
        blocks_of(store, drop_other)

    monkeypatch.setattr(DiskStore, "_open", slow)
    monkeypatch.setattr(tiered_kv_disk, "OPEN_WAIT_S", 0.0)
    monkeypatch.setattr(tiered_kv_disk, "ADOPTED_AT_ONCE", 1)
    late = start(wait=False)
    for request, tokens in enumerate([FIRST, *OTHERS]):
        assert late.admitted(request, tokens) and late.serve(request, tokens)
    assert late.plugin._link is None and late.plugin._counts["saves_paused"] > 0
    assert "disk" not in late.plugin.report()
    gate.set()
    opened(late)
    assert late.plugin._books.num_blocks(Tier.NVME) == kept
    push_out(late)
    late.check()


def test_a_folder_that_nobody_waits_for_is_closed_once_it_is_open():
    gate, closed = threading.Event(), threading.Event()

    class Store:
        close = closed.set

    opening = Opening(lambda: gate.wait(60) and Store)
    assert opening.result() is None
    opening.abandon()
    gate.set()
    assert closed.wait(60)


def test_digests_chain_over_tokens_and_namespace():
    tokens = np.arange(12)
    digests = token_digests(tokens, "a", 4)
    assert len(digests) == len(set(digests)) == 3 and all(len(digest) == 16 for digest in digests)
    assert token_digests(tokens[4:], "a", 4, digests[0]) == digests[1:]
    assert token_digests(tokens[:11], "a", 4) == digests[:2]
    assert not set(digests) & set(token_digests(tokens, "b", 4))


def test_a_load_makes_room_on_a_full_host(start):
    engine = start()
    push_out(engine)
    counts = engine.block_counts()
    assert counts.host_used == counts.host_total
    assert admit(engine, 9, FIRST) == 1
    assert len(engine.dropped) > 0 and engine.plugin._counts["loads_without_room"] == 0
    matched = engine.num_matched
    engine.serve(9, FIRST)
    assert engine.num_matched - matched == 3
    engine.check()


def test_a_load_takes_no_room_of_what_it_continues(start):
    engine = start(pool=4, host=3)
    long = tokens_of(0, 1, 2, 3)
    push_out(engine, long)
    assert admit(engine, 9, tokens_of(0, 1)) == 1  # the first two are on the host, all of it but one
    assert engine.plugin._books.num_resident(engine.keys(long, "").tolist()) == 2
    assert admit(engine, 10, long) == 1
    assert engine.plugin._books.num_resident(engine.keys(long, "").tolist()) == 3
    engine.serve(10, long)
    engine.check()


def test_requests_that_begin_alike_share_a_load(start):
    engine = start()
    push_out(engine)
    plugin, longer = engine.plugin, tokens_of(0, 1, 2, 30)
    assert not engine.admitted(9, FIRST) and not engine.admitted(10, longer) and not engine.admitted(11, FIRST)
    assert plugin._counts["loads_shared"] == 2 and len(engine.reserved) == 3
    engine.call("on_request_end", 9)  # who asked first does not want it any more
    settle(engine)
    assert engine.admitted(10, longer) and engine.admitted(11, FIRST)
    assert not engine.reserved and not plugin._loader._waits._waits
    computed = engine.num_computed
    assert engine.serve(10, longer) and engine.num_computed == computed + 1
    engine.check()


def test_who_shares_a_load_waits_no_longer_than_for_its_own(start, monkeypatch):
    engine = start()
    push_out(engine)
    gate, store = threading.Event(), engine.plugin._link.store
    read = store.read
    monkeypatch.setattr(store, "read", lambda *args, **kwargs: gate.wait(60) and read(*args, **kwargs))
    assert not engine.admitted(9, FIRST) and not engine.admitted(10, FIRST)
    engine.plugin._loader._waits._waits[10].until_s = 0.0
    assert engine.admitted(10, FIRST) and not engine.admitted(9, FIRST), "the load goes on for the other one"
    gate.set()
    settle(engine)
    assert engine.admitted(9, FIRST) and engine.plugin.report()["events"]["loaded"] == 3
    engine.check()


def test_with_a_file_and_without_one_they_leave_the_host_together(start):
    """Of a chain on the host the beginning has files, and the end has none yet; no block leaves without its children."""
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


def test_a_key_that_two_prefixes_share_names_one_of_them_only(start):
    engine = start(2, 2, disk_gib=2 * 8192 / 2**30, key_bits=8)
    plugin, books, requests = engine.plugin, engine.plugin._books, itertools.count(1)

    def key(tokens):
        return int(engine.keys(tokens, "")[0])

    def serve(tokens):
        request = next(requests)
        while not engine.admitted(request, [*tokens, 9]):
            settle(engine)
        assert engine.serve(request, [*tokens, 9])
        settle(engine)

    first = [0, 0, 0, 0]
    alike = next(t for t in ([a, b, 0, 0] for a in range(99) for b in range(1, 99)) if key(t) == key(first))
    others = {key([a, 7, 0, 0]): [a, 7, 0, 0] for a in range(99)}
    others.pop(key(first), None)
    others = itertools.cycle(others.values())
    serve(first)
    while key(first) not in plugin._link.store or books.fast_tier(key(first)):
        serve(next(others))
    serve(alike)
    assert plugin.report()["plugin"]["collisions"] == 1 and books.fast_tier(key(first)) is None
    while key(first) in plugin._link.store:  # until its file makes way
        serve(next(others))
        serve(alike)
    for _ in range(9):  # now files of the other one are written
        serve(alike)
        for _ in range(4):
            serve(next(others))
    assert plugin._digests.key_of(token_digests(np.array(alike), "", 4)[0]) == key(first)
    serve(first)


def test_two_prefixes_of_one_key_cannot_get_each_others_files_over_restarts(start):
    for seed in range(4):
        draw = random.Random(seed)
        for life in range(3):
            engine = start(8, 5, disk_gib=draw.choice([6, 12, 40]) * 8192 / 2**30, key_bits=draw.choice([3, 5, 8]))
            for number in range(30):
                request = 1000 * life + number
                blocks = [[draw.randrange(4), 0, 0, draw.randrange(2)] for _ in range(draw.randint(1, 4))]
                tokens = [*itertools.chain(*blocks), 9]
                admit(engine, request, tokens)
                engine.serve(request, tokens)
                if draw.random() < 0.5:
                    settle(engine)
            engine.plugin.close()


def test_a_file_that_was_replaced_behind_the_books_is_not_loaded(start):
    engine = start()
    push_out(engine)
    store = engine.plugin._link.store
    for key in list(store.keys()):
        stored = store.describe(key)
        store.remove(key)
        store.prepare(stored.block, b"another's digest")[:] = 0
        store.commit(key)
    computed = engine.num_computed
    admit(engine, 9, FIRST)
    assert engine.serve(9, FIRST)
    assert engine.num_computed == computed + len(FIRST) // 4
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
