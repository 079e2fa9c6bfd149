"""The contract of a speculative strategy. It guesses the next tokens, and the model verifies all guesses in one forward pass.

A wrong guess costs time, and never changes the answer.

In every decode step the engine asks `propose` for each sequence, and computes the guesses together with the sequence's last
token. It keeps the guesses that agree with the tokens of the model's own sampling. So the output is that of decoding without
guesses, also at temperatures above 0: a guess x is kept with probability p(x), and otherwise replaced by a token drawn from p
without x (Leviathan et al., 2023; Chen et al., 2023).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from sagellm.accel.speculative.halves import EXACT, Verifier
from sagellm.accel.speculative.tree import Draft
from sagellm.core.errors import SpeculationError
from sagellm.core.options import option_checks

__all__ = [
    "Ask", "Draw", "ModelRunner", "SpeculativeStrategy", "StepOutcome", "TargetModel", "Verdict", "check_count", "check_number",
]  # fmt: skip

check_number, check_count = option_checks("speculative strategy", SpeculationError)

MAX_LOOKAHEAD = 64
MAX_QUIET = 1024  # steps


class Draw(NamedTuple):
    """How the next tokens of a sequence will be drawn, which its seed decides.

    Each token has a number, and the sampler takes the token in whose part of the cumulative probabilities the number lies. So
    equal texts get equal tokens for equal numbers, and all numbers between two that gave one token give that token.

    Attributes:
        numbers: float, 0 to 1, one for each guess that is allowed, and one more.
        way: what else chooses the token: temperature, top_k, top_p and min_p.
    """

    numbers: Sequence[float]
    way: tuple[float, int, float, float]


class Ask(NamedTuple):
    """A sequence before its decode step.

    Attributes:
        request_id: request, as in `begin`.
        tokens: int64 [n], prompt and answer so far; read-only, and of this call alone.
        limit: largest number of guesses, 1 or more.
        blocks: int64 [m], the KV blocks of the target model that hold it and the guesses, in order: token t is in block
            `blocks[t // block_size]`. A draft model keeps its own keys and values in blocks of the same numbers.
        tree: for a strategy that `takes_shape`: False for a list, as where the device computes no trees, True for a tree, None
            for the one that it likes.
        draw: for a strategy that `takes_draws`; None where the likeliest tokens are taken, and where the numbers are unknown.
    """

    request_id: int
    tokens: np.ndarray
    limit: int
    blocks: np.ndarray
    tree: bool | None = None
    draw: Draw | None = None


class Verdict(NamedTuple):
    """Outcome of one sequence's guesses: the first `num_accepted` of `num_drafted` were right, and each saved a token.

    A guess of the token that ends the answer does not count, since it saves no step."""

    request_id: int
    num_drafted: int
    num_accepted: int


class StepOutcome(NamedTuple):
    """Outcome of a decode step.

    Attributes:
        verdicts: of every sequence in it, also those without guesses. Each got `num_accepted + 1` tokens.
        num_rows: tokens that were computed.
        num_context: tokens that were in the KV cache before, summed over the sequences.
        step_s: seconds from before the forward pass until the tokens were known.
        propose_s: seconds that `propose` took before.
        paths: by request whose guesses were a tree, the numbers of the right ones. In a chain the right ones are the first.
    """

    verdicts: tuple[Verdict, ...]
    num_rows: int
    num_context: int
    step_s: float
    propose_s: float
    paths: Mapping[int, Sequence[int]] = MappingProxyType({})


class ModelRunner(Protocol):
    """A second model on the engine's device. Its keys and values are in blocks numbered as the target's.

    `vocab_size`: it takes tokens below that, which may be more or less than the target's; it answers tokens that both have.
    """

    vocab_size: int

    def forward(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Compute new tokens of several sequences.

        Args:
            token_ids: of each sequence, int64 [n], n >= 1.
            num_before: tokens of each sequence that were computed before.
            blocks: as `Ask.blocks`.

        Returns:
            int64 [sequences]: the likeliest next token of each.
        """
        ...

    def forward_scored(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `forward`, and the probability of each of these tokens, float [sequences]."""
        ...

    def forward_top(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `forward_scored`, of the `count` likeliest tokens, the likeliest first: [sequences, count] each."""
        ...


class TargetModel(Protocol):
    """The target model and its device."""

    vocab_size: int
    block_size: int
    num_blocks: int
    device: str

    def load(self, folder: Path) -> ModelRunner:
        """Another model beside it. Raises SpeculationError: its vocabulary is another, or the device cannot run it."""
        ...


class SpeculativeStrategy(ABC):
    """Guesses of the tokens that come next. Every method runs on the engine's thread, in every step: it must be quick.

    A subclass gives `name` and `propose`. One that raises, or proposes what makes no sense, is not asked about that request
    again, and the request goes on without guesses.

    Attributes:
        joins: whether one `accept`, before the next `propose`, may bring the tokens of several steps.
        quiet: number of next steps, 0 to 1024, that the engine may report late. Valid if `joins` is true and `lookahead` is 0.
            The engine reports them when the last one is done, or before any other call about a request. It calls `accept` for
            each request, with the tokens of all these steps, and then `step_done` for each step, in order. `lookahead` and
            `quiet` are read again after `step_done`. This saves most of the cost of a step without guesses.
        models: folders that `bind` loads beside the target. They are checked and counted before anything is loaded. A
            strategy that wraps another one returns the other's.
        takes_shape: whether it guesses a list or a tree, as `Ask.tree` says.
        takes_draws: whether it looks at `Ask.draw`.
        verifier: judges its guesses. Any but the exact one may change answers.

    Args:
        lookahead: largest number of guesses for a sequence and step, 1 to 64.

    Raises:
        SpeculationError: a lookahead out of range.
    """

    name: ClassVar[str]
    joins: bool = False
    models: tuple[Path, ...] = ()
    quiet: int = 0
    takes_shape: bool = False
    takes_draws: bool = False
    verifier: Verifier = EXACT

    def __init__(self, lookahead: int = 4) -> None:
        if type(lookahead) is not int or not 1 <= lookahead <= MAX_LOOKAHEAD:
            raise SpeculationError(
                f"lookahead is {lookahead!r}; give a whole number from 1 to {MAX_LOOKAHEAD}, or start without --speculative."
            )
        self.lookahead = lookahead

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        """Return for each of `asks`, in order, up to `limit` guesses of the tokens that follow; empty for none.

        They are a list of tokens, each behind the one before it, or a `DraftTree`. Where the device computes no trees, the
        engine takes the best chain of it.
        """

    def bind(self, target: TargetModel) -> None:  # noqa: B027, those that keep no accounts need not
        """Take the target model of the engine. Raises SpeculationError if the strategy cannot work with it."""

    def begin(self, request_id: int, tokens: np.ndarray) -> None:  # noqa: B027
        """Begin a request, or resume one that was preempted. `tokens`: int64 [n], all so far; read-only."""

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:  # noqa: B027
        """Take the tokens of a step: the right guesses, and one of the model's own. If it `joins`, those of several steps."""

    def end(self, request_id: int) -> None:  # noqa: B027
        """End a request. May come late, and for requests that were never begun."""

    def step_done(self, outcome: StepOutcome) -> None:  # noqa: B027
        """Take the outcome of a decode step, after `accept` of its requests. May come late, see `quiet`."""

    def report(self) -> dict[str, Any]:
        """Return numbers to show, as plain data."""
        return {}
