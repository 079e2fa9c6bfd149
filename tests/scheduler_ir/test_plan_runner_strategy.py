"""A strategy for the requests of no plan."""

import pytest

from sagellm.core.config import HookConfig, PluginSpec
from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, ScheduleDecision
from sagellm.core.host import PluginHost
from sagellm.scheduler_ir.plan import PlanState
from sagellm.scheduler_ir.plan_runner import PlanRunner
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from tests.scheduler_ir.fake_engine import FakeEngine
from tests.scheduler_ir.hosted import Hosted
from tests.scheduler_ir.made_plans import plan, prefill, start, states

PREFILL = Phase.PREFILL


class LastFirst(SchedulingStrategy):
    name = "last-first"

    def decide(self, view):
        ids = [row.request_id for row in view.requests]
        cut = {row.request_id: 10 for row in view.waiting[-1:] if row.num_tokens - row.num_computed > 10}
        return ScheduleDecision(ids[::-1], phase=PREFILL if view.waiting else None, chunk_tokens=cut, reason="last first")


class Raises(SchedulingStrategy):
    name = "raises"

    def decide(self, view):
        raise RuntimeError("planted")


def test_a_strategy_orders_who_is_in_no_plan_and_cuts_where_no_plan_begins_the_step():
    wanted = plan("p", prefill("a", 1, 0, 60), prefill("b", 1, 60, 40, ["a"]))
    runner, fake = start(wanted, requests=[(1, 100), (2, 20), (3, 20)], options={"strategy": LastFirst()})
    fake.run()
    assert fake.steps[:3] == [(PREFILL, {1: 60, 2: 20}), (PREFILL, {1: 40}), (PREFILL, {3: 10})]
    assert states(runner) == {"a": "done", "b": "done"} and sorted(fake.ended) == [1, 2, 3]


class RaisesInRunner(PlanRunner):
    def __init__(self):
        super().__init__(strategy=Raises(), wait_for_requests=True)


def test_a_strategy_that_raises_costs_no_request_and_the_plan_says_so():
    host = PluginHost(HookConfig(plugins=(PluginSpec(name=f"{__name__}:RaisesInRunner"),), time_limit_s=5))
    runner = host.plugins[0][1]
    runner.submit_plan(plan("p", prefill("a", 1, 0, 60), prefill("b", 1, 60, 40, ["a"])))
    fake = FakeEngine(Hosted(host))
    fake.add(1, 100)
    fake.add(2, 100)
    fake.run()
    assert sorted(fake.ended) == [1, 2] and [fault.kind for fault in host.faults] == ["raised"]
    assert list(fake.steps[0][1]) == [1, 2]  # the engine's own order in the very step
    host.close()
    assert runner.status("p").state is PlanState.CANCELLED


@pytest.mark.parametrize("options, says", [
    ({"strategy": 42}, "give a name, module:Class, or a SchedulingStrategy"),
    ({"strategy": LastFirst}, "give a name, module:Class, or a SchedulingStrategy"),
    ({"strategy_options": {"ageing_s": 1.0}}, "strategy_options .* without a strategy"),
    ({"strategy": LastFirst(), "strategy_options": {"ageing_s": 1.0}}, "strategy_options .* built already"),
    ({"strategy": "no-such-strategy"}, "no-such-strategy"),
    ({"strategy": "priority", "strategy_options": {"ageing_s": -1}}, "ageing_s"),
    ({"strategy": "priority", "strategy_options": [1]}, r"strategy_options \[1\]; give"),
])  # fmt: skip
def test_bad_options(options, says):
    with pytest.raises(PlanError, match=says):
        PlanRunner(**options)


def test_options_reach_the_strategy():
    assert PlanRunner(strategy="priority", strategy_options={"ageing_s": 1.0})._strategy.ageing_s == 1.0
    assert PlanRunner(strategy_options={})._strategy is None
