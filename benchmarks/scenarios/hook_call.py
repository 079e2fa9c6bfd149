"""Cost of a question to a plug-in: a call to the plug-in's thread and back, and a posted notice."""

import time
from typing import Any

from benchmarks.result import Definition
from sagellm.core.guard import PluginGuard

OPTIONS: dict[str, Any] = {"calls": 5000, "notices_per_call": 8}
DEFINITIONS = {
    "hook_call_cpu_us": Definition(
        unit="us", better="lower", text="CPU time of the whole process for one call into a plug-in that does nothing."
    ),
    "hook_notice_cpu_us": Definition(
        unit="us", better="lower",
        text="CPU time of one posted notice, `notices_per_call` of which travel with a call, less that of the call alone.",
    ),
}  # fmt: skip


def run(seed: int, calls: int, notices_per_call: int) -> dict[str, float]:
    guard = PluginGuard("benchmark", 60.0, print)
    nothing = lambda notice: None  # noqa: E731
    try:
        call_us = _cpu_us(calls, lambda: guard.call("schedule", nothing, None))

        def with_notices() -> None:
            for _ in range(notices_per_call):
                guard.post("on_step_end", nothing, None)
            guard.call("schedule", nothing, None)

        notice_us = (_cpu_us(calls, with_notices) - call_us) / notices_per_call
    finally:
        guard.stop()
    return {"hook_call_cpu_us": call_us, "hook_notice_cpu_us": notice_us}


def _cpu_us(repeats: int, function: Any) -> float:
    start_s = time.process_time()
    for _ in range(repeats):
        function()
    return (time.process_time() - start_s) / repeats * 1e6
