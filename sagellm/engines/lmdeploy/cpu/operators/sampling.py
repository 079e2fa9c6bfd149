"""Drawing the next tokens, reproducible from a seed."""

from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuilder, MultinomialSamplingImpl
from lmdeploy.pytorch.engine.logits_process import SamplingInputs

from sagellm.accel.speculative.base import Draw
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.engines.lmdeploy.cpu.packed import kernels_of

Sampled = tuple[int, list[float], list[int]]  # a token; log probabilities, and their tokens


def wishes_of(sampling: SamplingInputs, rows: int, vocabulary: int) -> dict[str, Any]:
    """Translate what LMDeploy asks of a step for the native code."""
    wishes: dict[str, Any] = choice_of(sampling, rows, vocabulary) | {"num_logprobs": sampling.max_num_logprobs}
    for name in ("temperature", "repetition_penalty"):
        if (values := getattr(sampling, name)) is not None:
            wishes[name] = values.tolist()
    if sampling.repetition_penalty is not None:
        wishes["seen"] = sampling.all_ids.flatten().tolist()
    words, marks = [], []
    if sampling.bad_words is not None:
        words, marks = [sampling.bad_words], [sampling.bad_mask]
    if sampling.stop_words is not None and any(left > 0 for left in sampling.num_ignore_eos.tolist()):
        words.append(sampling.stop_words)
        marks.append(sampling.stop_mask & (sampling.num_ignore_eos > 0)[:, None])
    if words:
        wishes["forbidden"] = torch.cat(words, 1).flatten().tolist()
        wishes["forbidden_marks"] = torch.cat(marks, 1).flatten().tolist()
    return wishes


def follow(wishes: dict[str, Any], tokens: list[int]) -> None:
    """Turn the wishes of a step into those of the next one. `tokens`: what each row has drawn."""
    if "offsets" in wishes:
        wishes["offsets"] = [offset + 1 for offset in wishes["offsets"]]
    if "seen" in wishes:
        seen, width = wishes["seen"], len(wishes["seen"]) // len(tokens)
        rows = [[*seen[row * width : (row + 1) * width], token] for row, token in enumerate(tokens)]
        wishes["seen"] = [token for row in rows for token in row]


def choice_of(sampling: SamplingInputs, rows: int, vocabulary: int) -> dict[str, Any]:
    """Translate how a token is chosen once penalties are applied."""
    wishes: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "num_logprobs": -1}
    if sampling.max_top_k == 1:
        return wishes
    if sampling.top_k is not None:
        wishes["top_k"] = sampling.top_k.tolist()
    elif sampling.max_top_k > 0:
        wishes["top_k"] = [sampling.max_top_k] * rows
    for name in ("top_p", "min_p"):
        if (values := getattr(sampling, name)) is not None:
            wishes[name] = values.tolist()
    return wishes | {"seeds": sampling.random_seeds.tolist(), "offsets": sampling.random_offsets.tolist()}


def draws_of(sampling: SamplingInputs) -> Callable[[int, int], Draw] | None:
    """Return a function of (sequence, count) that tells how the next `count` tokens of a sequence are drawn. None if all take
    their likeliest tokens."""
    if sampling.max_top_k == 1:
        return None
    wishes = choice_of(sampling, len(sampling.random_seeds), 0)
    temperatures = [] if sampling.temperature is None else sampling.temperature.tolist()

    def draw(number: int, count: int) -> Draw:
        seed, offset = wishes["seeds"][number], wishes["offsets"][number]
        way = [
            values[number] if values else free
            for values, free in (
                (temperatures, 1.0), (wishes.get("top_k"), 0), (wishes.get("top_p"), 1.0), (wishes.get("min_p"), 0.0),
            )
        ]  # fmt: skip
        return Draw([_uniform(seed, offset + place) for place in range(count)], tuple(way))

    return draw


def sample(logits: torch.Tensor, sampling: SamplingInputs) -> torch.Tensor:
    """Draw a token for each row of `logits`, [rows, vocabulary], to which penalties are applied. Returns [rows]."""
    logits = logits.float().contiguous()
    wishes = choice_of(sampling, *logits.shape)
    drawn = kernels_of(torch.float32, "").sample(logits.data_ptr(), wishes)
    return torch.tensor([token for token, _, _ in drawn])


class CpuMultinomialSamplingImpl(MultinomialSamplingImpl):
    """Inverse-transform sampling; one uniform number a row, drawn from (seed, offset) alone.

    So a request with a seed gets the same tokens whatever it is batched with.
    """

    def forward(
        self,
        scores: torch.Tensor,
        seeds: torch.Tensor,
        offsets: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`scores`: [batch, k] probabilities; `seeds`, `offsets`: [batch]; `indices`: [batch, k]. Returns [batch]."""
        cumulative = scores.float().cumsum(-1)
        uniform = torch.tensor([[_uniform(s, o)] for s, o in zip(seeds.tolist(), offsets.tolist(), strict=True)])
        position = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        # Rounding can push the draw past the last token that has any probability.
        last = (scores > 0).to(torch.int64).cumsum(-1).argmax(-1, keepdim=True)
        position = torch.minimum(position, last)
        return (position if indices is None else indices.gather(1, position)).view(-1)


def _uniform(seed: int, offset: int) -> float:
    """A number in [0, 1) from two integers: splitmix64 (Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


class CpuMultinomialSamplingBuilder(MultinomialSamplingBuilder):
    @staticmethod
    def build() -> CpuMultinomialSamplingImpl:
        return CpuMultinomialSamplingImpl()


FAMILY = OperatorFamily(builders={"MultinomialSampling": CpuMultinomialSamplingBuilder})
