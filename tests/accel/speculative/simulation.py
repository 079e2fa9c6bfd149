"""A machine and a text that are laws: how long a step takes, and how likely a guess is right."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome, Verdict

TEXT = np.zeros(1, np.int64)


def memory_bound(num_rows: float, context: float = 0) -> float:
    """Reading the weights takes longest until there are many rows."""
    return 1e-2 * max(1 + 0.03 * num_rows, num_rows / 24) + 1e-7 * context


def compute_bound(num_rows: float, context: float = 0) -> float:
    return 1e-2 * (0.1 + 0.9 * num_rows) + 1e-7 * context


def between(num_rows: float, context: float = 0) -> float:
    return 1e-2 * (0.7 + 0.3 * num_rows) + 1e-7 * context


class Guesser(SpeculativeStrategy):
    """Proposes as many as it may; how many are right is the simulation's to say."""

    name = "guesser"

    def __init__(self, lookahead: int = 8) -> None:
        super().__init__(lookahead)
        self.asked = 0

    def propose(self, asks):
        self.asked += len(asks)
        return [[0] * ask.limit for ask in asks]


def throughput(
    strategy: SpeculativeStrategy, law: Callable[..., float], chance: Callable[[int, int], float], *, batch: int, steps: int,
    noise: float = 0.0, propose_s: float = 2e-5, seed: int = 0, answer: int = 200,
) -> float:  # fmt: skip
    """Tokens a second of the law; the strategy sees times with noise. `chance(step, request)`: that a guess is right."""
    random = np.random.default_rng(seed)
    seconds, tokens = 0.0, 0
    lengths = {request: 50 + 13 * request for request in range(batch)}
    ends = {request: answer // 2 + 7 * request for request in range(batch)}
    for request in lengths:
        strategy.begin(request, TEXT)
    for step in range(steps):
        limit = strategy.lookahead
        asks = [Ask(request, TEXT, limit, TEXT) for request in lengths] if limit else []
        drafts = strategy.propose(asks) if asks else []
        counts = {ask.request_id: len(guesses) for ask, guesses in zip(asks, drafts, strict=True)}
        verdicts = []
        for request in lengths:
            drafted, right = counts.get(request, 0), 0
            while right < drafted and random.random() < chance(step, request):
                right += 1
            verdicts.append(Verdict(request, drafted, right))
        rows = batch + sum(counts.values())
        true_s = law(rows, sum(lengths.values()))
        seen_s = true_s * float(np.exp(noise * random.standard_normal() - noise**2 / 2))
        if noise and random.random() < 0.02:
            seen_s *= 4  # the machine did something else
        cost_s = propose_s * sum(count > 0 for count in counts.values())
        seconds += true_s + cost_s
        for request, _, right in verdicts:
            strategy.accept(request, [0] * (right + 1))
            tokens += right + 1
            lengths[request] += right + 1
            ends[request] -= right + 1
        strategy.step_done(StepOutcome(tuple(verdicts), rows, sum(lengths.values()), seen_s, cost_s + 2e-6 * len(asks)))
        for request in [request for request, left in ends.items() if left <= 0]:
            strategy.end(request)
            del lengths[request], ends[request]
            new = request + batch
            lengths[new], ends[new] = 50, answer
            strategy.begin(new, TEXT)
    return tokens / seconds


class Fixed(Guesser):
    """The same number of guesses in every step."""


class Silent(Guesser):
    def propose(self, asks: Any) -> list[list[int]]:
        return [[]] * len(asks)


def best_fixed(law: Any, chance: Any, **options: Any) -> tuple[float, float]:
    """(throughput without guesses, of the best lookahead of 0 to 8)."""
    none = throughput(Silent(), law, chance, **options)
    return none, max(none, *(throughput(Fixed(k), law, chance, **options) for k in (1, 2, 3, 4, 6, 8)))
