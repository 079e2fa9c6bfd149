"""Segments and collectives that are measured, planned and run: what was predicted to hide, and what did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.comm_backend.overlap import Collective, OverlapPlan, Segment, Task, contention, plan_overlap
from sagellm.core.errors import CommError

__all__ = ["OverlapWindow", "WindowRun"]


class WindowRun(NamedTuple):
    """One run of a plan, on this rank. `waited_s`: of `total_s`, in waits for collectives."""

    total_s: float
    waited_s: float


class OverlapWindow:
    """Computation and collectives of one stretch of a program, such as a layer or a step, on one rank of `backend`.

    `measure` takes the time of each alone and of both together; `plan` is made from that, the same on every rank; `run` follows
    it. All ranks call the same methods in the same order.

        window = OverlapWindow(backend)
        window.compute("a", lambda: first_half())
        window.collective("r", lambda: backend.all_reduce(tensor, async_op=True), needs=("a",))
        window.compute("b", lambda: second_half(), needs=("a",))
        window.compute("c", lambda: rest(), needs=("b", "r"))
        window.measure(rounds=5)
        window.run(window.plan())
    """

    def __init__(self, backend: CommBackendProtocol) -> None:
        self.backend = backend
        self.slowdown = 0.0
        self._order: list[tuple[type[Task], str, tuple[str, ...]]] = []
        self._calls: dict[str, Callable[[], object]] = {}
        self._seconds: dict[str, float] = {}

    def compute(self, name: str, call: Callable[[], object], needs: Sequence[str] = ()) -> None:
        """Add a segment. Earlier work must be added first."""
        self._add(Segment, name, call, needs)

    def collective(self, name: str, start: Callable[[], Work], needs: Sequence[str] = ()) -> None:
        """Add a collective: `start` calls the backend with `async_op`. Its values while it is measured are of no use."""
        self._add(Collective, name, start, needs)

    @property
    def tasks(self) -> list[Task]:
        """With their costs, which are 0 before `measure` or `costs`."""
        return [kind(name, self._seconds.get(name, 0.0), needs) for kind, name, needs in self._order]

    def costs(self, seconds: Mapping[str, float], slowdown: float = 0.0) -> None:
        """Give what is known from elsewhere, alike on all ranks. Raises CommError: a name that is not there."""
        if unknown := sorted(seconds.keys() - self._calls.keys()):
            raise CommError(f"costs of {', '.join(unknown)}, which the window does not have; it has {', '.join(self._calls)}.")
        self._seconds |= seconds
        self.slowdown = slowdown

    def measure(self, rounds: int = 5) -> None:
        """The least of `rounds`, of each alone and of the longest segments beside the longest collective; on the slowest rank.

        The least, since whatever else runs on the machine only adds. Every call is made up to twice a round and four times
        more, so they must be repeatable.
        """
        if rounds < 1:
            raise CommError(f"rounds is {rounds}; give 1 or more.")
        self._alone()  # touches memory for the first time
        self._seconds = self._slowest(self._alone())
        longest, beside = self._neighbours()
        least = self._alone()
        together_s = float("inf")
        for _ in range(rounds):  # in turns, so that both meet the same machine
            together_s = min(together_s, self._together(longest, beside))
            least = {name: min(least[name], taken) for name, taken in self._alone().items()}
        found = self._slowest(least | {"": together_s})
        together_s = found.pop("")
        self._seconds = found
        compute_s, comm_s = sum(found[name] for name in beside), found.get(longest, 0.0)
        self.slowdown = contention(compute_s, comm_s, together_s) if min(compute_s, comm_s) > 0 else 0.0

    def _alone(self) -> dict[str, float]:
        """Seconds of each call once, by itself; a collective's until it has ended."""
        taken = {}
        for kind, name, _ in self._order:
            self.backend.barrier()
            start = time.perf_counter()
            if kind is Collective:
                self._start(name).wait()
            else:
                self._calls[name]()
            taken[name] = time.perf_counter() - start
        return taken

    def _neighbours(self) -> tuple[str, list[str]]:
        """The longest collective, and the longest segments, which together take as long; "" and none if a kind is missing."""
        collectives = [task for task in self.tasks if isinstance(task, Collective)]
        segments = sorted((task for task in self.tasks if isinstance(task, Segment)), key=lambda task: -task.seconds)
        if not collectives or not segments:
            return "", []
        longest, beside, total_s = max(collectives, key=lambda task: task.seconds), [], 0.0
        for task in segments:
            if total_s < longest.seconds:
                beside.append(task.name)
                total_s += task.seconds
        return longest.name, beside

    def _together(self, longest: str, beside: list[str]) -> float:
        self.backend.barrier()
        start = time.perf_counter()
        work = self._start(longest) if longest else None
        for name in beside:
            self._calls[name]()
        if work is not None:
            work.wait()
        return time.perf_counter() - start

    def plan(self) -> OverlapPlan:
        """From what was measured or given. Raises CommError as `plan_overlap`."""
        return plan_overlap(self.tasks, self.slowdown)

    def run(self, plan: OverlapPlan) -> WindowRun:
        """Follow the plan. A failure of a collective is raised by its wait, once nothing of the window runs any more."""
        works: dict[str, Work] = {}
        waited_s, begin = 0.0, time.perf_counter()
        try:
            for kind, name in plan.steps:
                if kind == "compute":
                    self._calls[name]()
                elif kind == "start":
                    works[name] = self._start(name)
                else:
                    start = time.perf_counter()
                    works.pop(name).wait()
                    waited_s += time.perf_counter() - start
        except BaseException:
            _settle(works.values())
            raise
        return WindowRun(time.perf_counter() - begin, waited_s)

    def _start(self, name: str) -> Work:
        work = self._calls[name]()
        if not isinstance(work, Work):
            raise CommError(f"{name} returned {type(work).__name__}; start the collective with async_op and return its Work.")
        return work

    def _slowest(self, seconds: dict[str, float]) -> dict[str, float]:
        """Alike on all ranks, or their plans would start collectives in different orders."""
        values = torch.tensor(list(seconds.values()), dtype=torch.float64, device=self.backend.device_types[0])
        self.backend.all_reduce(values, ReduceOp.MAX)
        return dict(zip(seconds, values.tolist(), strict=True))

    def _add(self, kind: type[Task], name: str, call: Callable[[], object], needs: Sequence[str]) -> None:
        if name in self._calls:
            raise CommError(f"{name} is there twice; give each segment and collective a name of its own.")
        if missing := sorted(set(needs) - self._calls.keys()):
            raise CommError(f"{name} needs {', '.join(missing)}, which do not come before it; add them before.")
        self._calls[name] = call
        self._order.append((kind, name, tuple(needs)))


def _settle(works: object) -> None:
    """Until none of them writes into its tensors any more; their own failures follow from the first."""
    for work in works:
        try:
            work.wait()
        except CommError:
            continue

