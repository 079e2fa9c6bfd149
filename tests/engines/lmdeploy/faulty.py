"""Plug-ins that fail, one for each hook: `tests.engines.lmdeploy.faulty:<hook>` with the kind of fault as an option."""

import itertools
import threading

from sagellm.core.hooks import DECISIONS, NOTICES, EvictionDecision, MigrationPlan, Plugin, ScheduleDecision, Tier

FOREVER_S = 30  # beyond every limit of the tests; the thread is a daemon's
AWAKE = threading.Event()  # never set; a test may put an event of its own here


def _raise(plugin, argument):
    raise ValueError("a bug in a plug-in")


def _exit(plugin, argument):
    raise SystemExit(3)


def _sleep(plugin, argument):
    AWAKE.wait(FOREVER_S)


def _lie_about_sizes(plugin, argument):
    class Odd(list):
        def __len__(self):
            raise OSError("odd")

    return Odd()


class _Blocks(list):
    """Reading it does what the fault says."""

    def __init__(self, act):
        self._act = act

    def __iter__(self):
        self._act(None, None)


def _migrate(block_ids):
    def migrate(plugin, argument):
        plugin.engine.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, block_ids))
        return []

    return migrate


def _ids(view):
    return [request.request_id for request in view.requests]


FAULTS = {
    "raise": _raise,
    "exit": _exit,
    "sleep": _sleep,
    "none": lambda plugin, argument: None,
    "number": lambda plugin, argument: 7,
    "text": lambda plugin, argument: "blocks",
    "endless": lambda plugin, argument: itertools.count(),
    "odd": _lie_about_sizes,
    # victims
    "unknown": lambda plugin, r: EvictionDecision([10**6]),
    "negative": lambda plugin, r: [-1],
    "active": lambda plugin, r: sorted(set(range(30)) - set(r.block_ids.tolist()))[:1],
    "twice": lambda plugin, r: [r.leaf_first()[0]] * 2,
    "orphan": lambda plugin, r: [int(p) for p in r.parent_ids if p >= 0][:1],
    "of_objects": lambda plugin, r: [object()],
    "exit_when_read": lambda plugin, r: _Blocks(_exit),
    "sleep_when_read": lambda plugin, r: _Blocks(_sleep),
    "migrates_endlessly": _migrate(itertools.count()),
    "migrates_sleeping": _migrate(_Blocks(_sleep)),
    # schedule
    "budget": lambda plugin, v: ScheduleDecision(token_budget=0),
    "budget_text": lambda plugin, v: ScheduleDecision(token_budget="many"),
    "budget_fraction": lambda plugin, v: ScheduleDecision(token_budget=2.5),
    "budget_infinite": lambda plugin, v: ScheduleDecision(token_budget=float("inf")),
    "drops": lambda plugin, v: ScheduleDecision(order=_ids(v)[1:]),
    "duplicates": lambda plugin, v: ScheduleDecision(order=[*_ids(v)[1:], _ids(v)[-1], _ids(v)[0]]),
    "invents": lambda plugin, v: ScheduleDecision(order=[*_ids(v)[1:], 10**6]),
    "endless_order": lambda plugin, v: ScheduleDecision(order=itertools.count()),
    "holds_unknown": lambda plugin, v: ScheduleDecision(hold=frozenset([10**6])),
    "phase": lambda plugin, v: ScheduleDecision(phase="sleep"),
    "no_part": lambda plugin, v: ScheduleDecision(chunk_tokens={_ids(v)[0]: 0}),
    "half_a_part": lambda plugin, v: ScheduleDecision(chunk_tokens={_ids(v)[0]: 1.5}),
    "cuts_unknown": lambda plugin, v: ScheduleDecision(chunk_tokens={10**6: 5}),
    "cuts_number": lambda plugin, v: ScheduleDecision(chunk_tokens=5),
    "reasons_unknown": lambda plugin, v: ScheduleDecision(reasons={10**6: "why"}),
    "holds_number": lambda plugin, v: ScheduleDecision(hold=3),
    # lookup
    "foreign": lambda plugin, q: [plugin.foreign(q)] if plugin.stored else None,
    "free_block": lambda plugin, q: [10**6],
}


class Faulty(Plugin):
    def __init__(self, fault):
        self.fault = fault
        self.calls = 0
        self.stored = {}

    def attach(self, engine):
        self.engine = engine

    def fail(self, argument=None):
        self.calls += 1
        return FAULTS[self.fault](self, argument)

    def foreign(self, query):
        """A cached block that holds the beginning of another request."""
        return next(block for block, first in self.stored.items() if first != query.token_ids[:16].tobytes())


def _of(hook):
    members = {hook: Faulty.fail}
    if hook == "lookup_prefix":

        def on_prefix_stored(self, update):
            if update.first_token == 0 and update.block_ids:
                self.stored[update.block_ids[0]] = update.token_ids[:16].tobytes()

        members["on_prefix_stored"] = on_prefix_stored
    return type(hook, (Faulty,), members)


HOOKS = (*DECISIONS, *NOTICES, "attach")
globals().update({hook: _of(hook) for hook in (*HOOKS, "close")})


def name_of(hook):
    return f"{__name__}:{hook}"
