"""Which readings of a clock are the watched one's own."""

import gc
import time

from sagellm.scheduler_ir.contract.watch import watched


def test_garbage_collection_is_not_the_strategys():
    read, timed = [], []

    def on_collection(phase, info):  # as tools do that time it
        timed.append(time.perf_counter())

    gc.callbacks.append(on_collection)
    try:
        with watched(read.append):
            kept = [[] for _ in range(20_000)]  # enough to set it off
            time.monotonic()
    finally:
        gc.callbacks.remove(on_collection)
    assert read == ["time.monotonic"] and gc.isenabled() and len(kept) == 20_000
