"""When a sequence that gets several tokens in a step has to stop, and behind which of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.strategies.ar.model_agent import ARStoppingCriteria

__all__ = ["SpecStoppingCriteria"]


@dataclass
class SpecStoppingCriteria(ARStoppingCriteria):
    """`num_appendable_ids`: int64 [sequences], tokens that each may still get."""

    def step(
        self, token_ids: torch.Tensor, stop_words: torch.Tensor | None, inputs: Any = None, extra_inputs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, "SpecStoppingCriteria"]:
        """`token_ids`: int64 [sequences, longest], -1 where a sequence has got fewer; [sequences] of a step without guesses.

        Returns (whether it stops, bool [sequences]; the place of its last token, int64 [sequences]; what holds for the next
        step).
        """
        if token_ids.dim() == 1:
            stopped, place, after = super().step(token_ids, stop_words)
            return stopped, place, SpecStoppingCriteria(after.num_appendable_ids)
        table, lefts = token_ids.tolist(), self.num_appendable_ids.tolist()
        # Words of -1 and 0 fill the table up: what is masked off in it is 0 in LMDeploy's sampling, too.
        words = [()] * len(table) if stop_words is None else stop_words.tolist()
        stopped, places = [], []
        for number, tokens in enumerate(table):
            count = tokens.index(-1) if tokens[-1] < 0 else len(tokens)
            place, has_ended = _end_of(tokens[:count], lefts[number], words[number])
            stopped.append(has_ended)
            places.append(place)
            lefts[number] = min(0, lefts[number] - count) if has_ended else lefts[number] - count
        on = token_ids.device
        left = SpecStoppingCriteria(torch.tensor(lefts, device=on))
        return torch.tensor(stopped, device=on), torch.tensor(places, device=on), left


def _end_of(tokens: list[int], left: int, words: Sequence[int]) -> tuple[int, bool]:
    """The place of a sequence's last token, and whether it ends there."""
    for place, token in enumerate(tokens):
        if place + 1 >= left or token in words:
            return place, True
    return len(tokens) - 1, False
