"""Part of collectives that computation hides: as `OverlapWindow` predicts, and as measured."""

import time
from typing import Any

import numpy as np
import torch

from benchmarks.result import Definition
from sagellm.comm_backend import CommBackendProtocol, OverlapWindow, Work
from sagellm.comm_backend.overlap import Collective, OverlapPlan, Segment, Step
from sagellm.comm_backend.rank_processes import run_ranks

OPTIONS: dict[str, Any] = {"tokens": 128, "hidden": 896, "layers": 2, "rounds": 60, "network_ms": 3.0}
NETWORK = "network"
DEFINITIONS = {
    f"comm_overlap_{backend}_{name}": Definition(unit=unit, better=better, text=text + where)
    for backend, where in (
        ("gloo", " Reductions over gloo between two processes of one host."),
        ("shm", " Reductions over shm between two processes of one host."),
        (NETWORK, " Reductions over shm that arrive `network_ms` later, one after the other: a stand-in for a wire."),
    )
    for name, unit, better, text in (
        (
            "predicted_ms", "ms", None,
            "Exposed time of the plan for `layers` layers on two halves of a batch of `tokens` tokens, each a product of "
            "matrices of width `hidden`, a reduction, and a product that needs it: its wall-clock time less that of the "
            "computation alone, from what was measured of each alone.",
        ),
        ("exposed_ms", "ms", "lower", "The same as measured: time of the plan less that of the computation, at best."),
        ("serial_ms", "ms", None, "The same with each reduction waited for at once, measured."),
        ("total_error", "1", "lower", "Predicted wall-clock time of the plan / measured, less 1, as a positive number."),
        ("hidden", "1", "higher", "Part of the exposed time that the plan hides: 1 - exposed_ms / serial_ms."),
        ("slowdown", "1", None, "By what share a reduction and a computation slow each other down, measured."),
    )
}  # fmt: skip


def run(seed: int, tokens: int, hidden: int, layers: int, rounds: int, network_ms: float) -> dict[str, float]:
    ranks = run_ranks(_measure, ("gloo", "shm"), seed, tokens, hidden, layers, rounds, network_ms / 1e3)
    metrics = {}
    for name, (plan, slowdown, _) in ranks[0].items():
        # The least: whatever else runs on the machine only adds. Of the slower rank.
        planned, serial, compute = np.maximum(*(np.array(of[name][2]) for of in ranks)).min(axis=1).tolist()
        exposed_s, serial_s = planned - compute, serial - compute
        found = {
            "predicted_ms": plan.exposed_s * 1e3, "exposed_ms": exposed_s * 1e3, "serial_ms": serial_s * 1e3,
            "total_error": abs(plan.total_s / planned - 1), "hidden": 1 - exposed_s / serial_s,
            "slowdown": slowdown,
        }  # fmt: skip
        metrics |= {f"comm_overlap_{name}_{kind}": value for kind, value in found.items()}
    return metrics


def _measure(
    backends: dict[str, CommBackendProtocol], seed: int, tokens: int, hidden: int, layers: int, rounds: int, wire_s: float
) -> dict[str, tuple[OverlapPlan, float, list[list[float]]]]:
    """Plan, slowdown, and the seconds of each contestant in each round."""
    found = {}
    for name, backend, extra_s in (*((name, each, 0.0) for name, each in backends.items()), (NETWORK, backends["shm"], wire_s)):
        window = _window(backend, seed, tokens, hidden, layers, extra_s)
        window.measure(rounds)
        plan = window.plan()
        serial = [step for task in window.tasks for step in _at_once(task)]
        compute = [step for step in serial if step.kind == "compute"]
        plans = [plan, *(plan._replace(steps=tuple(steps)) for steps in (serial, compute))]
        seconds: list[list[float]] = [[] for _ in plans]
        random = np.random.default_rng(seed)  # the same order on both ranks
        for _ in range(rounds):
            for place in random.permutation(len(plans)):
                backend.barrier()
                seconds[place].append(window.run(plans[place]).total_s)
        found[name] = plan, window.slowdown, seconds
    return found


def _at_once(task: Segment | Collective) -> tuple[Step, ...]:
    if isinstance(task, Segment):
        return (Step("compute", task.name),)
    return Step("start", task.name), Step("wait", task.name)


def _window(
    backend: CommBackendProtocol, seed: int, tokens: int, hidden: int, layers: int, wire_s: float
) -> OverlapWindow:
    random = torch.Generator().manual_seed(seed)
    before, after = (torch.randn(hidden, hidden, generator=random) / hidden**0.5 for _ in range(2))
    # The same input in each layer: values that shrink or grow from run to run would change what a product costs.
    inputs = [torch.randn(tokens // 2, hidden, generator=random) for _ in range(2)]
    sums, outputs = ([torch.empty_like(each) for each in inputs] for _ in range(2))
    window, wire = OverlapWindow(backend), _Wire(wire_s)
    for layer in range(layers):
        for half in range(2):
            def first(half: int = half) -> None:
                torch.matmul(inputs[half], before, out=sums[half])

            def second(half: int = half) -> None:
                torch.matmul(sums[half], after, out=outputs[half])

            def reduce(half: int = half) -> Work:
                return wire.send(backend.all_reduce(sums[half], async_op=True))

            name, last = f"{layer}.{half}", f"{layer - 1}.{half}"
            window.compute(f"first{name}", first, needs=(f"second{last}",) if layer else ())
            window.collective(f"reduce{name}", reduce, needs=(f"first{name}",))
            window.compute(f"second{name}", second, needs=(f"reduce{name}",))
    return window


class _Wire:
    """Stands for a network: each reduction arrives so much after it began, or after the one before; no core works for that."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free_s = 0.0

    def send(self, work: Work) -> Work:
        if self._seconds == 0:
            return work
        self._free_s = max(self._free_s, time.perf_counter()) + self._seconds
        return _Sent(work, self._free_s)


class _Sent(Work):
    def __init__(self, work: Work, arrives_s: float) -> None:
        self._work, self._arrives_s = work, arrives_s

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._arrives_s and self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(self._arrives_s - time.perf_counter(), 0.0))
