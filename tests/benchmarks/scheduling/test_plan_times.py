"""Tests of the reported cost of a plan, on an engine whose times can be worked out by hand."""

import pytest
from click.testing import CliRunner

from benchmarks import plan_cost
from benchmarks.scheduling import plan_times
from benchmarks.scheduling.plan_times import PlanTimes, figures
from benchmarks.scheduling.workloads import crowd
from sagellm.core.config import HookConfig, PluginSpec
from sagellm.core.hooks import Phase, StepResult
from sagellm.core.host import PluginHost
from sagellm.scheduler_ir import strategy_plugin
from sagellm.scheduler_ir.strategies.registry import find_strategy
from tests.scheduler_ir.made import running, view, waiting


class Clock:
    """Each part takes what is said here; of anything else the clock sees nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def thread_time(self) -> float:
        return self.now_s

    perf_counter = thread_time

    def slow(self, monkeypatch, owner, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def slowed(*arguments, **options):
            self.now_s += seconds
            return original(*arguments, **options)

        is_build = name == "build"
        monkeypatch.setattr(owner, name, staticmethod(slowed) if is_build else slowed)


def test_times_of_a_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(plan_times, "time", clock)
    parts = [
        (find_strategy("fifo"), "decide", 1.0), (strategy_plugin.IRBuilder, "build", 2.0),
        (strategy_plugin.IRGraph, "optimize", 4.0), (strategy_plugin, "lower", 8.0),
        (strategy_plugin.StrategyPlugin, "_write", 16.0),
    ]  # fmt: skip
    for owner, name, seconds in parts:
        clock.slow(monkeypatch, owner, name, seconds)
    # `watch` replaces these for the rest of the process; here they come back.
    for owner, name in (
        (strategy_plugin.StrategyPlugin, "schedule"),
        (strategy_plugin.StrategyPlugin, "on_step_end"),
        (PluginHost, "decide"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    times = PlanTimes()
    times.watch("fifo")
    spec = PluginSpec(name="sagellm.scheduler_ir.strategy_plugin:StrategyPlugin", options={"strategy": "fifo"})
    host = PluginHost(HookConfig(plugins=(spec,), time_limit_s=5))
    queue = view(waiting(1, 5), running(2, 5))

    def check(answer):
        clock.now_s += 32.0
        return answer

    for _ in range(2):  # a step that was not sent is asked about again
        host.decide("schedule", queue, check)
    host.decide("schedule", queue._replace(step=2), check)  # has not ended
    host.notify("on_step_end", StepResult(1, Phase.PREFILL, 1, 5, 0.0, 630.0))
    host.close()
    (row,) = times.take()
    assert row == {
        "decide": 2.0, "build": 4.0, "optimize": 8.0, "lower": 16.0, "hook": 62.0, "hook_wall": 62.0, "question": 126.0,
        "requests": 2, "waiting": 1, "step_s": 630.0, "phase": "prefill",
    }  # fmt: skip
    found = figures([row])
    assert found["build_us"] == {"median": 4e6, "p99": 4e6, "least": 4e6} and found["share"] == pytest.approx(0.2)
    assert not times.take(), "what was taken is forgotten"


def test_steps_of_a_phase():
    rows = [dict(requests=8, waiting=0), dict(requests=8, waiting=2), dict(requests=5, waiting=0)]
    assert plan_cost.of_phase(rows, "decoding", 8) == rows[:1] and plan_cost.of_phase(rows, "arrivals", 8) == rows[1:2]
    assert "no such step" in plan_cost.line("fifo", "decoding", figures([]))


def test_the_late_ones_of_a_crowd():
    jobs = crowd(1, 6, 3, 9, late=2, late_s=4.0)
    assert [job.arrival_s for job in jobs] == [0.0] * 4 + [2.0, 4.0]
    assert {(len(job.prompt), job.new_tokens) for job in jobs} == {(3, 9)} and jobs[0].prompt != jobs[1].prompt


def test_an_unknown_strategy(monkeypatch):
    monkeypatch.setattr(plan_cost, "write_shape", lambda folder, shape: pytest.fail("something is measured"))
    done = CliRunner().invoke(plan_cost.main, ["--strategy", "fifo,nobody"])
    assert done.exit_code == 2 and "nobody" in done.output and "slo_aware" in done.output
