"""Runs the patch tool and dies, as by kill -9, at a chosen call of a chosen function of `os`.

Usage: driver.py FUNCTION N before|after [patch tool arguments]; prints the number of calls when N is not reached.
"""

import os
import signal
import sys

from sagellm.patching.cli import main

name, fatal, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
original = getattr(os, name)
calls = 0


def deadly(*args, **kwargs):
    """The original function, except that the process ends around call number `fatal`."""
    global calls
    calls += 1
    if calls == fatal and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args, **kwargs)
    if calls == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


setattr(os, name, deadly)
code = main(sys.argv[4:])
print(f"calls {calls}")
sys.exit(code)
