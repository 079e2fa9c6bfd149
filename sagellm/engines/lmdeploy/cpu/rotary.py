"""Rotary position embedding (Su et al., 2021), applied in place."""

import torch
from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuilder, ApplyRotaryEmbImpl


class CpuApplyRotaryEmbImpl(ApplyRotaryEmbImpl):
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inplace: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`query`: [tokens, heads, dim], `key`: [tokens, kv_heads, dim], `cos` and `sin`: [tokens, dim]."""
        if not inplace:
            query, key = query.clone(), key.clone()
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        both = _joined(query, key)
        for states in (query, key) if both is None else (both,):
            _rotate_(states, cos, sin)
        return query, key


def _rotate_(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = states.shape[-1] // 2
    turned = torch.cat((states[..., half:], states[..., :half]), dim=-1).mul_(sin)
    turned[..., :half].neg_()
    states.mul_(cos).add_(turned)


def _joined(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """One view over both when the key heads follow the query heads in memory, as in a packed projection."""
    tokens, heads, dim = query.shape
    adjacent = key.data_ptr() == query.data_ptr() + heads * dim * query.element_size()
    if not adjacent or key.stride() != query.stride() or query.stride()[1:] != (dim, 1):
        return None
    return query.as_strided((tokens, heads + key.shape[1], dim), query.stride())


class CpuApplyRotaryEmbBuilder(ApplyRotaryEmbBuilder):
    @staticmethod
    def build() -> CpuApplyRotaryEmbImpl:
        return CpuApplyRotaryEmbImpl()
