"""Tests of strategies and plans in the real engine: the tokens stay the same, nothing is lost, the schedule is as asked."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.processes import wait_until
from sagellm.core.config import PluginSpec
from sagellm.core.errors import ConfigError, PlanError
from sagellm.core.hooks import Phase, ScheduleDecision
from sagellm.core.service import ServiceRequest
from sagellm.engines.base import SamplingParams
from sagellm.replay.schedule.decisions import read_decisions
from sagellm.replay.schedule.verify import verify_schedule
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan
from sagellm.scheduler_ir.strategies.fifo import Fifo
from sagellm.scheduler_ir.strategies.registry import strategy_names
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin
from tests.engines.lmdeploy.guesses import KNOWING, tell
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.pool import settle
from tests.reference import make_prompts
from tests.sweeps import slow_but

HERE = "tests.engines.lmdeploy.test_strategies"
LISTENER = "tests.plugins:Listener"
PROMPTS = make_prompts((40, 90, 20, 33, 10))
SHORT = SamplingParams(max_new_tokens=12, ignore_eos=True)


IN_PARTS = {"target_itl_s": 0.001, "max_overhead": 0.9}


def together(count: int) -> PluginSpec:
    return PluginSpec(name="tests.plugins:Together", options={"count": count})


class RaisesLate(Fifo):
    name = "raises_late"

    def decide(self, view):
        if view.step > 6:
            raise RuntimeError("planted")
        return super().decide(view)


class DropsLate(Fifo):
    name = "drops_late"

    def decide(self, view):
        ids = [request.request_id for request in view.requests]
        return ScheduleDecision(order=ids[1:] if view.step > 6 else ids)


@pytest.mark.parametrize("name", strategy_names())
def test_the_tokens_are_the_same_whoever_schedules(start_engine, reference, name):
    engine = start_engine(strategy=name, decode_round=1)
    assert answers(engine, PROMPTS, SHORT) == reference(PROMPTS, 12)
    assert engine.hooks.report()["faults"] == []


def asked_for(number: int) -> ServiceRequest | None:
    """Something else of each of four, nothing of the last."""
    due = time.time() + 3
    return (
        ServiceRequest(priority=2, tenant="a"), ServiceRequest(tenant="b", ttft_slo_ms=300, tpot_slo_ms=7.3),
        ServiceRequest(deadline=due), None,
    )[number % 4]  # fmt: skip


NAMES = ["fifo", "slo_aware", "adaptive", "fair", "hybrid", "aegaeon", f"{HERE}:EveryOther"]


@pytest.mark.parametrize("name", slow_but(NAMES, "fifo", "slo_aware", f"{HERE}:EveryOther"))
def test_under_pressure_too(start_engine, reference, tmp_path, monkeypatch, name):
    """And each decision can be made again from its line, by a strategy that is told what lines say."""
    seen, schedule = [], StrategyPlugin.schedule
    monkeypatch.setattr(StrategyPlugin, "schedule", lambda self, view: seen.append(view) or schedule(self, view))
    record = tmp_path / "events.jsonl"
    options = {"adaptive": IN_PARTS, "hybrid": IN_PARTS, "aegaeon": {"batch_size": 3}}.get(name, {})
    engine = start_engine(
        together(len(CROWD)), strategy=name, strategy_options=options, kv_blocks=30, decode_round=1, record=record
    )
    params = [SamplingParams(40, ignore_eos=True, service=asked_for(number)) for number in range(len(CROWD))]
    assert answers(engine, CROWD, params) == reference(CROWD, 40)
    report = engine.hooks.report()
    assert report["faults"] == [] and report["preempted"] > 0
    assert report["chunks"] > 0 or not name.endswith("EveryOther")  # whether others cut is a matter of the machine's speed
    engine.close()
    lines = read_decisions(record)
    assert [line.view for line in lines] == seen
    monkeypatch.undo()
    found = verify_schedule(record)
    assert found.agrees and found.num_decisions == len(seen) and found.num_ends == len(CROWD) and not found.num_open
    assert (found.num_left > 3) == name.endswith("EveryOther") and found.num_steps > 40
    assert all(line.phase is not None for line in lines) or found.num_unsent


class EveryOther(Fifo):
    """Cuts prompts, and leaves every other step to the engine, by what it was told."""

    name = "every_other"

    def __init__(self):
        self.told, self.last = 0, None

    def decide(self, view):
        chunks = {request.request_id: 16 for request in view.waiting}
        return None if self.told % 2 else replace(super().decide(view), chunk_tokens=chunks, reason=repr(self.last))

    def on_step_end(self, result):
        self.told, self.last = self.told + 1, result


def test_fifo_does_step_by_step_what_the_engine_does(start_engine, reference):
    """Through graph, passes and lowering, with preemption and recomputation."""
    steps = []
    for strategy in (None, "fifo"):
        engine = start_engine(LISTENER, together(len(CROWD)), strategy=strategy, kv_blocks=30, decode_round=1)
        assert answers(engine, CROWD) == reference(CROWD, 40)
        settle(engine)
        assert engine.hooks.report()["preempted"] > 0
        steps.append([(step.phase, step.computed) for step in plugin_of(engine).steps])
    assert steps[0] == steps[1] and len(steps[0]) > 40


@pytest.mark.parametrize("name", ["RaisesLate", "DropsLate"])
def test_one_that_fails_is_replaced_in_the_same_step(start_engine, reference, name):
    engine = start_engine(LISTENER, strategy=f"{HERE}:{name}", decode_round=1)
    assert answers(engine, PROMPTS, SHORT) == reference(PROMPTS, 12)
    settle(engine)
    (fault,) = engine.hooks.report()["faults"]
    assert fault[1] == "schedule" and engine.hooks._host.decides("schedule") is False
    numbers = [step.step for step in plugin_of(engine).steps]
    assert numbers == list(range(1, len(numbers) + 1)), "no step was missed"


def test_the_most_urgent_end_first(start_engine, reference):
    engine = start_engine(LISTENER, together(len(PROMPTS)), strategy="priority", max_batch_size=1)
    urgency = (5, -7, 0, -100, 3)
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, service=ServiceRequest(priority=each)) for each in urgency
    ]
    assert answers(engine, PROMPTS, params) == reference(PROMPTS, 12)
    ended = plugin_of(engine).ended
    assert ended == sorted(ended, key=lambda request: urgency[request])


def test_a_strategy_that_cannot_be_is_refused_before_a_model_is_loaded(start_engine):
    started = time.monotonic()
    with pytest.raises(PlanError, match="known are: .*slo_aware"):
        start_engine(strategy="nonsense")
    with pytest.raises(PlanError, match="max_overhead"):
        start_engine(strategy="adaptive", strategy_options={"max_overhead": 5})
    with pytest.raises(ConfigError, match="there is no strategy"):
        start_engine(strategy_options={"max_overhead": 0.5})
    assert time.monotonic() - started < 30


def prefill(request, start, tokens, after=""):
    name = f"kv:{request}:{start + tokens}"
    config = {"request": request, "start": start, "tokens": tokens}
    return IRNode(f"prefill:{request}:{start}", NodeType.PREFILL_CHUNK, (after,) if after else (), (name,), config)


def decode(request, tokens, after):
    return IRNode(
        f"decode:{request}:{tokens}", NodeType.DECODE_STEP, (after,), (f"kv:{request}:{tokens}",), {"requests": [request]}
    )


def test_a_plan_is_carried_out_node_by_node(start_engine, reference, tmp_path):
    """The later request first; then parts of the other prompt, a decode step between them."""
    prompts = PROMPTS[:3:2]  # of 40 and 20 tokens
    nodes = [
        prefill(1, 0, 20), decode(1, 21, "kv:1:20"), prefill(0, 0, 16, "kv:1:21"), decode(1, 22, "kv:0:16"),
        prefill(0, 16, 16, "kv:1:22"), decode(1, 23, "kv:0:32"), prefill(0, 32, 8, "kv:1:23"),
    ]  # fmt: skip
    record = tmp_path / "events.jsonl"
    engine = start_engine(LISTENER, together(2), strategy="fifo", decode_round=1, prefix_caching=False, record=record)
    plans = engine.executor
    plans.submit_plan(ExecutionPlan("by hand", IRGraph(nodes), (0, 1)))
    assert answers(engine, prompts, SHORT) == reference(prompts, 12)
    settle(engine)
    status = plans.status("by hand")
    assert status.refused() == {} and status.state.value == "done"
    steps = [(step.phase, step.computed) for step in plugin_of(engine).steps]
    assert steps[:7] == [
        (Phase.PREFILL, ((1, 20),)), (Phase.DECODE, ((1, 1),)), (Phase.PREFILL, ((0, 16),)), (Phase.DECODE, ((1, 1),)),
        (Phase.PREFILL, ((0, 16),)), (Phase.DECODE, ((1, 1),)), (Phase.PREFILL, ((0, 8),)),
    ]  # fmt: skip
    with pytest.raises(PlanError, match="by hand"):
        plans.submit_plan(ExecutionPlan("by hand", IRGraph(nodes), (0, 1)))
    with pytest.raises(PlanError):
        plans.cancel("by hand")
    engine.close()
    found = verify_schedule(record)
    assert found.agrees and found.num_plans == 1 and found.num_decisions > 7


def test_a_plan_stores_blocks_of_a_request_that_ends(start_engine, reference):
    """They move to the host tier, and come back for the next request of that prompt."""
    prompt = make_prompts((70,), seed=5)
    store = IRNode("store", NodeType.KV_STORE, ("kv:0:70",), ("kv:0:70@cpu",), {
        "request": 0, "start": 16, "tokens": 54, "src_tier": "gpu", "dst_tier": "cpu", "bytes": 0
    })  # fmt: skip
    below = IRNode("disk", NodeType.KV_STORE, (), ("x",), store.config | {"dst_tier": "nvme"})
    engine = start_engine(strategy="fifo", decode_round=1, host_kv_blocks=8)
    submitted = engine.executor.submit_plan(ExecutionPlan("p", IRGraph([prefill(0, 0, 70), store, below]), (0,)))
    assert submitted.refused() == {"disk": "a plan stores from gpu to cpu, not gpu -> nvme; policies do the rest"}
    assert answers(engine, prompt, SHORT) == reference(prompt, 12)
    settle(engine)
    node = engine.executor.status("p").nodes["store"]
    assert (node.state.value, node.detail) == ("done", "3 blocks of 16 tokens moved to cpu")
    assert engine.hooks.kv.counts().host_used == 3
    assert answers(engine, prompt, SHORT) == reference(prompt, 12)
    report = engine.hooks.report()
    assert report["migrated"] == {"gpu": 3, "cpu": 3} and report["faults"] == []


def test_a_plan_without_a_host_tier_says_so(start_engine, reference):
    store = IRNode("store", NodeType.KV_STORE, (), ("x",), {
        "request": 0, "start": 0, "tokens": 32, "src_tier": "gpu", "dst_tier": "cpu", "bytes": 0
    })  # fmt: skip
    engine = start_engine(strategy="fifo", decode_round=1)
    engine.executor.submit_plan(ExecutionPlan("p", IRGraph([prefill(0, 0, 40), store]), (0,)))
    assert answers(engine, PROMPTS[:1], SHORT) == reference(PROMPTS[:1], 12)
    settle(engine)
    assert "no host tier" in engine.executor.status("p").refused()["store"]


def test_a_plan_checks_guesses_and_decodes_single_tokens(start_engine, reference):
    """Two steps of at most 3 guesses, then three of one token, on a text that the strategy knows."""
    prompts = PROMPTS[:1]
    expected = reference(prompts, 12)
    tell(prompts, expected)
    nodes = [prefill(0, 0, 40)]
    for number, most in enumerate((3, 3)):
        nodes.append(IRNode(f"check{number}", NodeType.VERIFY, nodes[-1].outputs, (f"c{number}",), {
            "requests": [0], "drafts": [most]
        }))  # fmt: skip
    for number in range(3):
        nodes.append(IRNode(f"decode{number}", NodeType.DECODE_STEP, nodes[-1].outputs, (f"d{number}",), {"requests": [0]}))
    guesses = {"speculative": KNOWING, "speculative_options": {"wrong": 0.0, "lookahead": 6, "seed": 3}}
    engine = start_engine(LISTENER, strategy="fifo", decode_round=1, prefix_caching=False, **guesses)
    engine.executor.submit_plan(ExecutionPlan("p", IRGraph(nodes), (0,)))
    assert answers(engine, prompts, SHORT) == expected
    settle(engine)
    status = engine.executor.status("p")
    assert status.refused() == {} and status.state.value == "done"
    counts = [tokens for step in plugin_of(engine).steps if step.phase is Phase.DECODE for _, tokens in step.computed]
    assert max(counts[:2]) > 1 and max(counts[:2]) <= 4 and counts[2:5] == [1, 1, 1]
    for place in range(2):
        assert f"got {counts[place]} tokens" in status.nodes[f"check{place}"].detail
    assert sum(counts) == 11


def test_a_plan_asks_for_guesses_of_an_engine_that_makes_none(start_engine, reference):
    verify = IRNode("check", NodeType.VERIFY, ("kv:0:40",), ("c",), {"requests": [0], "drafts": [3]})
    engine = start_engine(strategy="fifo", decode_round=1)
    engine.executor.submit_plan(ExecutionPlan("p", IRGraph([prefill(0, 0, 40), verify]), (0,)))
    assert answers(engine, PROMPTS[:1], SHORT) == reference(PROMPTS[:1], 12)
    settle(engine)
    assert "start it with a speculative strategy" in engine.executor.status("p").refused()["check"]


def test_a_plan_from_another_thread_is_cancelled_while_the_strategy_goes_on(start_engine, reference, tmp_path):
    """The plan holds request 0 until one that never comes; cancelled, it leaves the request to the strategy."""
    record = tmp_path / "events.jsonl"
    engine = start_engine(together(2), strategy="shortest", decode_round=1, prefix_caching=False, record=record)
    nodes = [prefill(0, 0, 16), prefill(9, 0, 16, "kv:0:16"), prefill(0, 16, 24, "kv:9:16")]
    queued = engine.executor.submit_plan(ExecutionPlan("held", IRGraph(nodes), (0, 9)))
    assert queued.state.value == "queued"
    with pytest.raises(PlanError, match="request 0 is of plan held"):
        engine.executor.submit_plan(ExecutionPlan("second", IRGraph(nodes[:1]), (0,)))
    prompts = PROMPTS[:3:2]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answers, engine, prompts, SHORT)
        wait_until("the plan runs", lambda: engine.executor.status("held").state.value == "running")
        assert engine.executor.cancel("held").state.value == "cancelled"
        assert waiting.result(60) == reference(prompts, 12)
    settle(engine)
    states = {name: node.state.value for name, node in engine.executor.status("held").nodes.items()}
    assert "cancelled" in states.values() and not set(states.values()) & {"waiting", "running"}
    report = engine.hooks.report()
    (figures,) = (values for name, values in report["plugins"].items() if "StrategyPlugin" in name)
    assert figures["plans"] == 1 and figures["active"] == 0
    assert 0 < figures["outcomes"]["carried_out_share"] <= 1 and figures["outcomes"]["steps"] > 0
    assert report["faults"] == []
    after = ExecutionPlan("after", IRGraph([prefill(2, 0, 16), prefill(2, 16, 24, "kv:2:16")]), (2,))
    engine.executor.submit_plan(after)
    assert answers(engine, PROMPTS[:1], SHORT) == reference(PROMPTS[:1], 12)
    settle(engine)
    assert engine.executor.status("after").state.value == "done" and not engine.executor.status("after").refused()
    engine.close()
    found = verify_schedule(record)
    assert found.agrees, found.differences[:3]
    assert found.num_plans == 2


def test_an_engine_without_a_strategy_says_how_to_get_an_executor(start_engine):
    with pytest.raises(ConfigError, match="strategy='fifo'"):
        _ = start_engine().executor
