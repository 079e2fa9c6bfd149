"""Plug-ins of the tests, each as small as the hook it tries; worker processes import them by name too."""

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

from sagellm.core.hooks import (
    CommDecision,
    EvictionDecision,
    MigrationPlan,
    Phase,
    Plugin,
    ScheduleDecision,
    Tier,
)


def plugin_of(engine: Any, index: int = 0) -> Any:
    """The instance that an engine in this process built."""
    return engine.hooks._host.plugins[index][1]


class Listener(Plugin):
    """Writes down every notice, and what the handle says about blocks at the moment they are given up."""

    def attach(self, engine):
        self.engine = engine
        self.evicted, self.matched, self.stored, self.steps, self.ended = [], [], [], [], []
        self.states_when_evicted = []
        self.by_callback = []
        engine.register_eviction_callback(self.by_callback.append)

    def on_evicted(self, notice):
        self.evicted.append(notice)
        self.states_when_evicted.append([info.state for info in self.engine.get_block_info(notice.block_ids)])

    def on_prefix_matched(self, match):
        self.matched.append(match)

    def on_prefix_stored(self, update):
        self.stored.append(update)

    def on_step_end(self, result):
        self.steps.append(result)

    def on_request_end(self, request_id):
        self.ended.append(request_id)


class MostRecentFirst(Plugin):
    """The opposite of LRU."""

    def select_victims(self, request):
        return EvictionDecision(request.leaf_first(-request.last_access), "most recent first")


class AtAdmission(Plugin):
    """Runs `jobs`, one an answer, with the engine's handle. A job that returns False defers the request."""

    def attach(self, engine):
        self.engine = engine
        self.jobs = []

    def admit(self, request):
        return self.jobs.pop(0)(self.engine) is not False if self.jobs else True


class OffloadInstead(Plugin):
    """Moves cached blocks to the host instead of giving them up, and gives up what the host has no room for."""

    def attach(self, engine):
        self.engine = engine

    def select_victims(self, request):
        movable = [int(b) for b, on_device in zip(request.block_ids, request.on_device, strict=True) if on_device]
        plan = MigrationPlan(Tier.GPU, Tier.CPU, tuple(movable[: request.count]))
        self.engine.migrate_blocks(plan)
        return []


class MovesAnything(Plugin):
    """Asks for blocks of every kind to be moved, either way, whenever it is called."""

    def attach(self, engine):
        self.engine = engine
        self.draw = random.Random(0)
        self.reasons = set()
        engine.register_eviction_callback(self.move)

    def move(self, argument=None):
        tiers = self.draw.sample((Tier.GPU, Tier.CPU), 2)
        blocks = [info.block_id for info in self.engine.get_block_info()] + [self.draw.randrange(-2, 30)]
        chosen = self.draw.sample(blocks, self.draw.randrange(len(blocks) // 2 + 1))
        result = self.engine.migrate_blocks(MigrationPlan(*tiers, tuple(chosen)))
        self.reasons.update(result.refused.values())

    def admit(self, request):
        self.move()
        return True

    def select_victims(self, request):
        self.move()
        return request.leaf_first()[: self.draw.randrange(3)]

    def schedule(self, view):
        self.move()

    def on_evicted(self, notice):
        self.move(notice)
        given_up = self.engine.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, notice.block_ids))
        assert not given_up.moved, "a block moved that is about to be free"

    def on_request_end(self, request_id):
        self.move()


class OwnIndex(Plugin):
    """A prefix index of its own: from what was stored to what is found, less what was evicted."""

    def __init__(self):
        self.blocks = {}  # (namespace, tokens of the whole prefix) -> block
        self.prefix_of = {}  # block -> the same
        self.tokens = {}  # request -> tokens, as the lookup gave them
        self.stored, self.matched = [], []

    def lookup_prefix(self, query):
        self.tokens[query.request_id] = query.token_ids
        found = []
        for end in range(query.block_size, len(query.token_ids) + 1, query.block_size):
            block = self.blocks.get((query.namespace, query.token_ids[:end].tobytes()))
            if block is None:
                break
            found.append(block)
        return found

    def on_prefix_matched(self, match):
        self.matched.append(match)

    def on_prefix_stored(self, update):
        self.stored.append(update)
        size = len(update.token_ids) // max(1, len(update.block_ids))
        for index, block in enumerate(reversed(update.block_ids)):
            end = len(update.token_ids) - index * size
            known = self.parents(update, end)
            self.blocks[known] = block
            self.prefix_of[block] = known

    def parents(self, update, end):
        # Tokens before `first_token` are those of the blocks that were matched or stored earlier.
        before = self.tokens[update.request_id][: update.first_token]
        if len(before) < update.first_token:
            before = self.longest(update)
        return update.namespace, before.tobytes() + update.token_ids[:end].tobytes()

    def longest(self, update):
        import numpy as np

        parts = [u.token_ids for u in self.stored if u.request_id == update.request_id and u is not update]
        matched = [m.num_matched for m in self.matched if m.request_id == update.request_id]
        return np.concatenate([self.tokens[update.request_id][: matched[-1]], *parts])[: update.first_token]

    def on_evicted(self, notice):
        for block in notice.block_ids:
            self.blocks.pop(self.prefix_of.pop(block, None), None)


class Together(Plugin):
    """Admits no request before `count` requests have arrived, so that a step sees all of them."""

    def __init__(self, count):
        self.count, self.seen = count, set()

    def admit(self, request):
        # Not the last one to arrive either, before it is asked for again: then all are admitted in the same step.
        known = request.request_id in self.seen
        self.seen.add(request.request_id)
        return known and len(self.seen) >= self.count


class LastFirst(Plugin):
    def schedule(self, view):
        return ScheduleDecision(order=[r.request_id for r in view.requests][::-1], reason="last first")


class Defer(Plugin):
    """Says no `times` times to each request."""

    def __init__(self, times):
        self.times, self.asked = times, {}

    def admit(self, request):
        self.asked[request.request_id] = self.asked.get(request.request_id, 0) + 1
        return self.asked[request.request_id] > self.times


class Hold(Plugin):
    """Holds the first request it sees in a phase for some steps in which others could run."""

    def __init__(self, phase, steps):
        self.phase, self.left = Phase(phase), steps
        self.target = None
        self.progress = []  # tokens generated by the held request at each step it was held in
        self.others = []  # tokens generated by all others at the same steps

    def schedule(self, view):
        if view.phase is not self.phase or self.left == 0:
            return None
        here = {request.request_id: request for request in view.requests}
        if self.target is None:
            self.target = view.requests[0].request_id
        if self.target not in here:
            return None
        self.left -= 1
        self.progress.append(here.pop(self.target).num_generated)
        self.others.append(sum(request.num_generated for request in here.values()))
        return ScheduleDecision(hold=frozenset([self.target]))


class HoldForever(Plugin):
    def schedule(self, view):
        return ScheduleDecision(hold=frozenset(request.request_id for request in view.requests))


class NeverAdmit(Plugin):
    def admit(self, request):
        return False


class Budget(Plugin):
    """At most so many tokens a prefill step, so many requests a decode step."""

    def __init__(self, prefill, decode):
        self.tokens = {Phase.PREFILL: prefill, Phase.DECODE: decode}
        self.steps = []

    def schedule(self, view):
        return ScheduleDecision(token_budget=self.tokens[view.phase])

    def on_step_end(self, result):
        self.steps.append(result)


class CommLog(Plugin):
    """Appends a line for each end of a collective to a file of its rank."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def comm_begin(self, op):
        return {"begin": op.name, "bytes": op.num_bytes}

    def comm_end(self, op, token):
        line = {"op": op.name, "bytes": op.num_bytes, "dtype": op.dtype, "rank": op.rank, "world": op.world_size}
        with open(self.folder / f"comm{op.rank}.jsonl", "a") as file:
            file.write(json.dumps(line | {"token": token, "pid": os.getpid()}) + "\n")


class CommDecides(Plugin):
    """Lets the layers take turns between backends, in two halves, and leaves what it was asked in a file."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def comm_decide(self, request):
        with open(self.folder / "decisions.jsonl", "a") as file:
            file.write(json.dumps([os.getpid(), request.name, request.layer, request.phase, request.num_bytes]) + "\n")
        if request.layer is None:
            return None
        return CommDecision(request.backends[request.layer % len(request.backends)], 2)


class CommNonsense(Plugin):
    """Decides for a backend that there is not."""

    def comm_decide(self, request):
        return CommDecision("pigeons")


class CommSleeps(Plugin):
    """Overruns at the end of the first collective."""

    def comm_end(self, op, token):
        threading.Event().wait(30)


class SaysGoodbye(Plugin):
    """Leaves a file when it is closed, in each process that has an instance."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def comm_end(self, op, token):
        pass

    def on_step_end(self, result):
        self.last = result

    def close(self):
        (self.folder / f"closed-{os.getpid()}").write_text(type(getattr(self, "last", None)).__name__)


class CommRaises(Plugin):
    def comm_begin(self, op):
        raise RuntimeError("no comm for you")


class BadCallback(Plugin):
    def attach(self, engine):
        engine.register_eviction_callback(lambda notice: 1 / 0)
