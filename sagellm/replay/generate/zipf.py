"""Zipf prefixes: each request begins with one of some documents, the popular ones more often, and ends with its own words."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from sagellm.replay.generate.base import Options, Request, arrivals, geometric, pick, zipf_weights
from sagellm.replay.generate.text import KeyCounter, Text


class ZipfOptions(Options):
    """`prefixes` documents of 1 to `2 * prefix - 1` tokens, the k-th asked for with weight `k ** -alpha`; then `suffix` tokens
    on average of the request's own."""

    prefixes: int = Field(1_000, ge=1, le=10_000_000)
    alpha: float = Field(1.0, ge=0, le=10)
    prefix: int = Field(1_024, ge=1, le=1 << 20)
    suffix: float = Field(128.0, ge=1, le=1 << 20)


def zipf(options: ZipfOptions, rng: np.random.Generator, counter: KeyCounter) -> Iterator[Request]:
    cumulated = zipf_weights(options.prefixes, options.alpha)
    lengths = rng.integers(1, 2 * options.prefix, options.prefixes)
    documents: dict[int, Text] = {}
    for time_s in arrivals(options, rng):
        rank = pick(rng, cumulated)
        if rank not in documents:
            documents[rank] = Text(counter).grown(int(lengths[rank]))
        prompt = documents[rank].grown(geometric(rng, options.suffix))
        yield Request(time_s, prompt, geometric(rng, options.output))
