"""A small engine whose plug-in has a tier of files: traffic that fills it, and how to wait for it."""

import threading

from sagellm.core.hooks import Tier
from tests.kv_runtime.test_plugin import tokens_of

FIRST = tokens_of(0, 1, 2)
OTHERS = [tokens_of(5, 6, 7), tokens_of(10, 11, 12), tokens_of(15, 16, 17)]


def settle(engine):
    """Until nothing is on its way between memory and files."""
    migrator = engine.plugin._link.migrator
    done = threading.Event()
    while migrator.queued_bytes(Tier.CPU, Tier.NVME) or migrator.queued_bytes(Tier.NVME, Tier.CPU):
        done.wait(0.001)
    engine.flush()
    engine.plugin._catch_up()


def opened(engine):
    """The same, once its folder is open and known."""
    engine.plugin._opening.result(60.0)
    while engine.plugin._link is None or engine.plugin._found:
        engine.plugin._catch_up()
    return engine


def push_out(engine, first=FIRST):
    """Serve a request, and others until its blocks are on disk."""
    engine.serve(1, first)
    for request, tokens in enumerate(OTHERS, 2):
        engine.serve(request, tokens)
        settle(engine)
    settle(engine)


def admit(engine, request, tokens):
    """Like an engine that asks before each step; returns how often the answer was no."""
    num_refused = 0
    while not engine.admitted(request, tokens):
        num_refused += 1
        settle(engine)
        engine.step()
    return num_refused
