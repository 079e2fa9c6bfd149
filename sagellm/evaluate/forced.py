"""Answers whose first tokens are given: the scores of decode steps on a known text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sagellm.engines.base import BaseEngine, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["ForcedTokens", "answer_after", "decode_scores"]


class ForcedTokens:
    """A processor of `SamplingParams` that makes the first tokens of an answer those given.

    Attributes:
        scores: log-probabilities before each forced token, float32 [vocabulary] each, if they are kept.
    """

    def __init__(self, tokens: Sequence[int], keeps_scores: bool = False) -> None:
        self._tokens, self._keeps_scores = list(tokens), keeps_scores
        self._num_done = 0
        self.scores: list[np.ndarray] = []

    def __call__(self, ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        number, self._num_done = self._num_done, self._num_done + 1
        if number >= len(self._tokens):
            return scores
        if self._keeps_scores:
            self.scores.append(scores.float().log_softmax(-1).cpu().numpy())
        forced = scores.new_full(scores.shape, float("-inf"))
        forced[self._tokens[number]] = 0
        return forced


def decode_scores(
    engine: BaseEngine, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return log-probabilities before each token of the text behind each prompt, float32 [len(text), vocabulary].

    The first row is of the prompt's own step, the others of decode steps.
    """
    forced = [ForcedTokens(text, keeps_scores=True) for text in texts]
    params = [
        SamplingParams(max_new_tokens=len(text), ignore_eos=True, processors=(force,))
        for text, force in zip(texts, forced, strict=True)
    ]
    engine.generate(prompts, params)
    return [np.stack(force.scores) for force in forced]


def answer_after(
    engine: BaseEngine, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return `num_tokens` greedy tokens behind each prompt and text, all from decode steps."""
    params = [
        SamplingParams(max_new_tokens=len(text) + num_tokens, ignore_eos=True, processors=(ForcedTokens(text),))
        for text in texts
    ]
    done = engine.generate(prompts, params)
    return [list(one.token_ids[len(text) :]) for one, text in zip(done, texts, strict=True)]
