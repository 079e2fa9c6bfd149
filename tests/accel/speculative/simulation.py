"""A machine and a text that are laws: how long a step takes, and how likely a guess is right."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome, Verdict
from sagellm.accel.speculative.tree import DraftTree

TEXT = np.zeros(1, np.int64)
PROPOSE_S = 2e-5  # for a sequence


def memory_bound(num_rows: float) -> float:
    """Reading the weights takes longest until there are many rows."""
    return 1e-2 * max(1 + 0.03 * num_rows, num_rows / 24)


def between(num_rows: float) -> float:
    return 1e-2 * (0.7 + 0.3 * num_rows)


def compute_bound(num_rows: float) -> float:
    return 1e-2 * (0.1 + 0.9 * num_rows)


class Guesser(SpeculativeStrategy):
    """Proposes as many as it may; how many are right is the simulation's to say. `told`: what it was told, in order."""

    name = "guesser"

    def __init__(self, lookahead: int = 8) -> None:
        super().__init__(lookahead)
        self.num_asked = 0
        self.told: list[tuple] = []

    def propose(self, asks):
        self.num_asked += len(asks)
        return [[0] * ask.limit for ask in asks]

    def begin(self, request_id, tokens):
        self.told.append(("begin", request_id))

    def accept(self, request_id, tokens):
        self.told.append(("accept", request_id, len(tokens)))

    def end(self, request_id):
        self.told.append(("end", request_id))


class Shaped(Guesser):
    """Guesses lists, or trees with two tokens at each place, of which the first one is followed further."""

    takes_shape = True

    def propose(self, asks):
        drafts = super().propose(asks)
        return [self._tree(ask.limit) if ask.tree else draft for ask, draft in zip(asks, drafts, strict=True)]

    def _tree(self, size):
        return DraftTree([node % 2 for node in range(size)], [2 * (node // 2) - 2 if node > 1 else -1 for node in range(size)])


def expected_right(draft, chance: float | tuple[float, float]) -> float:
    """Right guesses in the mean. `chance`: of the first token of a place, or of the first and the second one."""
    first, second = chance if isinstance(chance, tuple) else (chance, 0.0)
    if isinstance(draft, DraftTree):
        return sum(first ** (node // 2) * (second if node % 2 else first) for node in range(len(draft)))
    return sum(first**place for place in range(1, len(draft) + 1))


def right_path(draft, chance: float | tuple[float, float], draw: Callable[[], float]) -> list[int]:
    """Numbers of the guesses that are right this time."""
    first, second = chance if isinstance(chance, tuple) else (chance, 0.0)
    width, path = 1 + isinstance(draft, DraftTree), []
    while len(path) * width < len(draft):
        node, luck = len(path) * width, draw()
        if luck >= first:
            return path + [node + 1] * (width == 2 and luck < first + second and node + 1 < len(draft))
        path.append(node)
    return path


class Simulation:
    """Steps of `batch` requests that are replaced when they end.

    Args:
        chance: (step, request) -> that a guess is right when those before it were; of trees, that of each of two tokens.
        noise: spread of the times that the strategy sees, in logarithms; one step in fifty is also held up.
        slower: each step takes so much longer than the one before, for what slows all steps alike.
        is_late: while the strategy is quiet it is told of steps as late as may be, as an engine does.
    """

    def __init__(
        self, strategy: SpeculativeStrategy, law: Callable[[float], float], chance: Callable[[int, int], Any], *, batch: int,
        noise: float = 0.0, slower: float = 0.0, seed: int = 0, answer: int = 200, is_late: bool = False,
    ) -> None:  # fmt: skip
        self.strategy, self._law, self._chance, self._noise, self._slower = strategy, law, chance, noise, slower
        self._random = np.random.default_rng(seed)
        self._answer, self._is_late = answer, is_late
        self._quiet, self._late, self._late_tokens = 0, [], {}
        self._left = {request: answer // 2 + 7 * request for request in range(batch)}
        self.step = 0
        self.drafted: dict[int, int] = {}  # of all requests that ran
        self.choices: list[int] = []  # further rows of each step
        for request in self._left:
            strategy.begin(request, TEXT)

    def run(self, num_steps: int) -> float:
        """Throughput by that without guesses over the same steps: expected tokens, and times without noise."""
        seconds, tokens, plain = 0.0, 0.0, 0.0
        for _ in range(num_steps):
            gained, took, none = self._one()
            tokens, seconds, plain = tokens + gained, seconds + took, plain + none
        return tokens / len(self._left) / seconds * plain / num_steps

    def _one(self) -> tuple[float, float, float]:
        strategy, random, left, batch = self.strategy, self._random, self._left, len(self._left)
        limit = 0 if self._quiet else strategy.lookahead
        asks = [Ask(request, TEXT, limit, TEXT) for request in left] if limit else []
        drafts = strategy.propose(asks) if asks else []
        by_request = {ask.request_id: draft for ask, draft in zip(asks, drafts, strict=True)}
        counts = {request: len(draft) for request, draft in by_request.items()}
        verdicts, paths, expected = [], {}, 0.0
        for request in left:
            draft, chance = by_request.get(request, ()), self._chance(self.step, request)
            path = right_path(draft, chance, random.random)
            if isinstance(draft, DraftTree):
                paths[request] = path
            verdicts.append(Verdict(request, len(draft), len(path)))
            expected += 1 + expected_right(draft, chance)
            self.drafted[request] = self.drafted.get(request, 0) + len(draft)
        extra = sum(counts.values())
        machine = (1 + self._slower) ** self.step
        true_s = self._law(batch + extra) * machine
        seen_s = true_s * float(np.exp(self._noise * random.standard_normal() - self._noise**2 / 2))
        if self._noise and random.random() < 0.02:
            seen_s *= 4
        cost_s = PROPOSE_S * sum(count > 0 for count in counts.values())
        for request, _, right in verdicts:
            self._late_tokens[request] = self._late_tokens.get(request, 0) + right + 1
            left[request] -= right + 1
        self._late.append(StepOutcome(tuple(verdicts), batch + extra, 0, seen_s, cost_s, paths))
        self._quiet -= 1
        ended = [request for request in left if left[request] <= 0]
        if self._quiet <= 0 or ended:
            self._tell()
        for request in ended:
            strategy.end(request)
            del left[request]
            left[request + batch] = self._answer
            strategy.begin(request + batch, TEXT)
        self.step += 1
        self.choices.append(extra)
        return expected, true_s + cost_s, self._law(batch) * machine

    def _tell(self) -> None:
        for request, count in self._late_tokens.items():
            self.strategy.accept(request, [0] * count)
        for outcome in self._late:
            self.strategy.step_done(outcome)
        self._late, self._late_tokens = [], {}
        self._quiet = self.strategy.quiet if self._is_late else 0


def best_fixed(
    law: Callable[[float], float], chance: float | tuple[float, float], batch: int, most: int = 8, is_tree: bool = False
) -> float:
    """Throughput of the best lookahead of 0 to `most`, by that without guesses. `is_tree`: of trees of `Shaped`."""
    found = []
    for lookahead in range(most + 1):
        seconds = law(batch * (lookahead + 1)) + PROPOSE_S * batch * (lookahead > 0)
        (draft,) = Shaped(most).propose([Ask(0, TEXT, lookahead, TEXT, is_tree)]) if lookahead else [()]
        found.append((1 + expected_right(draft, chance)) * law(batch) / seconds)
    return max(found)
