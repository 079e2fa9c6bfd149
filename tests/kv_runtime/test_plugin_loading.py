"""`TieredKVWithDisk`: files are read again for who waits for them, in time or not at all."""

import threading

from sagellm.core.hooks import Tier
from tests.kv_runtime.disk_engine import FIRST, OTHERS, admit, push_out, settle
from tests.kv_runtime.policies import Chooses
from tests.kv_runtime.test_plugin import tokens_of, verify


def never_loads(name, **options):
    class Policy(Chooses):
        def plan(self, context):
            self.is_worth = lambda key: context.purpose.value == "demote"
            return super().plan(context)

    return Policy(None)


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
