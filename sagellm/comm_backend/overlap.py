"""Overlap of collectives with computation, planned from costs.

A rank computes one segment at a time, and collectives run one after the other in the order in which they are started, while it
goes on to compute. A plan says in which order to compute, when to start each collective and where to wait for it, and predicts
how much longer the whole takes than its computation alone: the exposed time.

Sources: list scheduling by the longest way to the end (Topcuoglu et al., HEFT, TPDS 2002), here for two machines. Hidden this
way: gradient buckets in PyTorch's DistributedDataParallel (VLDB 2020), halves of a batch in TokenWeave (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from sagellm.core.errors import CommError

__all__ = ["Collective", "OverlapPlan", "Segment", "Step", "contention", "plan_overlap", "predict"]


class Segment(NamedTuple):
    """Computation that is not divided. `needs`: names of segments and collectives that have to end before it begins."""

    name: str
    seconds: float
    needs: tuple[str, ...] = ()


class Collective(NamedTuple):
    """An operation among ranks. `needs`: names of segments and collectives that have to end before it is started."""

    name: str
    seconds: float
    needs: tuple[str, ...] = ()


Task = Segment | Collective


class Step(NamedTuple):
    """Next action of the rank: compute a segment, start a collective, or wait for one."""

    kind: Literal["compute", "start", "wait"]
    name: str


class OverlapPlan(NamedTuple):
    """The same on all ranks, whose collectives must be started in the same order.

    Attributes:
        steps: in order; each collective is waited for in the end.
        total_s: predicted wall-clock time.
        compute_s, comm_s: what the segments, and the collectives, take alone.
        exposed_s: total_s - compute_s.
        serial_s: predicted where each collective is waited for at once: compute_s + comm_s.
    """

    steps: tuple[Step, ...]
    total_s: float
    compute_s: float
    comm_s: float

    @property
    def exposed_s(self) -> float:
        return self.total_s - self.compute_s

    @property
    def serial_s(self) -> float:
        return self.compute_s + self.comm_s

    @property
    def hidden_share(self) -> float:
        """Hidden share of the time of collectives; below 0 if running both at once takes longer than one after the other."""
        return 1 - self.exposed_s / self.comm_s if self.comm_s else 0.0


def contention(compute_s: float, comm_s: float, together_s: float) -> float:
    """By what share each slows the other down, from what a computation and a collective took alone, and started together.

    0: all hides, as where a device of its own does the communication. 1: nothing does, as where both want the same core.
    """
    shorter = min(compute_s, comm_s)
    if not shorter > 0:
        raise CommError(f"compute_s is {compute_s!r}, comm_s {comm_s!r}; give seconds above 0.")
    return max((together_s - max(compute_s, comm_s)) / shorter, 0.0)


def plan_overlap(tasks: Sequence[Task], slowdown: float = 0.0) -> OverlapPlan:
    """The best of several orders: that of `tasks`, and what list scheduling makes of it. O(n^2) in tasks.

    Args:
        tasks: in an order that can be run as it is: nothing needs what comes later.
        slowdown: as `contention` gives it; while both run, each takes 1 + slowdown times as long.

    Raises:
        CommError: a name twice, a need that is unknown or comes later, a cost that is no number of seconds.
    """
    _check(tasks, slowdown)
    compute_s = sum(task.seconds for task in tasks if isinstance(task, Segment))
    comm_s = sum(task.seconds for task in tasks if isinstance(task, Collective))
    ways = _ways_to_the_end(tasks)
    orders: list[list[Step]] = [_lower(tasks, tasks, eager=False), _lower(tasks, tasks, eager=True)]
    for rank in (ways.__getitem__, _comm_first(tasks, ways)):
        orders.append(_lower(tasks, _listed(tasks, rank, slowdown), eager=True))
    best = min(orders, key=lambda steps: predict(tasks, steps, slowdown))  # the first of equals: no reason to change the order
    return OverlapPlan(tuple(best), predict(tasks, best, slowdown), compute_s, comm_s)


def predict(tasks: Iterable[Task], steps: Iterable[Step], slowdown: float = 0.0) -> float:
    """Seconds that the steps take: computation and the oldest collective go on together, slowed down while both do."""
    seconds = {task.name: task.seconds for task in tasks}
    now, lane = 0.0, _Lane(slowdown)
    for kind, name in steps:
        if kind == "compute":
            now += lane.compute(seconds[name])
        elif kind == "start":
            lane.queue[name] = seconds[name]
        else:
            now += lane.wait(name)
    return now


class _Lane:
    """Collectives that were started: what is left of each, oldest first."""

    def __init__(self, slowdown: float) -> None:
        self.queue: dict[str, float] = {}
        self._slower = 1 + slowdown

    def compute(self, seconds: float) -> float:
        """How long a segment takes while they go on."""
        both = min(seconds, sum(self.queue.values()))
        self._progress(both)
        return both * self._slower + seconds - both

    def wait(self, name: str) -> float:
        if name not in self.queue:
            return 0.0
        names = list(self.queue)
        waited = sum(self.queue[each] for each in names[: names.index(name) + 1])
        self._progress(waited)
        self.queue.pop(name, None)  # rounding may have left a rest
        return waited

    def _progress(self, seconds: float) -> None:
        for name in list(self.queue):
            done = min(seconds, self.queue[name])
            seconds -= done
            self.queue[name] -= done
            if self.queue[name] > 0:
                return
            del self.queue[name]


def _check(tasks: Sequence[Task], slowdown: float) -> None:
    known: set[str] = set()
    for task in tasks:
        if task.name in known:
            raise CommError(f"{task.name} is there twice; give each segment and collective a name of its own.")
        if missing := sorted(set(task.needs) - known):
            raise CommError(f"{task.name} needs {', '.join(missing)}, which do not come before it; name what does.")
        if not 0 <= task.seconds < math.inf:
            raise CommError(f"{task.name} takes {task.seconds!r} s; give seconds from 0 on.")
        known.add(task.name)
    if not 0 <= slowdown < math.inf:
        raise CommError(f"slowdown is {slowdown!r}; give a number from 0 on.")


def _ways_to_the_end(tasks: Sequence[Task]) -> dict[str, float]:
    """Seconds of the longest chain of needs that begins with each task."""
    ways = dict.fromkeys((task.name for task in tasks), 0.0)
    for task in reversed(tasks):
        ways[task.name] += task.seconds
        for need in task.needs:
            ways[need] = max(ways[need], ways[task.name])
    return ways


def _comm_first(tasks: Sequence[Task], ways: Mapping[str, float]) -> Callable[[str], float]:
    """Segments that lead to a collective come first, so that computation can hide it."""
    leads = {task.name: isinstance(task, Collective) for task in tasks}
    for task in reversed(tasks):
        for need in task.needs:
            leads[need] = leads[need] or leads[task.name]
    longest = max(ways.values(), default=0.0)
    return lambda name: ways[name] + (longest + 1.0) * leads[name]


def _listed(tasks: Sequence[Task], rank: Callable[[str], float], slowdown: float) -> list[Task]:
    """Each time the segment that can begin first, of those the one of the highest rank; collectives as they become ready."""
    places = {task.name: place for place, task in enumerate(tasks)}
    left = list(tasks)
    listed: list[Task] = []
    ends: dict[str, float] = {}
    compute_free = comm_free = 0.0
    while left:
        ready = [task for task in left if all(need in ends for need in task.needs)]
        begins = {
            task.name: max([comm_free if isinstance(task, Collective) else compute_free, *(ends[need] for need in task.needs)])
            for task in ready
        }
        # Starting a collective costs the rank nothing, so all that can be started by now is.
        chosen = min(
            ready,
            key=lambda task: (
                max(begins[task.name], compute_free), isinstance(task, Segment), -rank(task.name), places[task.name]
            ),
        )  # fmt: skip
        end = begins[chosen.name] + chosen.seconds
        if isinstance(chosen, Collective):
            comm_free = end
        else:
            compute_free = end + slowdown * max(min(end, comm_free) - begins[chosen.name], 0.0)
            end = compute_free
        ends[chosen.name] = end
        left.remove(chosen)
        listed.append(chosen)
    return listed


def _lower(tasks: Sequence[Task], order: Sequence[Task], eager: bool) -> list[Step]:
    """Steps of an order. `eager`: a collective is waited for where it is needed; otherwise where it was started."""
    kinds = {task.name: type(task) for task in tasks}
    steps: list[Step] = []
    pending: list[str] = []
    for task in order:
        for need in task.needs:
            if kinds[need] is Collective and need in pending:
                pending.remove(need)
                steps.append(Step("wait", need))
        if isinstance(task, Segment):
            steps.append(Step("compute", task.name))
        else:
            steps.append(Step("start", task.name))
            if eager:
                pending.append(task.name)
            else:
                steps.append(Step("wait", task.name))
    return steps + [Step("wait", name) for name in pending]
