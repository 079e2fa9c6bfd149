"""Plug-ins that the tests of the server name as module:Class."""

import json
import os
import sys
import time
from pathlib import Path

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.core.hooks import EvictionDecision, Plugin, ScheduleDecision


class Counting(Plugin):
    """Decides as the engine would and gives a reason; hears every notice."""

    def schedule(self, view):
        return ScheduleDecision(reason="as it came")

    def on_step_end(self, result):
        pass


class Raising(Plugin):
    def on_prefix_stored(self, update):
        raise RuntimeError("raised on purpose")


class Hanging(Plugin):
    def admit(self, request):
        time.sleep(1.5)
        return True


class CommRaises(Plugin):
    def comm_begin(self, op):
        raise RuntimeError("raised on purpose")


class Evicting(Plugin):
    def __init__(self, size):
        self.size = size

    def select_victims(self, request):
        return EvictionDecision(request.leaf_first(), "least recent")


class AlsoEvicting(Plugin):
    def select_victims(self, request):
        return request.leaf_first()


class Door(Plugin):
    """Writes down, where the engine process takes requests in, how long each answer may be and what it asks for."""

    def __init__(self):
        from lmdeploy.pytorch.messages import SamplingParam

        build, file = SamplingParam.from_gen_config, os.environ["SAGELLM_TEST_DOOR"]

        def noting(gen_config):
            with open(file, "a") as lines:
                lines.write(json.dumps([gen_config.max_new_tokens, getattr(gen_config, "sage", None)]) + "\n")
            return build(gen_config)

        SamplingParam.from_gen_config = noting

    def on_step_end(self, result):
        pass


class StandsStill(SpeculativeStrategy):
    """Never comes back in a worker of skeleton-of-thought, while a file is there: its engine hangs, and its process lives."""

    name = "stands-still"

    def __init__(self, file, lookahead=2):
        super().__init__(lookahead)
        self._file = Path(file)

    def propose(self, asks):
        while self._file.exists() and any("sot://worker" in word for word in sys.argv):
            time.sleep(0.1)
        return [[] for _ in asks]
