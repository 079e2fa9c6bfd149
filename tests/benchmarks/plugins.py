"""Plug-ins that the tests of the benchmarks name as module:Class."""

import os
import signal
import time

from sagellm.core.hooks import Plugin


class Straggles(Plugin):
    """Makes the second rank late for every collective by `late_s`, so that the first has to wait for it."""

    def __init__(self, late_s):
        self.late_s = late_s

    def comm_begin(self, op):
        if op.rank == 1:
            time.sleep(self.late_s)


class Dies(Plugin):
    """Kills the engine process it lives in when that is to admit its request number `at`."""

    def __init__(self, at):
        self.left = at

    def admit(self, request):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return True
