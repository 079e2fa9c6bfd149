"""A strategy of two halves: a `DraftModel` that guesses, and a `Verifier` of its guesses."""

from collections.abc import Sequence
from typing import Any

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy
from sagellm.accel.speculative.halves import EXACT, DraftModel, Verifier, load_half
from sagellm.accel.speculative.tree import Draft

__all__ = ["PairStrategy"]


class PairStrategy(SpeculativeStrategy):
    """Asks a `DraftModel` for guesses and lets a `Verifier` judge them.

    Args:
        draft: the `DraftModel`, as module:Class; required.
        verifier: the `Verifier`, as module:Class; by default the exact one, which changes no answer.
        lookahead: largest number of guesses for a sequence and step, 1 to 64.
        draft_options: keyword arguments of the draft model.

    Raises:
        SpeculationError: a half that cannot be loaded, or options out of range.
    """

    name = "pair"
    joins = True

    def __init__(
        self, draft: str | DraftModel | None = None, verifier: str | Verifier | None = None, lookahead: int = 4,
        draft_options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lookahead)
        self._draft = load_half(draft, DraftModel, **(draft_options or {}))
        self.verifier = EXACT if verifier is None else load_half(verifier, Verifier)

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        return self._draft.generate_draft([ask.tokens for ask in asks], [ask.limit for ask in asks])
