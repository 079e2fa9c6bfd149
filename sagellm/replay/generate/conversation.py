"""Conversations: each turn's prompt is everything said before, the last answer, and a new message."""

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np
from pydantic import Field

from sagellm.replay.generate.base import Options, Request, arrivals, geometric, pick, zipf_weights
from sagellm.replay.generate.text import KeyCounter, Text


class ConversationOptions(Options):
    """Conversations begin with one of `systems` system prompts of `system` tokens (popularity `k ** -alpha`) and have `turns`
    turns on average, of `message` tokens on average, `think_s` seconds apart on average. `rate` is that of all requests."""

    systems: int = Field(8, ge=1, le=1_000_000)
    system: int = Field(512, ge=0, le=1 << 20)
    alpha: float = Field(1.0, ge=0, le=10)
    turns: float = Field(5.0, ge=1, le=1 << 20)
    message: float = Field(100.0, ge=1, le=1 << 20)
    think_s: float = Field(30.0, gt=0, le=1e9)


def conversation(options: ConversationOptions, rng: np.random.Generator, counter: KeyCounter) -> Iterator[Request]:
    begun_at = arrivals(options.model_copy(update={"rate": options.rate / options.turns}), rng)
    cumulated = zipf_weights(options.systems, options.alpha)
    systems = [Text(counter).grown(options.system) for _ in range(options.systems)]
    numbers = count()  # decide between equal times, and keep texts from being compared
    waiting: list[tuple[float, int, Text, int]] = []  # next turn's time, number, text so far, turns left
    next_s = next(begun_at)
    while True:
        if not waiting or next_s <= waiting[0][0]:
            text = systems[pick(rng, cumulated)]
            heapq.heappush(waiting, (next_s, next(numbers), text, geometric(rng, options.turns)))
            next_s = next(begun_at)
        time_s, _, text, num_left = heapq.heappop(waiting)
        prompt, output = text.grown(geometric(rng, options.message)), geometric(rng, options.output)
        yield Request(time_s, prompt, output)
        if num_left > 1:
            again_s = time_s + rng.exponential(options.think_s)
            heapq.heappush(waiting, (again_s, next(numbers), prompt.grown(output), num_left - 1))
