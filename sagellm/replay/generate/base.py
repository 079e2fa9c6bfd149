"""Shared parts of trace generators: options, arrival times, and the conversion of requests to a trace."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from pydantic import Field

from sagellm.core.config import Model
from sagellm.core.errors import TraceError
from sagellm.replay.base import DEFAULT_BLOCK_SIZE, MAX_TOKENS, MAX_TRACE_BLOCKS, Trace
from sagellm.replay.generate.text import KeyCounter, Text


class Options(Model):
    """Options of every generator.

    `requests`: how many; `seed`: equal options give equal traces; `block_size`: tokens; `rate`: arrivals in a second, as a
    Poisson process; `output`: mean tokens of an answer, geometrically distributed.
    """

    requests: int = Field(10_000, ge=1, le=10_000_000)
    seed: int = Field(0, ge=0)
    block_size: int = Field(DEFAULT_BLOCK_SIZE, ge=1, le=1 << 20)
    rate: float = Field(10.0, ge=1e-9, le=1e9)
    output: float = Field(200.0, ge=1, le=1 << 20)


class Request(NamedTuple):
    """One request: its prompt, and the length of its answer in tokens."""

    time_s: float
    prompt: Text
    output: int


Generator = Callable[[Options, np.random.Generator, KeyCounter], Iterator[Request]]


def build(name: str, options: Options, generator: Generator) -> Trace:
    """The first `options.requests` requests of the generator, which come in order of time.

    Raises:
        TraceError: more blocks than a trace may have, or a prompt of more tokens.
    """
    rng = np.random.default_rng(options.seed)
    requests = generator(options, rng, KeyCounter(options.block_size))
    times, inputs, outputs, keys, offsets = [], [], [], [], [0]
    for _, request in zip(range(options.requests), requests, strict=False):
        num_blocks = -(-request.prompt.num_tokens // options.block_size)
        if request.prompt.num_tokens > MAX_TOKENS or len(keys) + num_blocks > MAX_TRACE_BLOCKS:
            raise TraceError(
                f"{name}: by request {len(times) + 1} it has more than {MAX_TRACE_BLOCKS} blocks, or a prompt of more than "
                f"{MAX_TOKENS} tokens; ask for fewer requests, shorter ones or larger blocks."
            )
        times.append(request.time_s)
        inputs.append(request.prompt.num_tokens)
        outputs.append(request.output)
        keys.extend(request.prompt.prompt_keys())
        offsets.append(len(keys))
    return Trace(
        name=name, block_size=options.block_size, times_s=np.array(times, np.float64), input_tokens=np.array(inputs, np.int32),
        output_tokens=np.array(outputs, np.int32), keys=np.array(keys, np.uint64), offsets=np.array(offsets, np.int64),
    )  # fmt: skip


def arrivals(options: Options, rng: np.random.Generator) -> Iterator[float]:
    """Times of a Poisson process, without end."""
    time_s = 0.0
    while True:
        for gap_s in rng.exponential(1 / options.rate, 1024):
            time_s += gap_s
            yield time_s


def geometric(rng: np.random.Generator, mean: float) -> int:
    """At least 1."""
    return int(rng.geometric(min(1.0, 1.0 / mean)))


def zipf_weights(count: int, alpha: float) -> np.ndarray:
    """float64 [count]: cumulated probabilities of ranks 1 to `count`, for `searchsorted`."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -alpha
    cumulated = np.cumsum(weights)
    return cumulated / cumulated[-1]


def pick(rng: np.random.Generator, cumulated: np.ndarray) -> int:
    return min(int(np.searchsorted(cumulated, rng.random(), side="right")), len(cumulated) - 1)
