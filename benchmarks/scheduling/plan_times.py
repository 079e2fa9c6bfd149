"""Cost of a plan in the engine: seconds of each part of the `schedule` hook, beside those of the step."""

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.scheduling import engine

# CPU seconds of the plug-in's thread in a row; the hook includes the others. Wall-clock times are `hook_wall`, `step_s`, and
# `question`: the hand-over to the plug-in's thread, the hook, the check of its answer.
PARTS = ("decide", "build", "optimize", "lower", "hook")
Steps = Sequence[dict[str, Any]]


class PlanTimes:
    """A row for each step: `requests` and `waiting` of the queue when the last question about it was asked, `phase` of what
    the engine did, and the times above. A step that was asked about twice has both in its times."""

    def __init__(self) -> None:
        self._now: dict[str, float] = defaultdict(float)  # of the hook that runs
        self._rows: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(float))

    def watch(self, strategy: str) -> None:
        """Measure every engine of this process from now on, under this strategy."""
        from sagellm.core.host import PluginHost
        from sagellm.scheduler_ir import strategy_plugin
        from sagellm.scheduler_ir.strategies.registry import find_strategy

        self._wrap(find_strategy(strategy), "decide", self._timed("decide"))
        self._wrap(strategy_plugin.IRBuilder, "build", self._timed("build"))
        self._wrap(strategy_plugin.IRGraph, "optimize", self._timed("optimize"))
        self._wrap(strategy_plugin, "lower", self._timed("lower"))
        self._wrap(strategy_plugin.StrategyPlugin, "schedule", self._hook)
        self._wrap(strategy_plugin.StrategyPlugin, "on_step_end", self._step)
        self._wrap(PluginHost, "decide", self._question)

    def take(self) -> list[dict[str, Any]]:
        """The steps that were asked about and have ended, and forget all."""
        rows = [dict(row) for _, row in sorted(self._rows.items()) if "hook" in row and "step_s" in row]
        self._rows.clear()
        return rows

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            return around(original, *arguments, **options)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)

    def _timed(self, part: str) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            start_s = time.thread_time()
            try:
                return original(*arguments, **options)
            finally:
                self._now[part] += time.thread_time() - start_s

        return around

    def _hook(self, original: Callable[..., Any], plugin: Any, view: Any) -> Any:
        self._now.clear()
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        answer = original(plugin, view)
        self._now["hook"] = time.thread_time() - cpu_s
        self._now["hook_wall"] = time.perf_counter() - start_s
        row = self._rows[view.step]
        for part, seconds in self._now.items():
            row[part] += seconds
        row["requests"], row["waiting"] = len(view.requests), len(view.waiting)
        return answer

    def _step(self, original: Callable[..., Any], plugin: Any, result: Any) -> None:
        row = self._rows[result.step]
        row["step_s"], row["phase"] = result.duration_s, result.phase.value
        original(plugin, result)

    def _question(self, original: Callable[..., Any], host: Any, hook: str, view: Any, *rest: Any) -> Any:
        start_s = time.perf_counter()
        answer = original(host, hook, view, *rest)
        if hook == "schedule":
            self._rows[view.step]["question"] += time.perf_counter() - start_s
        return answer


def figures(steps: Steps) -> dict[str, Any]:
    """Return median, 99th percentile and least of each time of these steps, in us, of the step in ms, and shares of its
    duration.

    `share` is the sum of the questions over the sum of the steps; `share_p99` the 99th percentile of single steps.
    """
    if not steps:
        return {"steps": 0}
    found: dict[str, Any] = {
        "steps": len(steps),
        "requests_median": float(np.median([row["requests"] for row in steps])),
    }
    for part in (*PARTS, "hook_wall", "question"):
        found[f"{part}_us"] = _spread([row.get(part, 0.0) * 1e6 for row in steps])
    found["step_ms"] = _spread([row["step_s"] * 1e3 for row in steps])
    found["share"] = sum(row["question"] for row in steps) / sum(row["step_s"] for row in steps)
    found["share_p99"] = float(np.percentile([row["question"] / row["step_s"] for row in steps], 99))
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "least": float(min(values))}


def build(model: str, threads: int, strategy: str, settings: dict[str, Any]) -> Any:
    """A contestant: as `engine.build`, and its answers have `steps`, the rows of `PlanTimes`."""
    times = PlanTimes()
    times.watch(strategy)
    ask = engine.build(model, threads, strategy, {}, settings)

    def answer(jobs: list[list[Any]]) -> dict[str, Any]:
        times.take()  # of the warm-up
        return ask(jobs) | {"steps": times.take()}

    answer.close = ask.close  # type: ignore[attr-defined]
    return answer
