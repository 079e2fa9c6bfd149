"""The contract of a speculative strategy: it guesses what comes next, the model checks all guesses in one forward pass, and
what is kept is what the model would have said anyway. A bad guess costs time, never a token.

In every decode step the engine asks `propose` for each sequence that may be guessed at, computes the guesses together with the
sequence's last token, and keeps those that agree with the tokens that the model's own sampling gives at their places. So output
is that of decoding without guesses, also at temperatures above 0: a guess x that is certain of itself is kept with probability
p(x), and otherwise replaced by a token drawn from p without x (Leviathan et al., 2023; Chen et al., 2023).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from sagellm.core.errors import SpeculationError
from sagellm.core.options import option_checks

__all__ = [
    "Ask", "ModelRunner", "SpeculativeStrategy", "StepOutcome", "TargetModel", "Verdict", "check_count", "check_number",
]  # fmt: skip

check_number, check_count = option_checks("speculative strategy", SpeculationError)

MAX_LOOKAHEAD = 64
MAX_QUIET = 1024  # steps


class Ask(NamedTuple):
    """A sequence that is about to decode.

    Attributes:
        request_id: whose it is, as in `begin`.
        tokens: int64 [n], prompt and answer so far; read-only, and of this call alone.
        limit: at most so many guesses, 1 or more.
        blocks: int64 [m], the KV blocks of the target model that hold it and the guesses, in order: token t is in block
            `blocks[t // block_size]`. A draft model keeps its own keys and values in blocks of the same numbers.
    """

    request_id: int
    tokens: np.ndarray
    limit: int
    blocks: np.ndarray


class Verdict(NamedTuple):
    """What became of one sequence's guesses: the first `num_accepted` of `num_drafted` were right, and gave it a token each
    that the step would not have given without them. What ends an answer is the model's own token, also where it was guessed:
    nothing was saved by that."""

    request_id: int
    num_drafted: int
    num_accepted: int


class StepOutcome(NamedTuple):
    """A decode step is done.

    Attributes:
        verdicts: of every sequence in it, also those without guesses. Each got `num_accepted + 1` tokens.
        num_rows: tokens that were computed.
        num_context: tokens that were in the KV cache before, summed over the sequences.
        step_s: seconds from before the forward pass until the tokens were known.
        propose_s: seconds that `propose` took before.
    """

    verdicts: tuple[Verdict, ...]
    num_rows: int
    num_context: int
    step_s: float
    propose_s: float


class ModelRunner(Protocol):
    """A second model on the engine's device, with keys and values of its own in blocks numbered as the target's.

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
            int64 [sequences]: the likeliest token behind each.
        """
        ...

    def forward_scored(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `forward`, and the probability of each of these tokens, float [sequences]."""
        ...


class TargetModel(Protocol):
    """The model that is to be spared work, and the device that it is on."""

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
        joins: whether `accept` may come late, before the next `propose`, with what several steps gave the request.
        quiet: so many steps from now on it need not be told of when they are done, 0 to 1024. They are told of late: at the
            latest when the last of them is done, and before anything else is said of any request; first `accept` of each
            request, with what all of them gave it, then `step_done` of each step, in order. Until then nobody looks at
            `lookahead` or `quiet` again, which is looked at behind `step_done`. It holds where `joins` is true and
            `lookahead` is 0, and spares most of what a step without guesses costs beside the engine.
        models: folders that `bind` loads beside the target; they are checked and counted before anything is loaded. Whoever
            wraps another strategy gives on the other's.

    Args:
        lookahead: at most so many guesses for a sequence and step, 1 to 64.

    Raises:
        SpeculationError: a lookahead out of range.
    """

    name: ClassVar[str]
    joins: bool = False
    models: tuple[Path, ...] = ()
    quiet: int = 0

    def __init__(self, lookahead: int = 4) -> None:
        if type(lookahead) is not int or not 1 <= lookahead <= MAX_LOOKAHEAD:
            raise SpeculationError(
                f"lookahead is {lookahead!r}; give a whole number from 1 to {MAX_LOOKAHEAD}, or start without --speculative."
            )
        self.lookahead = lookahead

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """For each of `asks`, in order, up to `limit` guesses of what follows `tokens`; empty where there is no idea."""

    def bind(self, target: TargetModel) -> None:  # noqa: B027, those that keep no accounts need not
        """The engine is built. Raises SpeculationError: the strategy cannot work with this model."""

    def begin(self, request_id: int, tokens: np.ndarray) -> None:  # noqa: B027
        """A request comes, or comes back after it lost its place: int64 [n], all of its tokens so far; read-only."""

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:  # noqa: B027
        """A step gave the request these tokens: the guesses that were right, and one of the model's own; where it `joins`,
        several steps may have given them."""

    def end(self, request_id: int) -> None:  # noqa: B027
        """The request has ended. Comes late at times, and also for requests that were never begun."""

    def step_done(self, outcome: StepOutcome) -> None:  # noqa: B027
        """A decode step has ended; after `accept` of its requests. `quiet` says when it may come late."""

    def report(self) -> dict[str, Any]:
        """Numbers to show: plain data."""
        return {}
