"""Rotary position embedding (Su et al., 2021): its table, and how it is applied, in place."""

from collections.abc import Mapping
from typing import Any

import torch
from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuilder, ApplyRotaryEmbImpl
from lmdeploy.pytorch.backends.default.rotary_embedding import DefaultRotaryEmbeddingBuilder
from lmdeploy.pytorch.backends.rotary_embedding import RopeType, RotaryEmbeddingBuilder
from torch import nn

from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily

# With these a token's angles depend on its position alone; the others ask how long the longest text is.
TABLED = (RopeType.Default, RopeType.LinearScaling, RopeType.Llama3, RopeType.Yarn)
FIRST_POSITIONS = 1024


class TabledRotaryEmbedding(nn.Module):
    """cos and sin of LMDeploy's own embedding, computed once for each position, not in each step.

    Args:
        embedding: (x, position_ids [1, tokens]) -> cos, sin, [1, tokens, dim] of the dtype of `x`.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = embedding
        self._tables: dict[torch.dtype, torch.Tensor] = {}  # [positions, 2 * dim]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.table(int(position_ids.max()) + 1, x.dtype)
        return table.index_select(0, position_ids.flatten()).view(*position_ids.shape, -1).chunk(2, dim=-1)

    def table(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return cos and sin of at least the positions below `size`, [positions, 2 * dim]."""
        found = self._tables.get(dtype)
        if found is None or len(found) < size:
            positions = torch.arange(max(FIRST_POSITIONS, 1 << (size - 1).bit_length()))
            found = torch.cat(self._embedding(torch.empty(0, dtype=dtype), positions[None]), dim=-1)[0]
            self._tables[dtype] = found
        return found


def _table_bytes(text_config: Mapping[str, Any], dtype: str, context_length: int) -> int:
    """Size of the table once every position of the context was used: [positions, 2 * dim]."""
    heads = int(text_config["num_attention_heads"])
    dim = int(text_config.get("head_dim") or text_config["hidden_size"] // heads)
    positions = max(FIRST_POSITIONS, 1 << (context_length - 1).bit_length())
    return positions * 2 * dim * (4 if dtype == "float32" else 2)


class CpuRotaryEmbeddingBuilder(RotaryEmbeddingBuilder):
    @staticmethod
    def build(*args, emb_type: RopeType = RopeType.Default, **kwargs) -> nn.Module:
        embedding = DefaultRotaryEmbeddingBuilder.build(*args, emb_type=emb_type, **kwargs)
        return TabledRotaryEmbedding(embedding) if emb_type in TABLED else embedding


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


FAMILY = OperatorFamily(
    builders={"ApplyRotaryEmb": CpuApplyRotaryEmbBuilder, "RotaryEmbedding": CpuRotaryEmbeddingBuilder},
    extra_bytes=_table_bytes,
)
