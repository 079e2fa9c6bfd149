"""A slowdown of a known size in the real engine, to see that the gate finds it.

    python -m benchmarks.runner --preset planted_slowdown --out DIR
    python ci_gate.py --current DIR/result.json      # must end with exit code 1
"""

import time

from sagellm.core.hooks import Plugin, StepView

LONGEST_STEP_S = 0.2  # what takes longer was no step but a time without requests


class Slowdown(Plugin):
    """Sleeps in `schedule`, on the engine's way, `share` of the time that has passed since it slept last."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._since_s = time.perf_counter()

    def schedule(self, view: StepView) -> None:
        passed_s = time.perf_counter() - self._since_s
        if passed_s < LONGEST_STEP_S:
            time.sleep(self._share * passed_s)
        self._since_s = time.perf_counter()
