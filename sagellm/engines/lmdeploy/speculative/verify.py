"""Rows of one forward pass that checks guesses: what each is sampled by, and where an answer ends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sagellm.accel.speculative.tree import Draft, DraftTree, depths_of

__all__ = ["sampling_rows", "up_to_stop", "with_tails"]


PER_ROW = (
    "temperature", "bad_words", "bad_mask", "stop_words", "stop_mask", "repetition_penalty", "top_k", "top_p", "min_p",
    "random_seeds",
)  # fmt: skip


def tails_of(draft: Draft) -> list[list[int]]:
    """The guesses before each row."""
    if isinstance(draft, DraftTree):
        return [draft.path_tokens(node) for node in range(-1, len(draft))]
    return [list(draft[:place]) for place in range(len(draft) + 1)]


def up_to_stop(tokens: list[int], stop_words: Sequence[int]) -> list[int]:
    """The tokens up to the first one that ends an answer, which is then the model's own token of the step. Words of 0 count
    where LMDeploy has padded with them, as there."""
    for place, token in enumerate(tokens[:-1]):
        if token in stop_words:
            return tokens[: place + 1]
    return tokens


def sampling_rows(inputs: Any, drafts: Sequence[Draft]) -> Any:
    """LMDeploy's `SamplingInputs` of B sequences, for the rows of all their guesses: each row as if it stood alone, the guesses
    before it being part of its text. A draw depends on the seed and the number of tokens before, so a row draws what the
    sequence would have drawn there without guesses. In a tree a row's text has the guesses on its path.
    """
    index = [number for number, guesses in enumerate(drafts) for _ in range(len(guesses) + 1)]
    changed: dict[str, Any] = {}
    for name in ("response_formats", "logits_processors", "session_ctx"):
        value = getattr(inputs, name)
        if value:
            changed[name] = type(value)([value[number] for number in index])
    per_row = [name for name in PER_ROW if getattr(inputs, name) is not None]
    if per_row or inputs.random_offsets is not None or inputs.all_ids is not None:
        rows = torch.tensor(index)
        offset = torch.tensor([place for draft in drafts for place in (0, *[depth + 1 for depth in depths_of(draft)])])
        for name in per_row:
            value = getattr(inputs, name)
            changed[name] = value.index_select(0, rows.to(value.device))
        if inputs.random_offsets is not None:
            changed["random_offsets"] = _plus(inputs.random_offsets, rows, offset)
        if inputs.num_ignore_eos is not None:
            changed["num_ignore_eos"] = _plus(inputs.num_ignore_eos, rows, -offset)
        if inputs.all_ids is not None:
            changed["all_ids"] = _texts(inputs.all_ids, rows, drafts)
    else:  # greedy, and no stop words: who samples looks at no tensor, also at none of these
        changed["num_ignore_eos"] = None
    return replace(inputs, batch_size=len(index), **changed)


def _plus(values: torch.Tensor, rows: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return values.index_select(0, rows.to(values.device)) + offset.to(values.device)


def _texts(all_ids: torch.Tensor, rows: torch.Tensor, drafts: Sequence[Draft]) -> torch.Tensor:
    texts = all_ids.index_select(0, rows.to(all_ids.device))
    return with_tails(texts, [tail for draft in drafts for tail in tails_of(draft)])


def with_tails(texts: torch.Tensor, tails: Sequence[Sequence[int]]) -> torch.Tensor:
    """Texts of one length, int64 [rows, n], each with further tokens: [rows, n + longest].

    One that gets fewer repeats its first token before it, where LMDeploy pads too: a penalty counts it once, and the
    end of the text has it.
    """
    longest = max(map(len, tails))
    made = texts.new_empty(len(tails), texts.shape[1] + longest)
    for row, tail in enumerate(tails):
        pad = longest - len(tail)
        made[row, :pad] = texts[row, 0]
        made[row, pad : pad + texts.shape[1]] = texts[row]
        made[row, pad + texts.shape[1] :] = texts.new_tensor(tail)
    return made
