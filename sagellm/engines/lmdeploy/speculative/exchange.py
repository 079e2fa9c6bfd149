"""Data of a step that the engine and its model agent exchange beside LMDeploy's own inputs and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sagellm.engines.lmdeploy.sparse_workers import WorkerOutputs

__all__ = ["News", "SpecExtraInputs", "SpecExtraOutputs", "extra_inputs_of"]


class News(NamedTuple):
    """A sequence that the agent does not know, or knows otherwise.

    Attributes:
        known: all its tokens, int64 [n]; None if the step computes only a part of its prompt, so that its sample is void.
        left: tokens that it may still get.
        floor: tokens after which a word may end the answer, which LMDeploy works out once a round; 0 where it may now.
        may_guess: whether guesses can be checked for it; `extra_inputs_of` says which cannot.
    """

    known: np.ndarray | None
    left: int
    floor: int
    may_guess: bool


class SpecExtraInputs:
    """No dataclass, as LMDeploy copies those field by field in every step.

    Attributes:
        request_ids: by sequence of the step.
        num_blocks: KV blocks that each holds.
        block_size: tokens of a block.
        news: by place in the step; of the others the agent knows all but their blocks.
        is_counted: a request wants data of each row of the step, which LMDeploy counts by sequence.
        limits: by request, the most guesses that a decision allows.
    """

    __slots__ = ("block_size", "is_counted", "limits", "news", "num_blocks", "request_ids")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.request_ids: list[int] = []
        self.num_blocks: list[int] = []
        self.news: dict[int, News] = {}
        self.is_counted = False
        self.limits: Mapping[int, int] = {}

    def to_device(self, device: str, non_blocking: bool = False) -> "SpecExtraInputs":
        return self


@dataclass
class SpecExtraOutputs(WorkerOutputs):
    """`num_drafted`: int64 [sequences], guesses that were computed in this step; None where there were none. `report`: the
    speculator's, where that is in another process than the engine."""

    num_drafted: torch.Tensor | None = None
    report: dict[str, Any] | None = None


def extra_inputs_of(seqs: list[Any], limits: Mapping[int, int]) -> SpecExtraInputs:
    """For these sequences, which are about to be sent.

    Two sorts of requests get no guesses. One has a grammar or a processor of its own, which looks at one token after the
    other. The other is in a step that returns scores or experts of every token.
    """
    made = SpecExtraInputs(seqs[0].block_size)
    made.limits = dict(limits)  # it may go to other processes
    for number, seq in enumerate(seqs):
        if seq.num_token_ids != 1 or getattr(seq, "sage_known", -1) != seq.num_valid_ids:
            param = seq.sampling_param
            made.news[number] = _news_of(seq, param)
            seq.sage_is_counted = param.out_logits or param.return_routed_experts
        made.request_ids.append(seq.session_id)
        made.num_blocks.append(len(seq.logical_blocks))
        if seq.sage_is_counted:
            made.is_counted = True
    return made


def _news_of(seq: Any, param: Any) -> News:
    is_part = seq.num_valid_ids < len(seq.history_cache)
    has_floor = param.stop_words and not param.ignore_eos
    follows_grammar = bool(param.response_format) and param.response_format.get("type") != "text"
    return News(
        None if is_part else np.array(seq.valid_ids, np.int64),
        param.max_new_tokens - seq.num_new_tokens,
        max(0, param.min_new_tokens - seq.num_new_tokens) if has_floor else 0,
        not (follows_grammar or param.logits_processors),
    )
