"""Steps of the PyTorch engine on their way through the device: which one ends now, and what is told of it."""

import time
from collections import deque
from typing import Any

from sagellm.core.hooks import Phase, StepResult
from sagellm.engines.lmdeploy.host_memory import SwapTimes

# A step, or a round of decode steps: its number, whether it decodes, the ids of its sequences; what it computes of each
# request, what was refused, tokens computed before (these only if somebody is told); the number of decode steps, when it was
# sent; of its forward pass the number and how many blocks it copies in and out. A tuple, as it is made for every step: a
# dataclass takes five times as long.
Rows = tuple[tuple[int, Any], ...]  # by request
SentStep = tuple[int, bool, list[int], Rows, Rows, int, int, float, int, int, int]


class Steps:
    """`seconds`: wall-clock time with a step on its way. `swap_times`: None where copies are not timed."""

    def __init__(self, block_bytes: int) -> None:
        self.seconds = 0.0
        self._block_bytes = block_bytes
        self.swap_times: SwapTimes | None = None
        self._sent: deque[SentStep] = deque()
        self._num_loops_ended = 0  # of the first of them
        self._last_end_s = 0.0

    def sent(self, step: SentStep) -> None:
        self._sent.append(step)

    def ended(self, seq_ids: list[int], is_decoding: bool) -> tuple[SentStep, int, float, float] | None:
        """(step, how many decode steps of its round came before, when it ended, how long it took) of the one that ends now."""
        found = self._find(seq_ids, is_decoding)
        if found is None:
            return None
        step, loop = found
        end_s = time.perf_counter()
        duration_s = end_s - max(step[7], self._last_end_s)
        self.seconds += duration_s
        self._last_end_s = end_s
        return step, loop, end_s, duration_s

    def _find(self, seq_ids: list[int], is_decoding: bool) -> tuple[SentStep, int] | None:
        """Steps end in the order in which they were sent; a round may end before its last loop."""
        while self._sent:
            step, loop = self._sent[0], self._num_loops_ended
            was_decoding, sent_ids, num_loops = step[1], step[2], step[6]
            found = was_decoding == is_decoding and sent_ids == seq_ids
            self._num_loops_ended = loop + 1 if found else num_loops
            if self._num_loops_ended == num_loops:
                self._sent.popleft()
                self._num_loops_ended = 0
            if found:
                return step, loop
        return None

    def result(self, step: SentStep, loop: int, num_requests: int, end_s: float, duration_s: float) -> StepResult:
        number, is_decoding, _, computed, refused, num_before, _, _, _, num_in, num_out = step
        if loop:  # the copies were made before the first one, and what was refused was told with it
            num_in = num_out = 0
            refused = ()
        swap_s = 0.0
        if self.swap_times is not None and num_in + num_out:
            swap_s = self.swap_times.take(bool(num_in) + bool(num_out))
        phase = Phase.DECODE if is_decoding else Phase.PREFILL
        return StepResult(
            number, phase, num_requests, sum([tokens for _, tokens in computed]), end_s, duration_s,
            num_before + loop * num_requests, num_in * self._block_bytes, num_out * self._block_bytes, swap_s,
            computed, refused,
        )  # fmt: skip
