"""A strategy in an engine: through the graph and back its decision is the same."""

import json

import pytest

from sagellm.core.config import HookConfig, PluginSpec
from sagellm.core.errors import PlanError, PluginError
from sagellm.core.hooks import Phase, Plugin, ScheduleDecision
from sagellm.core.host import PluginHost
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin, compact
from tests.scheduler_ir.fake_engine import FakeEngine
from tests.scheduler_ir.hosted import Hosted


class Shortest(SchedulingStrategy):
    """The fewest tokens first; one request is cut, one held while others run."""

    name = "shortest-of-test"

    def __init__(self, chunk=32, fail_at=0, drop_at=0):
        if chunk < 1:
            raise PlanError(f"chunk={chunk}; give 1 or more.")
        self.chunk, self.fail_at, self.drop_at = chunk, fail_at, drop_at
        self.decided, self.heard, self.ended = [], [], []

    def decide(self, view):
        if view.step == self.fail_at:
            raise RuntimeError("planted")
        rows = sorted(view.requests, key=lambda row: (row.phase is Phase.DECODE, row.num_tokens, row.request_id))
        order = [row.request_id for row in rows]
        if view.step == self.drop_at:
            return ScheduleDecision(order[1:])
        hold = frozenset(order[-1:]) if len(order) > 2 else frozenset()
        first = rows[0]
        cut = {first.request_id: self.chunk} if first.num_tokens - first.num_computed > self.chunk else {}
        phase = Phase.PREFILL if any(row.phase is Phase.PREFILL and row.request_id not in hold for row in rows) else None
        reasons = {each: "short" for each in order[:1]}
        self.decided.append(ScheduleDecision(order, hold, 200, "shortest first", phase, cut, reasons))
        return self.decided[-1]

    def on_step_end(self, result):
        self.heard.append(result.step)

    def on_request_end(self, request_id):
        self.ended.append(request_id)

    def report(self):
        return {"heard": len(self.heard)}


class Leaves(SchedulingStrategy):
    name = "leaves"

    def decide(self, view):
        return None


class Direct(Plugin):
    """The strategy's own decisions, with no graph between."""

    def __init__(self, strategy):
        self.strategy = strategy

    def schedule(self, view):
        return self.strategy.decide(view)


class Handle:
    is_recording = True

    def __init__(self):
        self.lines = []

    def record(self, event, **fields):
        self.lines.append(json.loads(json.dumps({"event": event, **fields})))


def fill(fake):
    for number, prompt in enumerate((150, 20, 90, 40, 10)):
        fake.add(number, prompt, 3 + number)
    return fake


def test_the_graph_between_changes_nothing():
    through, direct = Shortest(), Shortest()
    by_graph = fill(FakeEngine(StrategyPlugin(through), blocks=30)).run()
    plain = fill(FakeEngine(Direct(direct), blocks=30)).run()
    assert any(decision.hold for decision in plain.decisions) and any(decision.chunk_tokens for decision in plain.decisions)
    assert by_graph.steps == plain.steps and by_graph.ended == plain.ended
    for ours, theirs in zip(by_graph.decisions, plain.decisions, strict=True):
        assert (ours.hold, ours.phase, ours.chunk_tokens, ours.token_budget) == (
            theirs.hold, theirs.phase, theirs.chunk_tokens, theirs.token_budget
        )  # fmt: skip
        assert (ours.reason, ours.reasons) == (theirs.reason, theirs.reasons)
        held = ours.hold
        assert [each for each in ours.order if each not in held] == [each for each in theirs.order if each not in held]


def test_the_strategy_hears_and_is_asked():
    strategy = Shortest()
    plugin = StrategyPlugin(strategy)
    fake = fill(FakeEngine(plugin)).run()
    assert strategy.heard == list(range(1, fake.step + 1)) and strategy.ended == fake.ended
    report = plugin.report()
    assert report["decisions"] == len(strategy.decided) and report["strategy"] == {"heard": fake.step}
    assert report["left_to_engine"] == 0 and report["nodes"] > report["decisions"]


def test_a_step_that_is_left_to_the_engine_has_no_graph():
    plugin, handle = StrategyPlugin(Leaves()), Handle()
    plugin.attach(handle)
    ours = fill(FakeEngine(plugin)).run()
    assert ours.steps == fill(FakeEngine(Direct(Leaves()))).run().steps and not handle.lines
    assert plugin.report()["left_to_engine"] == len(ours.views)


@pytest.mark.parametrize("record", ["compact", "full", "none"])
def test_decisions_are_recorded_as_graphs(record):
    plugin, handle = StrategyPlugin(Shortest(), record=record), Handle()
    plugin.attach(handle)
    fake = fill(FakeEngine(plugin)).run()
    assert len(handle.lines) == (0 if record == "none" else len(fake.views))
    for line in handle.lines:
        assert line["event"] == "plan" and line["strategy"] == "shortest-of-test" and line["reason"] == "shortest first"
    if record == "compact":
        assert handle.lines[0]["nodes"][0] == ["prefill_chunk", [4], 0, 10]
        assert max(len(json.dumps(line)) for line in handle.lines) < 1500
    elif record == "full":
        assert compact(IRGraph.from_dict(handle.lines[0]["graph"]))[0] == ["prefill_chunk", [4], 0, 10]


def test_nothing_is_written_where_nothing_is_recorded():
    plugin, handle = StrategyPlugin(Shortest()), Handle()
    handle.is_recording = False
    plugin.attach(handle)
    fill(FakeEngine(plugin)).run()
    assert not handle.lines


def hosted(**options):
    spec = PluginSpec(name=f"{StrategyPlugin.__module__}:StrategyPlugin", options=options)
    return PluginHost(HookConfig(plugins=(spec,), time_limit_s=5))


@pytest.mark.parametrize("options, says", [({"fail_at": 4}, "planted"), ({"drop_at": 4}, "name each of them once")])
def test_a_strategy_that_fails_is_replaced_in_the_same_step(options, says):
    host = hosted(strategy=f"{__name__}:Shortest", options=options)
    fake = fill(FakeEngine(Hosted(host)))
    fake.run()
    assert sorted(fake.ended) == [0, 1, 2, 3, 4]
    (fault,) = host.faults
    assert fault.kind == "raised" and says in fault.detail
    assert [view.step for view in fake.views[:5]] == [1, 2, 3, 4, 5]  # the step it failed in was not lost
    after = fake.decisions[3]
    assert not after.hold and after.order == [row.request_id for row in fake.views[3].requests]
    host.close()


def test_fifo_by_name_gives_the_schedule_of_the_engine():
    plain = fill(FakeEngine(Direct(Leaves()), blocks=30)).run()
    ours = fill(FakeEngine(StrategyPlugin("fifo"), blocks=30)).run()
    assert ours.steps == plain.steps and ours.preempted == plain.preempted and ours.ended == plain.ended


@pytest.mark.parametrize("options, says", [
    ({"strategy": "no-such-strategy"}, "no-such-strategy"),
    ({"strategy": 7}, "give a name"),
    ({"strategy": None}, "give a name"),
    ({"strategy": "fifo", "options": [1]}, r"options \[1\]; give"),
    ({"strategy": "fifo", "record": "all"}, "compact, full, none"),
    ({"strategy": f"{__name__}:Shortest", "options": {"chunk": 0}}, "chunk=0"),
    ({"strategy": f"{__name__}:Direct"}, "Direct"),
])  # fmt: skip
def test_bad_options(options, says):
    with pytest.raises(PlanError, match=says):
        StrategyPlugin(**options)
    with pytest.raises(PluginError, match=says):
        hosted(**options)


def test_options_of_a_built_strategy():
    with pytest.raises(PlanError, match="built already"):
        StrategyPlugin(Leaves(), {"a": 1})
