"""Cost of a decision as a graph: building it from the queue, the passes, and lowering it to a decision."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.result import Definition
from sagellm.core.hooks import Phase, RequestId, RequestView, ScheduleDecision, StepView
from sagellm.scheduler_ir.builder import IRBuilder
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.lowering import lower
from sagellm.scheduler_ir.passes import PassSettings

OPTIONS: dict[str, Any] = {"num_requests": 256, "waiting_share": 0.125, "repeats": 200}
OF_WHAT = (
    "`num_requests` requests, `waiting_share` of them with prompts of 64 to 8,192 tokens to compute, the others decoding, "
    "in a random order with one prompt cut; median CPU time of `repeats`."
)
DEFINITIONS = {
    "plan_build_cpu_us": Definition(
        unit="us", better="lower", text=f"IRBuilder.build, decode steps in one batch, of {OF_WHAT}"
    ),
    "plan_optimize_cpu_us": Definition(
        unit="us", better="lower", text=f"IRGraph.optimize, default passes, of the graph of {OF_WHAT}"
    ),
    "plan_lower_cpu_us": Definition(unit="us", better="lower", text=f"lower of the optimized graph of {OF_WHAT}"),
    "plan_merge_cpu_us": Definition(
        unit="us", better="lower",
        text=f"IRGraph.optimize where the decode step of each request is a node of its own, of {OF_WHAT}",
    ),
}  # fmt: skip


def run(seed: int, num_requests: int, waiting_share: float, repeats: int) -> dict[str, float]:
    view, decision = _queue(np.random.default_rng(seed), num_requests, waiting_share)
    settings = PassSettings(token_budget=4096, max_batch_size=num_requests)

    def build(decode_batch: int = num_requests) -> IRGraph:
        return IRBuilder.build(view.requests, decision, decode_batch=decode_batch)

    best = build().optimize(settings=settings)
    # A graph keeps its order once it was asked for it, so each repeat has a graph of its own.
    graphs, apart = ([build(size) for _ in range(repeats)] for size in (num_requests, 1))
    return {
        "plan_build_cpu_us": _cpu_us([build] * repeats),
        "plan_optimize_cpu_us": _cpu_us([lambda each=each: each.optimize(settings=settings) for each in graphs]),
        "plan_lower_cpu_us": _cpu_us([lambda: lower(best, view)] * repeats),
        "plan_merge_cpu_us": _cpu_us([lambda each=each: each.optimize(settings=settings) for each in apart]),
    }


def _queue(rng: np.random.Generator, num_requests: int, waiting_share: float) -> tuple[StepView, ScheduleDecision]:
    num_waiting = round(num_requests * waiting_share)
    lengths = rng.integers(64, 8193, num_requests).tolist()
    requests = [
        RequestView(RequestId(index), Phase.PREFILL, tokens, 0, 0, 0, 0.0) if index < num_waiting
        else RequestView(RequestId(index), Phase.DECODE, tokens, tokens - 1, 1, tokens // 64 + 1, 0.0)
        for index, tokens in enumerate(lengths)
    ]  # fmt: skip
    order = rng.permutation(num_requests).tolist()
    cuts = {name: 512 for name in [name for name in order if name < num_waiting][:1]}
    view = StepView(
        step=1, phase=Phase.PREFILL, requests=tuple(requests), free_blocks=1000, token_budget=8192, max_batch_size=num_requests
    )  # fmt: skip
    return view, ScheduleDecision(order=order, token_budget=4096, phase=Phase.PREFILL, chunk_tokens=cuts)


def _cpu_us(calls: list[Callable[[], Any]]) -> float:
    times = []
    for call in calls:
        start_ns = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - start_ns) / 1e3)
    return float(np.median(times))
