"""What travels between the engine and its model agent with each step, beside LMDeploy's own inputs and outputs."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.strategies.ar.model_agent import ARExtraInputs, ARExtraOutputs

__all__ = ["SpecExtraInputs", "SpecExtraOutputs", "extra_inputs_of"]


@dataclass
class SpecExtraInputs(ARExtraInputs):
    """By sequence of the step.

    Attributes:
        request_ids: names of the requests.
        known: all tokens of those that the agent does not know, or knows otherwise, int64 [n]; None of the others.
        num_blocks: KV blocks that each holds.
        rooms: tokens that fit into a sequence's blocks behind its last one.
        lefts: tokens that it may still get.
        floors: tokens after which a word may end the answer, which LMDeploy works out once a round; 0 where it may now.
        may_guess: whether guesses can be checked for it; `extra_inputs_of` says which cannot.
        is_part: whether the step computes a part of its prompt alone, so that what is sampled means nothing.
        is_counted: somebody wants something of each row of the step, which LMDeploy counts by sequence.
    """

    request_ids: list[int] = field(default_factory=list)
    known: list[np.ndarray | None] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    lefts: list[int] = field(default_factory=list)
    floors: list[int] = field(default_factory=list)
    may_guess: list[bool] = field(default_factory=list)
    is_part: list[bool] = field(default_factory=list)
    is_counted: bool = False


@dataclass
class SpecExtraOutputs(ARExtraOutputs):
    """`num_drafted`: int64 [sequences], guesses that were computed in this step."""

    num_drafted: torch.Tensor | None = None


def extra_inputs_of(seqs: list[Any]) -> SpecExtraInputs:
    """For these sequences, which are about to be sent.

    Left without guesses: requests whose answers follow a grammar or a processor of their own, since these look at one token
    after the other; and all in a step of which somebody wants the scores or experts of every token.
    """
    made = SpecExtraInputs(
        is_counted=any([seq.sampling_param.out_logits or seq.sampling_param.return_routed_experts for seq in seqs])
    )
    for seq in seqs:
        param = seq.sampling_param
        is_known = seq.num_token_ids == 1 and getattr(seq, "sage_known", -1) == seq.num_valid_ids
        made.request_ids.append(seq.session_id)
        made.known.append(None if is_known else np.array(seq.valid_ids, np.int64))
        made.num_blocks.append(len(seq.logical_blocks))
        made.rooms.append(len(seq.logical_blocks) * seq.block_size - seq.num_valid_ids)
        made.lefts.append(param.max_new_tokens - seq.num_new_tokens)
        has_floor = param.stop_words and not param.ignore_eos
        made.floors.append(max(0, param.min_new_tokens - seq.num_new_tokens) if has_floor else 0)
        follows_grammar = bool(param.response_format) and param.response_format.get("type") != "text"
        made.may_guess.append(not (follows_grammar or param.logits_processors))
        made.is_part.append(seq.num_valid_ids < len(seq.history_cache))
    return made
