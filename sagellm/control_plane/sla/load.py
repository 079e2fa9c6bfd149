"""Loads that a plan must carry: a trace, or a rate of requests of one length."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sagellm.core.errors import TraceError
from sagellm.replay.generate import generate, is_generator
from sagellm.replay.schedule.base import RecordedRequest
from sagellm.replay.traces import read_trace

__all__ = ["Load", "read_load"]


@dataclass(frozen=True)
class Load:
    """Requests by arrival. `name`: as the user wrote it."""

    name: str
    requests: tuple[RecordedRequest, ...]

    @property
    def rate(self) -> float:
        """Requests in a second."""
        span_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self.requests) - 1) / span_s if span_s > 0 else float(len(self.requests))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(each.prompt_tokens + each.num_generated for each in self.requests)


def read_load(
    text: str, *, num_requests: int = 300, prompt_tokens: int = 256, output_tokens: int = 64, seed: int = 0
) -> Load:  # fmt: skip
    """Read a load.

    Args:
        text: a trace file, a generator such as `conversation:rate=2`, or a number of requests in a second.
        num_requests: most requests that are taken of it.
        prompt_tokens, output_tokens: length of each request of a rate, which arrives as a Poisson process.

    Raises:
        TraceError: no such file, a malformed one, or a rate that is not above 0.
    """
    rate = _number(text)
    if rate is not None:
        if not 0 < rate < 1e6:
            raise TraceError(f"the rate {text} is not above 0; give requests in a second, such as 2.5, or a trace file.")
        times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num_requests))
        rows = [(time_s, prompt_tokens, output_tokens) for time_s in (times - times[0]).tolist()]
    else:
        trace = generate(text) if is_generator(text) else read_trace(Path(text), unique_parents=False)
        begin_s = float(trace.times_s[0])
        every = zip(trace.times_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
        rows = [(time_s - begin_s, max(1, tokens), max(1, new)) for time_s, tokens, new in every][:num_requests]
    requests = (RecordedRequest(number, *row) for number, row in enumerate(rows))
    return Load(text, tuple(requests))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
