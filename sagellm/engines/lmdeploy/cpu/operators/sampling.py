"""Sampling a token from probabilities, reproducible from a seed."""

import torch
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuilder, MultinomialSamplingImpl

from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily


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
