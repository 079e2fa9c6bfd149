"""Plug-ins that the tests of the benchmarks name as module:Class."""

import os
import signal

from sagellm.core.hooks import Plugin


class Dies(Plugin):
    """Kills the engine process it lives in when that is to admit its request number `at`."""

    def __init__(self, at):
        self.left = at

    def admit(self, request):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return True
