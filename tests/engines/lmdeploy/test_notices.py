"""Tests of notices: when a plug-in is asked, they tell which request holds which blocks. The record says the same."""

import json
from collections import Counter

import numpy as np
import pytest

from sagellm.core.config import PluginSpec
from sagellm.engines.lmdeploy.prefix_keys import namespace_key
from sagellm.prefix_reuse import prefix_hashes
from tests.engines.lmdeploy.simulated import BLOCK, SimulatedEngine
from tests.engines.lmdeploy.test_prefix_cache import Clients
from tests.plugins import plugin_of
from tests.pool import check_blocks
from tests.sweeps import slow_but

BOOKS = "tests.engines.lmdeploy.books:Books"
OFFLOAD = PluginSpec(name=BOOKS, options={"offload": True})


class SimulatedMemory:
    """The simulated device's host slots, as bytes."""

    def __init__(self, device):
        self.rows = device.host.view(np.uint8)

    def read(self, slot):
        return self.rows[slot].copy()

    def write(self, slot, block):
        self.rows[slot] = block


def simulated(*plugins, host=0, **options):
    engine = SimulatedEngine(*plugins, pool=14, host=host, block_bytes=BLOCK * 8, **options)
    engine.hooks.kv.host_blocks._memory = SimulatedMemory(engine.device)
    return engine


def played(engine, seed):
    """A random workload to its end; the engine's report."""
    clients = Clients(engine, seed)
    clients.finish()
    check_blocks(engine.scheduler)
    engine.hooks._host.flush()
    report = engine.hooks.report()
    engine.hooks.close()
    assert report["faults"] == []
    assert clients.done > 10
    return report


@pytest.mark.parametrize("decode_round", slow_but([1, 3], 3))
@pytest.mark.parametrize(("plugin", "host"), [(BOOKS, 0), (OFFLOAD, 3), (OFFLOAD, 9)])
def test_books_kept_from_notices_are_right_whenever_asked(plugin, host, decode_round):
    totals = Counter()
    for seed in range(6):
        engine = simulated(plugin, host=host, decode_round=decode_round)
        report, books = played(engine, seed), plugin_of(engine)
        assert books.mismatches == []
        assert books.held == {}, "every request let go of what it held"
        assert sorted(books.key_of) == np.flatnonzero(engine.hooks.cache.is_cached).tolist()
        totals.update(asked=books.asked, recomputed=report["evicted"]["recompute"], preempted=report["preempted"])
        if host:
            totals.update(back=report["migrated"]["gpu"], shrunk=books.shrunk)
    assert all(totals[name] for name in ("asked", "recomputed", "preempted")), totals
    assert not host or (totals["back"] and (totals["shrunk"] or host > 3)), totals


@pytest.mark.parametrize("decode_round", slow_but([1, 3], 3))
def test_a_tier_of_a_plugin_under_pressure(decode_round):
    """Bytes out of the host tier and back into it, while copies are on their way: every request reads what it wrote."""
    totals = Counter()
    for seed in range(8):
        engine = simulated("tests.engines.lmdeploy.books:DictTier", host=4, decode_round=decode_round)
        report, tier = played(engine, seed), plugin_of(engine)
        assert tier.mismatches == []
        totals.update(saved=tier.saved, adopted=tier.adopted, back=report["migrated"]["gpu"], late=tier.late)
    assert all(totals.values()), f"the workload proves nothing: {totals}"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_record_tells_who_holds_what(tmp_path):
    """The record's lines alone give the same books, without a plug-in that listens."""
    path = tmp_path / "events.jsonl"
    engine = simulated(record=path)
    report = played(engine, 1)
    lines = lines_of(path)
    assert [line["n"] for line in lines] == list(range(len(lines)))
    header = lines[0]
    assert (header["event"], header["block_size"], header["num_blocks"]) == ("open", BLOCK, 14)
    held, resident = {}, {}
    for line in lines:
        if line["event"] == "lookup":
            before = held.get(line["request"], [])
            held[line["request"]] = line["hashes"][: len(before) + len(line["blocks"])]
            assert [resident[block] for block in line["blocks"]] == held[line["request"]][len(before) :]
        elif line["event"] == "store":
            mine = held.setdefault(line["request"], [])
            assert line["parent"] == (mine[-1] if mine else None)
            mine.extend(line["hashes"])
            resident.update(zip(line["blocks"], line["hashes"], strict=True))
        elif line["event"] == "release":
            held[line["request"]] = held[line["request"]][: line["kept"]]
        elif line["event"] == "evict" and "requested" in line:
            in_use = {key for keys in held.values() for key in keys}
            assert not in_use & {resident.pop(block) for block in line["victims"]}
    assert not any(held.values())
    kinds = Counter(line["event"] for line in lines)
    assert kinds["arrive"] == kinds["end"] == 60
    firsts = sum(line["matched"] for line in lines if line["event"] == "lookup" and line["first"])
    assert firsts == report["prefix"]["hit_tokens"]
    steps = [line for line in lines if line["event"] == "step"]
    assert {line["phase"] for line in steps} == {"prefill", "decode"} and any(line["context"] for line in steps)


def test_keys_of_namespaces_differ(tmp_path):
    path = tmp_path / "events.jsonl"
    engine = simulated(record=path)
    for adapter in (None, "a"):
        engine.run(range(10, 20), num_new=7, adapter=adapter)
    engine.hooks.close()
    lines = lines_of(path)
    plain = prefix_hashes(np.arange(10, 20), BLOCK)
    one, other = [[int(key, 16) for key in line["hashes"]] for line in lines if line["event"] == "lookup"]
    assert one == plain.tolist() and other == (plain ^ namespace_key("a")).tolist()
    assert namespace_key("a") != namespace_key("b")


def test_keys_of_generated_blocks_are_those_of_a_later_prompt(tmp_path):
    """A block that is filled while decoding is hashed from the one before it; a prompt is hashed from its beginning."""
    path = tmp_path / "events.jsonl"
    engine = simulated(record=path)
    prompt = list(range(10, 16))
    answer = engine.run(prompt, num_new=30)
    engine.run([*prompt, *answer], num_new=1)
    engine.hooks.close()
    lines = lines_of(path)
    stored = [key for line in lines if line["event"] == "store" for key in line["hashes"]]
    (first, second) = [line for line in lines if line["event"] == "lookup"]
    assert len(stored) == 9 and second["matched"] == 8 * BLOCK and first["matched"] == 0
    assert second["hashes"][:8] == stored[:8]
    ends = [(line["generated"], line["reason"]) for line in lines if line["event"] == "end"]
    assert ends == [(30, "length"), (1, "length")]


def test_victims_are_recorded_with_the_reason_of_each(tmp_path):
    path = tmp_path / "events.jsonl"
    engine = simulated(BOOKS, record=path)
    played(engine, 2)
    evictions = [line for line in lines_of(path) if line.get("policy") == BOOKS and line["event"] == "evict"]
    assert evictions and all(len(line["reasons"]) == len(line["victims"]) for line in evictions)
    assert all(reason.startswith("depth ") for line in evictions for reason in line["reasons"])


def test_a_cache_that_fails_lets_everybody_go():
    """Then the books are empty too: releases come before the evictions."""
    engine = simulated(BOOKS)
    engine.add(range(10, 22), num_new=20)
    for _ in range(5):
        engine.step()
    books = plugin_of(engine)
    engine.hooks._host.flush()
    assert books.held and books.key_of
    engine.hooks._index_failed("lookup", MemoryError("planted"))
    engine.hooks._host.flush()
    assert books.held == {} and books.key_of == {} and books.mismatches == []
    engine.until_idle()
    engine.end(0)
    engine.hooks.close()


def test_a_victim_whose_child_lies_on_the_host_is_nonsense_without_it():
    name = "tests.engines.lmdeploy.books:LeavesAChild"
    engine = simulated(name, host=4)
    for start in (10, 40):
        engine.run(range(start, start + 18), num_new=20)
        check_blocks(engine.scheduler)
    (fault,) = engine.hooks._host.faults
    assert (fault.plugin, fault.hook, fault.kind) == (name, "select_victims", "nonsense")
    assert "still has the cached child" in fault.detail
    counts = engine.hooks.kv.counts()
    assert counts.host_used == 0, "what lost its beginning went with it"
    engine.hooks.close()
