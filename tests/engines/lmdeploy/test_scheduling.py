"""Order, admission, holding and token budgets by a plug-in, on a running engine."""

import asyncio
import logging
import re
import time

import numpy as np
import pytest
import torch

from sagellm.core.config import PluginSpec
from sagellm.core.hooks import Phase, Plugin, ScheduleDecision
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.pool import settle
from tests.reference import make_prompts

SHORT = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = make_prompts((40, 30, 20, 20, 10))
TOGETHER = PluginSpec(name="tests.plugins:Together", options={"count": len(PROMPTS)})
LISTENER = "tests.plugins:Listener"


def run(engine, reference, prompts=PROMPTS):
    assert answers(engine, prompts, SHORT) == reference(prompts, 12)
    assert engine.hooks.report()["faults"] == []


def test_answers_and_requests_pass_while_steps_are_launched(monkeypatch, start_engine, reference):
    """Where launching takes as long as computing, LMDeploy lets neither through before a whole batch has ended."""
    from lmdeploy import sage_device

    from sagellm.engines.lmdeploy.cpu.device import CPU_DEVICE

    async def on_the_loop(step, agent, args, kwargs):
        return await step(agent, *args, **kwargs)

    monkeypatch.setattr(sage_device, "forward_event", lambda event: event)
    monkeypatch.setattr(CPU_DEVICE, "run_step", on_the_loop)
    monkeypatch.setattr(CPU_DEVICE, "push", lambda push, agent, args, kwargs: push(agent, *args, **kwargs))
    engine = start_engine(decode_round=16)
    found = engine.generate(PROMPTS, [SamplingParams(400, ignore_eos=True)] * 4 + [SHORT], delays_s=[0, 0, 0, 0, 0.05])
    assert [each.token_ids[:12] for each in found] == reference(PROMPTS, 12)
    end_s = found[0].token_s[-1]
    assert len(set(found[0].token_s)) > 4 and found[0].token_s[0] < end_s / 2
    assert 0.05 + found[-1].token_s[-1] < end_s


@pytest.mark.parametrize("plugin", [None, "tests.plugins:LastFirst"])
def test_the_order_decides_who_finishes_first(start_engine, reference, plugin):
    extra = [plugin] if plugin else []
    engine = start_engine(LISTENER, TOGETHER, *extra, max_batch_size=1)
    run(engine, reference)
    ended = plugin_of(engine).ended
    assert ended == sorted(ended, reverse=plugin is not None)


@pytest.mark.parametrize("plugin", [None, "tests.plugins:LastFirst"])
def test_the_order_decides_who_is_preempted(start_engine, reference, plugin):
    together = PluginSpec(name="tests.plugins:Together", options={"count": len(CROWD)})
    engine = start_engine(together, *([plugin] if plugin else []), kv_blocks=30)
    preempted = []
    original = engine.hooks.preempted
    engine.hooks.preempted = lambda seq: preempted.append(seq.session_id) or original(seq)
    assert answers(engine, CROWD) == reference(CROWD, 40)
    assert engine.hooks.report()["faults"] == []
    assert preempted
    most_urgent = len(CROWD) - 1 if plugin else 0
    assert most_urgent not in preempted


def test_admission_is_asked_again_until_it_is_given(start_engine, reference, monkeypatch):
    # The one that orders the queue is not told of those who may not join it yet.
    engine = start_engine("tests.plugins:LastFirst", PluginSpec(name="tests.plugins:Defer", options={"times": 3}))
    guard, hand_overs = list(engine.hooks._host.guards.values())[1], []
    ask = guard.ask
    monkeypatch.setattr(guard, "ask", lambda hook, *rest: hand_overs.append(hook) or ask(hook, *rest))
    run(engine, reference)
    asked = plugin_of(engine, 1).asked
    assert set(asked.values()) == {4}
    assert hand_overs.count("admit") < sum(asked.values()), "several at once"


def test_an_idle_engine_looks_again_soon_for_requests_that_were_held_back(start_engine, reference, monkeypatch):
    """LMDeploy sleeps for a tenth of a second when nothing can run, and warns that its cache may be full."""
    pauses, warned = [], []
    sleep = asyncio.sleep

    async def spied(delay, *rest):
        pauses.append(delay)
        return await sleep(delay, *rest)

    engine = start_engine("tests.plugins:AtAdmission")
    monkeypatch.setattr(asyncio, "sleep", spied)
    monkeypatch.setattr(logging.getLogger("lmdeploy"), "warning", lambda text, *rest: warned.append(text))
    plugin_of(engine).jobs = [lambda handle: False] * 20
    assert answers(engine, PROMPTS[:1], SHORT) == reference(PROMPTS[:1], 12)
    assert plugin_of(engine).jobs == [] and len(pauses) >= 20
    assert max(pauses) <= 0.02 and warned == []


@pytest.mark.parametrize("phase", list(Phase))
def test_a_held_request_stands_still_and_then_goes_on(start_engine, reference, phase):
    hold = PluginSpec(name="tests.plugins:Hold", options={"phase": phase.value, "steps": 4})
    engine = start_engine(TOGETHER, hold)
    run(engine, reference)
    plugin = plugin_of(engine, 1)
    assert plugin.left == 0
    assert len(set(plugin.progress)) == 1, "the held request went on"
    if phase is Phase.DECODE:
        assert plugin.others == sorted(set(plugin.others)), "the others did not go on"


def test_budgets_bound_every_step(start_engine, reference):
    budget = PluginSpec(name="tests.plugins:Budget", options={"prefill": 50, "decode": 2})
    engine = start_engine(TOGETHER, budget, prefix_caching=False)
    run(engine, reference)
    steps = plugin_of(engine, 1).steps
    prefills = [step for step in steps if step.phase is Phase.PREFILL]
    decodes = [step for step in steps if step.phase is Phase.DECODE]
    assert sum(step.num_tokens for step in prefills) == sum(map(len, PROMPTS))
    assert all(step.num_tokens <= 50 for step in prefills) and len(prefills) >= 3
    assert {step.num_requests for step in decodes} == {1, 2}
    assert all(step.num_tokens == step.num_requests for step in decodes)
    assert sum(step.num_tokens for step in decodes) == 11 * len(PROMPTS)


def test_the_first_request_runs_whatever_the_budget(start_engine, reference):
    budget = PluginSpec(name="tests.plugins:Budget", options={"prefill": 1, "decode": 1})
    engine = start_engine(TOGETHER, budget)
    run(engine, reference)
    assert {step.num_requests for step in plugin_of(engine, 1).steps} == {1}


def test_steps_count_the_tokens_that_were_computed(start_engine, reference):
    engine = start_engine(LISTENER)
    run(engine, reference, PROMPTS[:1])
    run(engine, reference, PROMPTS[:1])
    prefills = [step for step in plugin_of(engine).steps if step.phase is Phase.PREFILL]
    assert [step.num_tokens for step in prefills] == [40, 40 - 32]


def test_the_view_tells_the_truth(start_engine, reference, monkeypatch):
    engine = start_engine(TOGETHER, "tests.plugins:LastFirst")
    views = []
    plugin = plugin_of(engine, 1)
    original = plugin.schedule
    plugin.schedule = lambda view: views.append(view) or original(view)
    run(engine, reference)
    settle(engine)
    full = next(v for v in views if v.phase is Phase.PREFILL and len(v.requests) == len(PROMPTS))
    by_id = sorted(full.requests, key=lambda r: r.request_id)
    assert [request.num_tokens for request in by_id] == [len(prompt) for prompt in PROMPTS]
    assert {(r.num_computed, r.num_generated, r.num_blocks) for r in by_id} == {(0, 0, 0)}
    assert full.token_budget == 512
    assert full.free_blocks == 64
    last = next(v for v in reversed(views) if v.phase is Phase.DECODE)
    assert {request.num_generated for request in last.requests} == {11}
    assert all(r.num_computed == r.num_tokens - 1 for r in last.requests)
    assert [view.step for view in views] == sorted({view.step for view in views})


@pytest.mark.parametrize(("answer", "decodes"), [(ScheduleDecision(), 11), (None, 1)], ids=["each step", "left alone"])
def test_none_stands_until_the_requests_change(start_engine, reference, monkeypatch, answer, decodes):
    monkeypatch.setattr("sagellm.engines.lmdeploy.step_choice.COALESCE_S", 60.0)
    engine = start_engine("tests.plugins:LastFirst")
    views = []
    plugin_of(engine).schedule = lambda view: views.append(view) or answer
    for number in (1, 2):  # the second run has other requests, so it is asked about anew
        run(engine, reference, PROMPTS[:1])
        assert [view.phase for view in views] == [Phase.PREFILL, *[Phase.DECODE] * decodes] * number


def test_none_stands_for_a_moment_only(start_engine, reference, monkeypatch):
    monkeypatch.setattr("sagellm.engines.lmdeploy.step_choice.COALESCE_S", 0.0)
    engine = start_engine("tests.plugins:LastFirst")
    views = []
    plugin_of(engine).schedule = views.append
    run(engine, reference, PROMPTS[:1])
    assert len(views) == 12


def test_steps_are_told_in_order_with_the_time_of_their_end(start_engine, reference):
    engine = start_engine(LISTENER)
    before_s = time.perf_counter()
    run(engine, reference)
    after_s = time.perf_counter()
    steps = plugin_of(engine).steps
    times = [step.end_s for step in steps]
    assert times == sorted(times) and before_s < times[0] and times[-1] < after_s
    assert [step.step for step in steps] == sorted(step.step for step in steps)
    assert sum(step.num_tokens for step in steps if step.phase is Phase.DECODE) == 11 * len(PROMPTS)


@pytest.mark.parametrize("caching", [True, False])
def test_steps_carry_the_numbers_under_which_they_were_chosen(start_engine, reference, caching):
    """Also when a request is computed again after a preemption, and while the next step is chosen ahead."""
    together = PluginSpec(name="tests.plugins:Together", options={"count": len(CROWD)})
    engine = start_engine(LISTENER, together, "tests.plugins:LastFirst", kv_blocks=30, prefix_caching=caching)
    sent = []
    original = engine.hooks.dispatch

    def dispatch(running, num_loops):
        sent.append((engine.hooks.choice._step + 1, len(running), sum(seq.num_token_ids for seq in running)))
        return original(running, num_loops)

    engine.hooks.dispatch = dispatch
    assert answers(engine, CROWD) == reference(CROWD, 40)
    assert engine.hooks.report()["preempted"] > 0
    assert [(step.step, step.num_requests, step.num_tokens) for step in plugin_of(engine).steps] == sent


def test_holding_now_and_then_is_no_fault(start_engine, reference):
    """The clock of a held request stands still while the request runs."""
    engine = start_engine("tests.plugins:LastFirst", decode_round=1, hold_limit_s=0.6)
    plugin, calls = plugin_of(engine), []

    def schedule(view):
        calls.append(view)
        if view.phase is Phase.DECODE and len(calls) in (3, 9):
            return ScheduleDecision(hold=frozenset([view.requests[0].request_id]))
        if len(calls) == 6:
            time.sleep(0.7)
        return ScheduleDecision()

    plugin.schedule = schedule
    run(engine, reference, PROMPTS[:1])
    assert len(calls) > 9


def test_numbers_of_other_libraries_are_numbers(start_engine, reference):
    defer = PluginSpec(name="tests.plugins:Defer", options={"times": 0})
    engine = start_engine("tests.plugins:LastFirst", defer)
    first, second = plugin_of(engine), plugin_of(engine, 1)
    second.admit = lambda request: np.True_
    first.schedule = lambda view: ScheduleDecision(
        order=torch.tensor([request.request_id for request in view.requests]), token_budget=np.int64(400)
    )
    run(engine, reference)


@pytest.mark.parametrize(
    ("name", "hook"), [("tests.plugins:HoldForever", "schedule"), ("tests.plugins:NeverAdmit", "admit")]
)
def test_waiting_has_an_end(start_engine, reference, name, hook):
    engine = start_engine(name, hold_limit_s=0.3)
    assert answers(engine, PROMPTS, SHORT) == reference(PROMPTS, 12)
    assert engine.hooks.report()["faults"] == [[name, hook, "nonsense", 1]]
    assert engine.hooks.report()["enabled"] == {name: False}
    assert re.search(r"was kept waiting for \d", engine.hooks._host.faults[0].detail)


class AdmitsThenRaises(Plugin):
    """Refuses the first request, and fails when it is asked about the second."""

    def __init__(self):
        self.first = None

    def admit(self, request):
        if self.first is None:
            self.first = request.request_id
        if request.request_id != self.first:
            raise RuntimeError("planted")
        return False


def test_who_was_refused_by_one_that_failed_is_served_all_the_same(start_engine, reference):
    """The other one's decision about the step does not name him."""
    engine = start_engine(f"{__name__}:AdmitsThenRaises", "tests.plugins:LastFirst")
    assert answers(engine, PROMPTS, SHORT) == reference(PROMPTS, 12)
    (fault,) = engine.hooks.report()["faults"]
    assert fault[1] == "admit"


class HoldsWhoRuns(Plugin):
    """Holds everybody who decodes, until somebody new has come."""

    def __init__(self):
        self.seen = set()

    def schedule(self, view):
        running = [request.request_id for request in view.running]
        self.seen.update(request.request_id for request in view.requests)
        return ScheduleDecision(hold=frozenset(running if len(self.seen) < 3 else ()))


def test_others_begin_while_all_who_run_are_held(start_engine, reference):
    """Two of three at most run, so that LMDeploy would decode on; held, they leave the step to the third."""
    engine = start_engine(f"{__name__}:HoldsWhoRuns", max_batch_size=3, decode_round=1)
    prompts = PROMPTS[:3]
    began_s = time.monotonic()
    assert [found.token_ids for found in engine.generate(prompts, SHORT, [0, 0, 0.3])] == reference(prompts, 12)
    assert time.monotonic() - began_s < 20 and engine.hooks.report()["faults"] == []
