"""`TieredKV` in a small engine that obeys the contract: books that follow it, answers that it can follow, faults."""

import json
import random

import pytest

from sagellm.core.errors import PluginError, PolicyError
from sagellm.core.hooks import Tier, overrides
from sagellm.kv_runtime.plugin import TieredKV
from sagellm.replay.verify import verify_log
from tests.kv_runtime.fake_engine import FakeEngine, plugin_with
from tests.kv_runtime.policies import KeepsEven, make_policy


def make(name, **options):
    return None if name in ("always", "cost") else KeepsEven()


def tiered(**options):
    return plugin_with(TieredKV, make_policy, make, **{"migration": "always", **options})


def tokens_of(*steps, tail=1):
    """Four tokens a step, and a few that fill no block."""
    return [step for step in steps for _ in range(4)] + [9] * tail


def run(engine, seed, count=60, num_running=2, check=True):
    rng = random.Random(seed)
    running = []
    for request in range(count):
        tokens = tokens_of(*(rng.randrange(2) for _ in range(rng.randrange(1, 5))), tail=rng.randrange(3))
        if len(running) >= num_running:
            engine.end(running.pop(0))
        if engine.start(request, tokens, tenant="ab"[tokens[0]]):
            running.append(request)
        if rng.random() < 0.5:
            engine.step()
        if check:
            engine.check()


def verify(engine, path):
    path.write_text("".join(json.dumps(line, default=int) + "\n" for line in engine.lines))
    return verify_log(path, make_policy=make_policy, make_migration=lambda name, **_: make(name))


@pytest.mark.parametrize("host", [0, 2, 6])
@pytest.mark.parametrize("policy", ["lru", "fifo", "newest", "lazy"])
@pytest.mark.parametrize("migration", ["always", "even"])
def test_the_books_follow_the_engine(host, policy, migration, tmp_path):
    plugin = tiered(policy=policy, migration=migration, quotas={"a": {"gpu": 3}} if policy == "fifo" else {})
    engine = FakeEngine(plugin, 8, host)
    run(engine, host)
    assert engine.num_matched > 30 and engine.top_ups == 0
    assert plugin._counts["resynchronised"] == plugin._counts["lookups_disagreed"] == 0
    report = verify(engine, tmp_path / "log.jsonl")
    assert report.agrees and report.num_decisions > 5 and report.num_hits >= engine.num_matched > 0


def test_what_the_engine_found_is_compared_too(tmp_path):
    engine = FakeEngine(tiered(), 8, 4)
    run(engine, 1)
    place = [n for n, line in enumerate(engine.lines) if line["event"] == "lookup"][5]
    engine.lines[place]["matched"] += 4
    differences = verify(engine, tmp_path / "log.jsonl").differences
    assert [(each.line, each.event, each.field) for each in differences] == [(place + 1, "lookup", "matched")]


def test_evicted_prefixes_come_back_from_the_host():
    engine = FakeEngine(tiered(), 4, 8)
    first, other = tokens_of(0, 1, 2), tokens_of(5, 6, 7)
    engine.serve(1, first)
    engine.serve(2, other)  # two blocks of the first must go
    computed = engine.num_computed
    engine.serve(3, first)
    assert engine.num_computed == computed, "nothing is computed again"
    engine.check()
    assert engine.plugin.report()["events"]["moved_gpu_cpu"] >= 2


def test_without_a_host_tier_they_are_computed_again():
    engine = FakeEngine(tiered(), 4, 0)
    for request, tokens in enumerate([tokens_of(0, 1, 2), tokens_of(5, 6, 7), tokens_of(0, 1, 2)]):
        engine.serve(request, tokens)
    assert engine.num_computed == 8
    assert engine.reasons and set(engine.reasons.values()) == {"least recently used"}


def test_each_victim_has_the_reason_of_its_policy():
    engine = FakeEngine(tiered(policy="newest"), 4, 0)
    engine.serve(1, tokens_of(0, 1, 2))
    engine.serve(2, tokens_of(5, 6, 7))
    assert set(engine.reasons.values()) == {"place 3"}
    assert engine.plugin.report()["victims"] == {"gpu": {"place n": 2}}


def test_refused_moves_are_dropped_with_what_hangs_below():
    engine = FakeEngine(tiered(), 6, 12)
    engine.serve(1, tokens_of(0, 1, 2, 3))
    root = engine.cache["", (0, 0, 0, 0)]
    middle = engine.cache["", (0, 0, 0, 0, 1, 1, 1, 1)]
    engine.refuse = lambda block: "broken" if block in (root, middle) else ""
    engine.serve(2, tokens_of(5, 6, 7, 8, 9))
    engine.check()
    assert root in engine.blocks or "could not be moved: broken" in engine.reasons.values()
    assert middle not in engine.blocks
    assert engine.plugin.report()["events"]["refused_gpu_cpu"] >= 1
    assert not [
        b for b in engine.blocks.values() if b.tier is Tier.CPU and b.parent not in engine.blocks and b.parent != -1
    ]


@pytest.mark.parametrize("hook", ["on_prefix_stored", "on_prefix_matched", "on_prefix_released"])
@pytest.mark.parametrize("host", [0, 6])
def test_lost_notices_are_made_up_for(hook, host, tmp_path):
    plugin = tiered()
    engine = FakeEngine(plugin, 8, host)
    rng = random.Random(3)
    engine.lose = lambda name: name == hook and rng.random() < 0.2
    run(engine, 5, 80, check=False)  # what the engine is answered is checked at each question
    assert plugin._counts["resynchronised"] > 0
    engine.lose = lambda name: False
    for request in list(engine.held):
        engine.end(request)
    run(engine, 6, 40, check=False)
    engine.flush()
    plugin._agreement.put_right(engine.candidates(1), 0.0)
    plugin._books.check()
    assert set(plugin._blocks.key_of) >= set(engine.blocks) - {b.id for b in engine.blocks.values() if b.holders}
    assert not verify(engine, tmp_path / "log.jsonl").differences


def test_eviction_by_the_engine_itself_is_followed():
    engine = FakeEngine(tiered(), 8, 0)
    engine.serve(1, tokens_of(0, 1, 2))
    engine.give_up(engine.candidates(2).leaf_first())
    engine.check()
    assert engine.plugin._books.num_blocks(Tier.GPU) == 1


@pytest.mark.parametrize("bits", [2, 4])
def test_colliding_keys_are_refused_and_the_engine_goes_on(bits):
    plugin = tiered()
    engine = FakeEngine(plugin, 8, 4, key_bits=bits)
    run(engine, 7, 60, check=False)
    report = plugin.report()
    assert report["events"]["collisions"] + report["plugin"]["collisions"] > 0
    plugin._books.check()


@pytest.mark.parametrize(("policy", "why"), [("raising", "no idea"), ("foreign", "not on tier"), ("odd", "17")])
def test_a_policy_that_fails_is_the_plug_ins_failure(policy, why):
    engine = FakeEngine(tiered(policy=policy), 4, 0)
    engine.serve(1, tokens_of(0, 1, 2))
    with pytest.raises(PolicyError, match=why):
        engine.serve(2, tokens_of(5, 6, 7))


def test_bad_options_are_refused_before_anything_starts():
    with pytest.raises(PluginError, match="polcy"):
        tiered(polcy="lru")
    with pytest.raises(PolicyError, match="no options"):
        tiered(policy_options={"size": 3})
    with pytest.raises(KeyError):  # of the tests' registry
        tiered(cpu_policy="none")
    with pytest.raises(PluginError, match="deadline_s"):
        tiered(deadline_s=0)


def test_only_the_hooks_it_needs():
    assert overrides(tiered(), "select_victims") and not overrides(tiered(), "schedule")
    assert not overrides(tiered(), "admit") and not overrides(tiered(), "lookup_prefix")


def test_no_lines_are_made_where_no_log_is_kept():
    class Unrecorded(FakeEngine):
        is_recording = False

    plugin = tiered()
    engine = Unrecorded(plugin, 4, 4)
    engine.serve(1, tokens_of(0, 1, 2))
    engine.serve(2, tokens_of(5, 6, 7))
    assert plugin.report()["events"]["moved_gpu_cpu"] == 2
    assert not [line for line in engine.lines if line["event"].startswith("kv_")]


def test_namespaces_do_not_mix():
    engine = FakeEngine(tiered(), 8, 4)
    engine.serve(1, tokens_of(0, 1), namespace="x")
    engine.serve(2, tokens_of(0, 1), namespace="y")
    assert engine.num_computed == 4
    engine.check()
