"""When a sequence that gets several tokens in a step has to stop, and behind which of them."""

from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch.strategies.base.model_agent import StoppingCriteria

__all__ = ["SpecStoppingCriteria"]


@dataclass
class SpecStoppingCriteria(StoppingCriteria):
    """`num_appendable_ids`: int64 [sequences], tokens that each may still get."""

    num_appendable_ids: torch.Tensor

    def step(
        self, token_ids: torch.Tensor, stop_words: torch.Tensor | None, inputs: Any = None, extra_inputs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, "SpecStoppingCriteria"]:
        """`token_ids`: int64 [sequences, longest], -1 where a sequence has got fewer.

        Returns (whether it stops, bool [sequences]; the place of its last token, int64 [sequences]; what holds for the next
        step).
        """
        is_token = token_ids >= 0
        number = is_token.cumsum(1)
        ends = is_token & (number >= self.num_appendable_ids[:, None])
        if stop_words is not None:
            # Words of -1 and 0 fill the table up: what is masked off in it is 0 in LMDeploy's sampling, too.
            ends |= is_token & (token_ids[:, :, None] == stop_words[:, None, :]).any(2)
        stopped = ends.any(1)
        place = torch.where(stopped, ends.int().argmax(1), number[:, -1] - 1)
        left = self.num_appendable_ids - number[:, -1]
        return stopped, place, SpecStoppingCriteria(torch.where(stopped, left.clamp(max=0), left))
