"""Counts of guesses: what was drafted, what was right, by place; of all requests, and of one."""

from typing import Any, NamedTuple

from sagellm.accel.speculative.base import StepOutcome

__all__ = ["RequestGuesses", "Statistics"]


class RequestGuesses(NamedTuple):
    """Sums over the decode steps of one request that had guesses, which are `num_guessed`: others cost nothing here. Index k of
    the tuples: the k-th guess of a step."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_guessed: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    def plus(self, num_drafted: int, num_accepted: int) -> "RequestGuesses":
        """After another step with guesses."""
        drafted, accepted, guessed, drafted_at, accepted_at = self
        return RequestGuesses(
            drafted + num_drafted, accepted + num_accepted, guessed + 1,
            _one_more(drafted_at, num_drafted, len(drafted_at)), _one_more(accepted_at, num_accepted, num_drafted),
        )  # fmt: skip


def _one_more(counts: tuple[int, ...], first: int, length: int) -> tuple[int, ...]:
    """`counts` with 1 added at the first so many places; zeros fill it up to `length`, if that is more."""
    kept = counts + (0,) * (max(first, length) - len(counts))
    return (*[count + 1 for count in kept[:first]], *kept[first:])


class Statistics:
    """Sums over decode steps. Index k of the lists: the k-th guess of a sequence and step; they are as long as
    the most guesses so far."""

    def __init__(self) -> None:
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []
        self.num_steps = self.num_sequences = self.num_guessed = self.num_trees = 0
        self.propose_s = self.step_s = 0.0

    def add(self, outcome: StepOutcome) -> None:
        self.add_plain(len(outcome.verdicts), outcome.step_s, outcome.propose_s)
        if outcome.num_rows == len(outcome.verdicts):
            return  # no guesses
        self.num_trees += len(outcome.paths)
        for _, num_drafted, num_accepted in outcome.verdicts:
            self.num_guessed += num_drafted > 0
            if num_drafted > len(self.drafted_at):
                longer = [0] * (num_drafted - len(self.drafted_at))
                self.drafted_at += longer
                self.accepted_at += longer
            for place in range(num_drafted):
                self.drafted_at[place] += 1
            for place in range(num_accepted):
                self.accepted_at[place] += 1

    def add_plain(self, num_sequences: int, step_s: float, propose_s: float = 0.0) -> None:
        """A step without guesses."""
        self.num_steps += 1
        self.num_sequences += num_sequences
        self.propose_s += propose_s
        self.step_s += step_s

    def report(self) -> dict[str, Any]:
        """`guessed`: decode steps of a sequence with guesses; `trees`: those whose guesses were a tree.

        `mean_accepted`: right guesses of a sequence that had any, in a step. `tokens_per_step`: tokens of a sequence in a
        decode step; 1 without guesses.
        """
        drafted, accepted = sum(self.drafted_at), sum(self.accepted_at)
        return {
            "steps": self.num_steps, "sequences": self.num_sequences, "guessed": self.num_guessed,
            "trees": self.num_trees,
            "drafted": drafted, "accepted": accepted,
            "drafted_at": list(self.drafted_at), "accepted_at": list(self.accepted_at),
            "acceptance": accepted / drafted if drafted else 0.0,
            "mean_accepted": accepted / self.num_guessed if self.num_guessed else 0.0,
            "tokens_per_step": 1 + accepted / self.num_sequences if self.num_sequences else 0.0,
            "propose_s": self.propose_s, "step_s": self.step_s,
        }  # fmt: skip
