"""Plug-ins for TurboMind's tests, each as small as the hook it tries."""

import ctypes
import random
import threading

from sagellm.core.hooks import EvictionDecision, MigrationPlan, Plugin, ScheduleDecision, Tier


class MostRecentFirst(Plugin):
    def attach(self, engine):
        self.engine, self.requests, self.infos, self.counts = engine, [], [], []

    def select_victims(self, request):
        self.requests.append(request)
        self.counts.append(self.engine.block_counts())
        self.infos.append(self.engine.get_block_info())
        return EvictionDecision(request.leaf_first(-request.last_access), "most recent first")


class Random(Plugin):
    """Not a function of its arguments."""

    def select_victims(self, request):
        return request.leaf_first(random.sample(range(len(request.block_ids)), len(request.block_ids)))


class Sleeps(Plugin):
    def select_victims(self, request):
        threading.Event().wait(30)


class KeepsTheInterpreter(Plugin):
    """Sleeps in a library that does not give the GIL up, so that no thread of Python runs."""

    def select_victims(self, request):
        ctypes.PyDLL(None).usleep(1_500_000)
        return request.leaf_first()


class Raises(Plugin):
    def select_victims(self, request):
        raise RuntimeError("no victims for you")


class Answers(Plugin):
    """The same victims whatever is asked."""

    def __init__(self, victims):
        self.victims = victims

    def select_victims(self, request):
        return self.victims


class Moves(Plugin):
    def attach(self, engine):
        self.engine = engine

    def select_victims(self, request):
        self.engine.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(request.block_ids.tolist())))


class SlowListener(Plugin):
    """Overruns in a notice; decides nothing."""

    def on_evicted(self, notice):
        threading.Event().wait(30)


class HangsAtStepEnd(Plugin):
    def on_step_end(self, result):
        threading.Event().wait(30)


class HangsThere(HangsAtStepEnd):
    """A second one of its kind."""


class HearsSlowly(Plugin):
    """Takes its time over each step, and decides the next at once. `faster` ends all waiting."""

    def __init__(self, each_s):
        self.each_s, self.faster, self.heard = each_s, threading.Event(), []

    def on_step_end(self, result):
        self.faster.wait(self.each_s)
        self.heard.append(result.step)

    def schedule(self, view):
        self.heard.append("asked")
        return ScheduleDecision()


class Listener(Plugin):
    def attach(self, engine):
        self.evicted, self.matched, self.stored, self.steps, self.comms, self.by_callback = [], [], [], [], [], []
        engine.register_eviction_callback(self.by_callback.append)

    def on_evicted(self, notice):
        self.evicted.append(notice)

    def on_prefix_matched(self, match):
        self.matched.append(match)

    def on_prefix_stored(self, update):
        self.stored.append(update)

    def on_step_end(self, result):
        self.steps.append(result)

    def comm_end(self, op, token):
        self.comms.append(op)


class Schedules(Plugin):
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self):
        self.views, self.answers = [], []

    def schedule(self, view):
        self.views.append(view)
        return self.answers.pop(0) if self.answers else ScheduleDecision()


class Admits(Plugin):
    def __init__(self, refused=()):
        self.refused, self.asked = set(refused), []

    def admit(self, request):
        self.asked.append(request)
        return request.request_id not in self.refused


class AdmitsNonsense(Plugin):
    def __init__(self):
        self.asked = []

    def admit(self, request):
        self.asked.append(request.request_id)
        return "perhaps"


class AdmitsSlowly(Plugin):
    """Refuses everyone, and takes 10 ms over each."""

    def __init__(self):
        self.asked = []

    def admit(self, request):
        threading.Event().wait(0.01)
        self.asked.append(request.request_id)
        return False


class LooksUp(Plugin):
    def lookup_prefix(self, query):
        return None


class HearsReleases(Plugin):
    def on_prefix_released(self, release):
        pass


class WaitsForTheEnd(Plugin):
    def on_request_end(self, request_id):
        pass


class DecidesComm(Plugin):
    def comm_decide(self, request):
        return None


class BeginsComm(Plugin):
    def comm_begin(self, op):
        pass
