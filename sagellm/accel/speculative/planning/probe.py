"""Arbitrary guesses of a given length: the cost of a step does not depend on whether they are right."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from sagellm.accel.speculative.base import MAX_LOOKAHEAD, Ask, SpeculativeStrategy, StepOutcome, TargetModel
from sagellm.core.errors import SpeculationError

__all__ = ["ProbeStrategy"]

WARM_UP = 2  # steps of a kind that do not count: buffers and kernels are made in them


class ProbeStrategy(SpeculativeStrategy):
    """Goes through `lookaheads` step by step, over and over, so that what slows the machine slows all of them alike.

    A step counts where every sequence had as many guesses as were wanted.
    """

    name = "probe"

    def __init__(self, lookaheads: Sequence[int] = (0, 4)) -> None:
        self.lookaheads = tuple(lookaheads)
        if not self.lookaheads or not all(type(each) is int and 0 <= each <= MAX_LOOKAHEAD for each in self.lookaheads):
            raise SpeculationError(f"lookaheads is {lookaheads!r}; give whole numbers from 0 to {MAX_LOOKAHEAD}.")
        super().__init__(max(1, *self.lookaheads))
        self._vocab_size = 2
        self._number = 0
        self._token = 0
        self._seconds: dict[tuple[int, int], list[float]] = {}
        self._contexts: list[float] = []

    def bind(self, target: TargetModel) -> None:
        self._vocab_size = target.vocab_size

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        wanted = self.lookaheads[self._number % len(self.lookaheads)]
        return [self._tokens(min(wanted, ask.limit)) for ask in asks]

    def step_done(self, outcome: StepOutcome) -> None:
        wanted = self.lookaheads[self._number % len(self.lookaheads)]
        self._number += 1
        if all(verdict.num_drafted == wanted for verdict in outcome.verdicts):
            num_sequences = len(outcome.verdicts)
            self._seconds.setdefault((num_sequences, wanted), []).append(outcome.step_s)
            self._contexts.append(outcome.num_context / num_sequences)

    def report(self) -> dict[str, Any]:
        """`steps`: (sequences, guesses of each, steps that count, median seconds). `context`: tokens, in the mean."""
        steps = [
            (batch, lookahead, len(seconds) - WARM_UP, median(seconds[WARM_UP:]))
            for (batch, lookahead), seconds in sorted(self._seconds.items())
            if len(seconds) > WARM_UP
        ]
        return {"steps": steps, "context": sum(self._contexts) / max(1, len(self._contexts))}

    def _tokens(self, count: int) -> list[int]:
        """Others each time, so that a model does not come to agree with them."""
        self._token += count
        return [(7919 * (self._token + number)) % self._vocab_size for number in range(count)]
