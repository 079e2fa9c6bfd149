"""Counts of guesses: what was drafted, what was right, by place."""

from typing import Any

from sagellm.accel.speculative.base import StepOutcome

__all__ = ["Statistics"]


class Statistics:
    """Sums over decode steps. Index k of the lists: the k-th guess of a sequence and step; they are as long as
    the most guesses so far."""

    def __init__(self) -> None:
        self.drafted_at: list[int] = []
        self.accepted_at: list[int] = []
        self.num_steps = self.num_sequences = self.num_guessed = 0
        self.propose_s = self.step_s = 0.0

    def add(self, outcome: StepOutcome) -> None:
        self.add_plain(len(outcome.verdicts), outcome.step_s, outcome.propose_s)
        if outcome.num_rows == len(outcome.verdicts):
            return  # nobody guessed
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
        """A step in which nobody guessed."""
        self.num_steps += 1
        self.num_sequences += num_sequences
        self.propose_s += propose_s
        self.step_s += step_s

    def report(self) -> dict[str, Any]:
        """`mean_accepted`: right guesses of a sequence that had any, in a step. `tokens_per_step`: tokens of a sequence in a
        decode step; 1 without guesses."""
        drafted, accepted = sum(self.drafted_at), sum(self.accepted_at)
        return {
            "steps": self.num_steps, "sequences": self.num_sequences, "guessed": self.num_guessed,
            "drafted": drafted, "accepted": accepted,
            "drafted_at": list(self.drafted_at), "accepted_at": list(self.accepted_at),
            "acceptance": accepted / drafted if drafted else 0.0,
            "mean_accepted": accepted / self.num_guessed if self.num_guessed else 0.0,
            "tokens_per_step": 1 + accepted / self.num_sequences if self.num_sequences else 0.0,
            "propose_s": self.propose_s, "step_s": self.step_s,
        }  # fmt: skip
