"""Agents: a task is a loop of model calls, each with all that was said before and what a tool returned, and it may branch."""

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np
from pydantic import Field

from sagellm.replay.generate.base import Options, Request, arrivals, geometric
from sagellm.replay.generate.text import KeyCounter, Text


class AgenticOptions(Options):
    """Tasks of one agent. Each has a common beginning of `system` tokens (instructions and tools), a task of `message`
    tokens, then `steps` calls on average. A call follows a tool's answer of `tool` tokens, which takes `tool_s` seconds,
    both on average.
    After a call the task goes on in `width` branches with probability `branch`, else in one. `rate` is that of tasks."""

    rate: float = Field(1.0, ge=1e-9, le=1e9)
    system: int = Field(2_048, ge=0, le=1 << 20)
    message: float = Field(200.0, ge=1, le=1 << 20)
    steps: float = Field(8.0, ge=1, le=1 << 20)
    tool: float = Field(400.0, ge=1, le=1 << 20)
    tool_s: float = Field(3.0, gt=0, le=1e9)
    branch: float = Field(0.1, ge=0, le=1)
    width: int = Field(2, ge=2, le=16)


def agentic(options: AgenticOptions, rng: np.random.Generator, counter: KeyCounter) -> Iterator[Request]:
    begun_at = arrivals(options, rng)
    system = Text(counter).grown(options.system)
    numbers = count()
    waiting: list[tuple[float, int, Text, int]] = []  # next call's time, number, prompt, calls left on this branch
    next_s = next(begun_at)
    while True:
        if not waiting or next_s <= waiting[0][0]:
            task = system.grown(geometric(rng, options.message))
            heapq.heappush(waiting, (next_s, next(numbers), task, geometric(rng, options.steps)))
            next_s = next(begun_at)
        time_s, _, prompt, num_left = heapq.heappop(waiting)
        output = geometric(rng, options.output)
        yield Request(time_s, prompt, output)
        if num_left > 1:
            said = prompt.grown(output)
            # Branches halve what is left, so that a task ends.
            num_branches = options.width if rng.random() < options.branch else 1
            for _ in range(num_branches):
                again_s = time_s + rng.exponential(options.tool_s)
                left = (num_left - 1) // num_branches if num_branches > 1 else num_left - 1
                if left > 0:
                    call = said.grown(geometric(rng, options.tool))
                    heapq.heappush(waiting, (again_s, next(numbers), call, left))
