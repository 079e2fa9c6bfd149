"""Strategies that break the contract, each in one way; `BREAKS` says which of the contract's rules must say so."""

import datetime
import itertools
import random
import time
from random import shuffle
from time import perf_counter

import numpy as np

from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, ScheduleDecision
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.fifo import Fifo


def ids(view):
    return [request.request_id for request in view.requests]


class Drops(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view)[:-1])


class DropsLate(Fifo):
    """Forgets those that are in the middle of their prompt or were preempted."""

    def decide(self, view):
        return ScheduleDecision([r.request_id for r in view.requests if r.phase is Phase.DECODE or not r.num_generated])


class Duplicates(Fifo):
    def decide(self, view):
        return ScheduleDecision([*ids(view), *ids(view)[:1]])


class Invents(Fifo):
    def decide(self, view):
        return ScheduleDecision([*ids(view), 424242])


class Remembers(Fifo):
    """Holds a request that has ended since."""

    def decide(self, view):
        last, self.last = getattr(self, "last", ()), ids(view)
        return ScheduleDecision(hold=frozenset(set(last) - set(self.last)))


class InventsChunk(Fifo):
    def decide(self, view):
        return ScheduleDecision(chunk_tokens={424242: 8})


class ExplainsStrangers(Fifo):
    def decide(self, view):
        return ScheduleDecision(reasons={424242: "who is it"})


class Starves(Fifo):
    """Holds one request for ever."""

    def decide(self, view):
        return ScheduleDecision(hold=frozenset(name for name in ids(view) if name == 1007))


class StarvesQuietly(Fifo):
    """Never computes a prompt as long as a request decodes, and lets no request come to an end."""

    def decide(self, view):
        return ScheduleDecision(hold=frozenset(request.request_id for request in view.running))


class ReadsClock(Fifo):
    def decide(self, view):
        perf_counter()
        return super().decide(view)


class ReadsClockOnEnd(Fifo):
    def on_request_end(self, request_id):
        time.time_ns()


class ReadsDate(Fifo):
    def decide(self, view):
        datetime.datetime.now()
        return super().decide(view)


class ClockInConstructor(Fifo):
    def __init__(self):
        self.start_s = time.monotonic()


class Draws(Fifo):
    """From the generator that all share, whose state it puts back, so that nothing else differs."""

    def decide(self, view):
        state = random.getstate()
        order = ids(view)
        shuffle(order)
        random.setstate(state)
        return super().decide(view)


class DrawsUnseeded(Fifo):
    def __init__(self):
        self.random = random.Random()

    def decide(self, view):
        order = ids(view)
        self.random.shuffle(order)
        return ScheduleDecision(order)


class DrawsNumpy(Fifo):
    def decide(self, view):
        return ScheduleDecision([ids(view)[place] for place in np.random.permutation(len(view.requests))])


class Counts(Fifo):
    """Shares a counter among instances: every other one begins with the last."""

    made = itertools.count()

    def __init__(self):
        self.number = next(self.made)

    def decide(self, view):
        return ScheduleDecision(ids(view)[:: -1 if self.number % 2 else 1])


class Identity(Fifo):
    """Keeps the objects that it saw, so that they live, and goes by whether it is given them again."""

    def __init__(self):
        self.known = []

    def decide(self, view):
        known, self.known = {id(request) for request in self.known}, list(view.requests)
        return ScheduleDecision(sorted(ids(view)), reason=str(sum(id(request) in known for request in view.requests)))


class Raises(Fifo):
    def on_step_end(self, result):
        raise KeyError(result.step)


class RaisesOnEmpty(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view), reason=str(ids(view)[0]))


class RaisesOnStrangers(Fifo):
    def __init__(self):
        self.known = {}

    def decide(self, view):
        self.known.update(dict.fromkeys(ids(view)))
        return super().decide(view)

    def on_request_end(self, request_id):
        del self.known[request_id]


class RaisesOnInfinity(Fifo):
    def decide(self, view):
        [int(request.service.deadline_s - view.now_s) for request in view.requests if request.service.deadline_s < 1e9]
        return super().decide(view)


class Exits(Fifo):
    def decide(self, view):
        raise SystemExit(3)


class Nonsense(Fifo):
    def decide(self, view):
        return ids(view)


class OddPhase(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view), phase="prefill" if view.requests else None)


class OddOrder(Fifo):
    def decide(self, view):
        return ScheduleDecision(7)


class NoBudget(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view), token_budget=0)


class NoChunk(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view), chunk_tokens=dict.fromkeys(ids(view), 0.5))


class NoText(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view), reason=None)


class NoTextForOne(Fifo):
    def decide(self, view):
        return ScheduleDecision(ids(view), reasons=dict.fromkeys(ids(view), 1.5))


class Mutates(Fifo):
    """One list for all decisions."""

    def __init__(self):
        self.order = []

    def decide(self, view):
        self.order[:] = ids(view)
        return ScheduleDecision(self.order)


class Hoards(Fifo):
    def __init__(self):
        self.seen = set()

    def decide(self, view):
        self.seen.update(ids(view))
        return super().decide(view)


class TakesAnything(Fifo):
    def __init__(self, **options):
        pass


class OddOptions(Fifo):
    def __init__(self, *, size=1):
        self.size = size + 1


class LazyOptions(Fifo):
    def __init__(self, *, size=1):
        if not isinstance(size, int):
            raise ValueError("size")


class CannotBeBuilt(Fifo):
    def __init__(self):
        raise PlanError("not today")


class Nameless(Fifo):
    name = ""


class NoStrategy:
    """Looks like one."""

    name = "no_strategy"
    decide = Fifo.decide
    on_step_end, on_request_end = SchedulingStrategy.on_step_end, SchedulingStrategy.on_request_end


BREAKS = {
    Drops: "names_all", DropsLate: "names_all", Duplicates: "names_once", Invents: "names_known", Remembers: "names_known",
    InventsChunk: "names_known", ExplainsStrangers: "names_known", Starves: "completes", StarvesQuietly: "completes",
    ReadsClock: "reads_nothing", ReadsClockOnEnd: "reads_nothing",
    ReadsDate: "reads_nothing", ClockInConstructor: "reads_nothing", Draws: "reads_nothing", DrawsUnseeded: "deterministic",
    DrawsNumpy: "deterministic", Counts: "deterministic", Identity: "identity", Raises: "raises_nothing",
    RaisesOnEmpty: "raises_nothing", RaisesOnStrangers: "raises_nothing", RaisesOnInfinity: "raises_nothing",
    Exits: "raises_nothing", Nonsense: "answer", OddPhase: "answer", OddOrder: "answer", NoBudget: "amounts",
    NoChunk: "amounts", NoText: "reasons", NoTextForOne: "reasons", Mutates: "unchanged", Hoards: "forgets",
    TakesAnything: "options", OddOptions: "options", LazyOptions: "options", CannotBeBuilt: "builds", Nameless: "builds",
    NoStrategy: "builds",
}  # fmt: skip
# The scenarios of the rules, and of the fault, that the views of `extremes` do not show.
SHOWN_IN = {
    "completes": "workload", "deterministic": "twice", "identity": "twice", "reads_nothing": "clocks", "forgets": "churn",
    "options": "building", "builds": "building",
    DropsLate: "workload",  # where memory runs out
}  # fmt: skip
# Further rules that a fault may break, beside its own.
FOLLOWS = {ClockInConstructor: set(), Hoards: set(), DrawsUnseeded: {"identity"}}
