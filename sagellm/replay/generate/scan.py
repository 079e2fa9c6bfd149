"""Scans: requests about a few documents, again and again, and between them long documents that come once.

The case that recency handles worst: each scan flushes what is popular.
"""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from sagellm.replay.generate.base import Options, Request, arrivals, geometric
from sagellm.replay.generate.text import KeyCounter, Text


class ScanOptions(Options):
    """`hot` documents of `hot_tokens` tokens, each asked about in turn with `suffix` own tokens on average. After every
    `every` such requests come `scans` new prompts of `scan_tokens` tokens."""

    hot: int = Field(50, ge=1, le=1_000_000)
    hot_tokens: int = Field(1_024, ge=1, le=1 << 20)
    suffix: float = Field(64.0, ge=1, le=1 << 20)
    every: int = Field(50, ge=1, le=1 << 30)
    scans: int = Field(10, ge=0, le=1 << 30)
    scan_tokens: int = Field(8_192, ge=1, le=1 << 20)


def scan(options: ScanOptions, rng: np.random.Generator, counter: KeyCounter) -> Iterator[Request]:
    hot = [Text(counter).grown(options.hot_tokens) for _ in range(options.hot)]
    num_hot = 0
    times = arrivals(options, rng)
    while True:
        document = hot[num_hot % options.hot]
        yield Request(next(times), document.grown(geometric(rng, options.suffix)), geometric(rng, options.output))
        num_hot += 1
        if num_hot % options.every == 0:
            for _ in range(options.scans):
                yield Request(next(times), Text(counter).grown(options.scan_tokens), geometric(rng, options.output))
