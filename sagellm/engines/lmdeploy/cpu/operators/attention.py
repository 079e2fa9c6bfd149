"""Paged attention over LMDeploy's KV blocks.

A layer's cache is [blocks, block_size, kv_heads, dim]; seen as [slots, kv_heads, dim], token t of a sequence lies in
slot `table[t // block_size] * block_size + t % block_size`. Blocks that follow each other in memory, the usual case, are
read in place; others are gathered. A batch of short sequences that decode is gathered as a whole: one product over a
padded copy costs less than a call for each sequence. With guesses behind their last tokens sequences have several queries, of
differing number. Numbers of another type than the model's, or of few bits, are converted as they are read.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.attention import AttentionBuilder, AttentionImpl, AttentionMetadata

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.cpu.cache import CachedRows
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily


@dataclass
class Span:
    """Where one sequence of the batch stands.

    `rows`: its tokens among the step's queries. `num_kv`: tokens in the cache after this step. `first_slot`: the slot of
    token 0 if all its blocks are adjacent, else -1. `slots`: [num_kv] int64, filled only when they are not. `masks`: made
    by the first layer that needs one; of few queries `few`, by window and heads that share a key head.
    """

    rows: slice
    num_kv: int
    first_slot: int
    slots: torch.Tensor | None = None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    few: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)


@dataclass
class DecodeBatch:
    """Up to Q queries for each of B sequences, padded to the longest, L tokens.

    `slots`: [B * L] int64; padding repeats a slot of the same sequence, since a slot that was never written may hold NaN,
    which no mask hides. `mask`: [B, 1, Q, L] in the cache's dtype, 0 where a query may look and -inf elsewhere. Where Q is not
    1, `queries`: [B * Q] int64, rows of the step, the last one of a sequence repeated for those that it lacks; `rows`: [rows]
    int64, where each row of the step stands among them; `masks`: by number of heads that share a key head, each row as often.
    """

    size: int
    slots: torch.Tensor
    mask: torch.Tensor
    queries: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    masks: dict[int, torch.Tensor] = field(default_factory=dict)


# Beyond this many padded tokens the copy costs more than the calls that it saves.
MAX_GATHERED_TOKENS = 6144
# Sequences with more queries are prompts.
MAX_QUERIES = 65


@dataclass
class CpuAttentionMetadata(AttentionMetadata):
    """Facts that every layer of one step needs, computed once, when the first layer that runs eagerly asks.

    Attributes:
        cache: keys of the first layer.
    """

    cache: torch.Tensor | None = None

    @classmethod
    def of_step(cls, context) -> "CpuAttentionMetadata":
        return cls(
            context.is_decoding,
            context.block_offsets,
            q_start_loc=context.q_start_loc,
            q_seqlens=context.q_seqlens,
            kv_seqlens=context.kv_seqlens,
            quant_policy=context.kv_quant_policy,
            cache=context.kv_caches[0][0],
        )

    @cached_property
    def _lengths(self) -> tuple[list[int], list[int]]:
        return self.q_seqlens.tolist(), self.kv_seqlens.tolist()

    @cached_property
    def _planned(self) -> tuple[list[Span], torch.Tensor | None]:
        return _plan(*self._lengths, self.block_offsets.numpy(), self.cache.shape[1])

    @property
    def spans(self) -> list[Span]:
        return self._planned[0]

    @property
    def write_slots(self) -> torch.Tensor | None:
        """[tokens] int64: the cache slot of each new token."""
        return self._planned[1]

    @cached_property
    def batch(self) -> DecodeBatch | None:
        q_lens, kv_lens = self._lengths
        is_decode = max(q_lens) == 1 or (self.is_decoding and max(q_lens) <= MAX_QUERIES)
        return _decode_batch(q_lens, kv_lens, self.block_offsets.numpy(), self.cache) if is_decode else None


def _plan(q_lens: list[int], kv_lens: list[int], tables: np.ndarray, block_size: int):
    spans, writes, row = [], [], 0
    for q_len, num_kv, table in zip(q_lens, kv_lens, tables, strict=True):
        rows = slice(row, row + q_len)
        row += q_len
        if num_kv == 0:  # a warm-up step: it owns no block, so it must neither read nor write
            spans.append(Span(rows, 0, 0))
            continue
        table = table[: -(-num_kv // block_size)]
        adjacent = bool((np.diff(table) == 1).all())
        new = np.arange(num_kv - q_len, num_kv)
        writes.append(table[new // block_size] * block_size + new % block_size)
        if adjacent:
            spans.append(Span(rows, num_kv, int(table[0]) * block_size))
        else:
            tokens = np.arange(num_kv)
            slots = table[tokens // block_size] * block_size + tokens % block_size
            spans.append(Span(rows, num_kv, -1, torch.from_numpy(slots)))
    return spans, torch.from_numpy(np.concatenate(writes)) if writes else None


def _decode_batch(
    q_lens: list[int], kv_lens: list[int], tables: np.ndarray, cache: torch.Tensor
) -> DecodeBatch | None:
    size, longest = len(kv_lens), max(kv_lens)
    if size == 1 or min(kv_lens) == 0 or size * longest > MAX_GATHERED_TOKENS:
        return None
    lengths = np.array(kv_lens)[:, None]
    tokens = np.arange(longest)[None]
    valid = tokens < lengths
    tokens = np.where(valid, tokens, 0)
    block_size = cache.shape[1]
    slots = np.take_along_axis(tables, tokens // block_size, axis=1) * block_size + tokens % block_size
    slots = torch.from_numpy(slots.ravel())
    most = max(q_lens)
    if most == 1:
        return DecodeBatch(size, slots, _hidden(~valid[:, None], cache.dtype))
    counts = np.array(q_lens)[:, None]
    place = np.minimum(np.arange(most)[None], counts - 1)  # [B, Q] of a query among its sequence's
    ends = lengths - counts + 1 + place  # tokens that it sees
    starts = np.cumsum(counts)[:, None] - counts
    rows = (np.arange(size)[:, None] * most + np.arange(most)[None])[np.arange(most)[None] < counts]
    mask = _hidden(np.arange(longest)[None, None] >= ends[:, :, None], cache.dtype)
    return DecodeBatch(size, slots, mask, torch.from_numpy((starts + place).ravel()), torch.from_numpy(rows))


def _hidden(hidden: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """[B, Q, L] bool to [B, 1, Q, L]."""
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None]


class CpuAttentionImpl(AttentionImpl[CpuAttentionMetadata]):
    """Grouped-query attention, causal, optionally within a sliding window, with capped scores or with sinks."""

    def __init__(self, num_heads: int, head_size: int, **kwargs) -> None:
        super().__init__(num_heads, head_size, **kwargs)
        self.window = _window(self.sliding_window)
        self.softcap = float(self.logit_softcapping or 0)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        attn_metadata: CpuAttentionMetadata,
        k_scales_zeros: torch.Tensor | None = None,
        v_scales_zeros: torch.Tensor | None = None,
        learnable_sink: torch.Tensor | None = None,
        inplace: bool = False,
    ) -> torch.Tensor:
        """`query`: [tokens, heads, dim]; `key`, `value`: [tokens, kv_heads, dim]; caches as in the module's head.

        Returns [tokens, heads, v_dim].
        """
        k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        if attn_metadata.write_slots is None:
            return query.new_zeros(*query.shape[:-1], self.v_head_size)
        is_converted = k_cache.dtype != query.dtype
        if is_converted:
            k_slots = CachedRows(k_cache, k_scales_zeros, self.head_size, True)
            v_slots = CachedRows(v_cache, v_scales_zeros, self.v_head_size, False)
        if key is not None and is_converted:
            k_slots.write(attn_metadata.write_slots, key)
            v_slots.write(attn_metadata.write_slots, value)
        elif key is not None:
            k_slots.index_copy_(0, attn_metadata.write_slots, key)
            v_slots.index_copy_(0, attn_metadata.write_slots, value)
        if self.softcap or learnable_sink is not None:
            return torch.cat(
                [self._plain(query[span.rows], k_slots, v_slots, span, learnable_sink) for span in attn_metadata.spans]
            )
        if not is_converted and attn_metadata.batch is not None and self.window is None:
            return self._decode_all(query, k_slots, v_slots, attn_metadata.batch)
        outputs = [self._attend(query[span.rows], k_slots, v_slots, span) for span in attn_metadata.spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, query, k_slots, v_slots, span: Span) -> torch.Tensor:
        if span.num_kv == 0:
            return query.new_zeros(*query.shape[:-1], self.v_head_size)
        num_queries = query.shape[0]
        if num_queries == 1:
            return self._decode(query, k_slots, v_slots, span)
        attend = self._few if num_queries <= MAX_QUERIES and span.num_kv > num_queries else self._prefill
        return attend(query, k_slots, v_slots, span)

    def _decode_all(self, query, k_slots, v_slots, batch: DecodeBatch) -> torch.Tensor:
        """As `_decode`, for all sequences at once."""
        keys, values = (
            slots.index_select(0, batch.slots).unflatten(0, (batch.size, -1)).transpose(1, 2)
            for slots in (k_slots, v_slots)
        )
        if batch.queries is not None:
            share = self.num_heads // self.num_kv_heads
            if (mask := batch.masks.get(share)) is None:
                mask = batch.masks[share] = batch.mask.repeat_interleave(share, 2)
            queries = query.index_select(0, batch.queries).unflatten(0, (batch.size, -1))
            out = F.scaled_dot_product_attention(self._grouped(queries), keys, values, attn_mask=mask, scale=self.scale)
            return self._ungrouped(out).flatten(0, 1).index_select(0, batch.rows)
        grouped = query.reshape(batch.size, self.num_kv_heads, -1, self.head_size)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask, scale=self.scale)
        return out.reshape(batch.size, self.num_heads, self.v_head_size)

    def _decode(self, query, k_slots, v_slots, span: Span) -> torch.Tensor:
        """One query against its whole past: the heads that share a key head become rows of one product."""
        first = 0 if self.window is None else max(0, span.num_kv - self.window)
        keys, values = _read(k_slots, span, first, query), _read(v_slots, span, first, query)
        grouped = query.reshape(1, self.num_kv_heads, -1, self.head_size)
        out = F.scaled_dot_product_attention(grouped, keys, values, scale=self.scale)
        return out.reshape(1, self.num_heads, self.v_head_size)

    def _plain(self, query, k_slots, v_slots, span: Span, sinks: torch.Tensor | None) -> torch.Tensor:
        """Scores as in Gemma 2, softcap * tanh(score / softcap), and sinks as in gpt-oss, which torch's fused attention lacks.

        Args:
            sinks: [heads], the score of a key without a value that every query sees.
        """
        if span.num_kv == 0:
            return query.new_zeros(*query.shape[:-1], self.v_head_size)
        q_len, share = query.shape[0], self.num_heads // self.num_kv_heads
        keys, values = (_read(slots, span, 0, query)[0].repeat_interleave(share, 0) for slots in (k_slots, v_slots))
        scores = query.transpose(0, 1).float() @ keys.transpose(1, 2).float() * self.scale
        if self.softcap:
            scores = (scores / self.softcap).tanh() * self.softcap
        scores = scores.masked_fill(~self._mask(span, q_len, span.num_kv - q_len), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q_len, 1)], -1)
        weights = scores.softmax(-1)[..., : span.num_kv]
        return (weights @ values.float()).transpose(0, 1).to(query.dtype)

    def _few(self, query, k_slots, v_slots, span: Span) -> torch.Tensor:
        """A few queries behind a past, as guesses are: as in `_decode`, a key head is read once for all heads that share it."""
        q_len, share = query.shape[0], self.num_heads // self.num_kv_heads
        past = span.num_kv - q_len
        first = 0 if self.window is None else max(0, past + 1 - self.window)
        if (mask := span.few.get((self.window, share))) is None:
            seen = self._mask(span, q_len, past - first).repeat_interleave(share, 0)
            mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
            span.few[self.window, share] = mask
        keys, values = _read(k_slots, span, first, query), _read(v_slots, span, first, query)
        out = F.scaled_dot_product_attention(self._grouped(query[None]), keys, values, attn_mask=mask, scale=self.scale)
        return self._ungrouped(out)[0]

    def _grouped(self, queries: torch.Tensor) -> torch.Tensor:
        """[B, Q, heads, dim] to [B, kv_heads, Q * share, dim]."""
        return queries.unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2).flatten(2, 3)

    def _ungrouped(self, out: torch.Tensor) -> torch.Tensor:
        """The way back."""
        share = self.num_heads // self.num_kv_heads
        return out.unflatten(2, (-1, share)).transpose(1, 2).flatten(2, 3)

    def _prefill(self, query, k_slots, v_slots, span: Span) -> torch.Tensor:
        """Many queries; what a prefix hit or an earlier chunk left in the cache comes before them."""
        q_len = query.shape[0]
        past = span.num_kv - q_len
        first = 0 if self.window is None else max(0, past + 1 - self.window)
        keys, values = _read(k_slots, span, first, query), _read(v_slots, span, first, query)
        mask = self._mask(span, q_len, past - first) if past > first or self._limits(q_len) else None
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return out[0].transpose(0, 1)

    def _limits(self, num_tokens: int) -> bool:
        return self.window is not None and num_tokens > self.window

    def _mask(self, span: Span, q_len: int, past: int) -> torch.Tensor:
        """[q_len, past + q_len] bool, True where a query may look: not ahead, and not beyond the window."""
        if (mask := span.masks.get(self.window)) is None:
            distance = torch.arange(past, past + q_len)[:, None] - torch.arange(past + q_len)[None]
            mask = distance >= 0
            if self.window is not None:
                mask &= distance < self.window
            span.masks[self.window] = mask
        return mask


def _read(slots: torch.Tensor | CachedRows, span: Span, first: int, query: torch.Tensor) -> torch.Tensor:
    """Tokens [first, num_kv) of a sequence as [1, kv_heads, tokens, dim], in the dtype of the query."""
    if isinstance(slots, CachedRows):
        adjacent = span.first_slot >= 0
        taken = torch.arange(span.first_slot, span.first_slot + span.num_kv) if adjacent else span.slots
        return slots.read(taken[first:], query.dtype).transpose(0, 1)[None]
    if span.first_slot >= 0:
        rows = slots[span.first_slot + first : span.first_slot + span.num_kv]
    else:
        rows = slots.index_select(0, span.slots[first:])
    return rows.transpose(0, 1)[None]


def _window(sliding_window) -> int | None:
    """Number of tokens a query sees, itself included; None for all. LMDeploy writes (left, right) or a size or -1."""
    if isinstance(sliding_window, (tuple, list)):
        sliding_window = sliding_window[0]
    return None if sliding_window is None or sliding_window <= 0 else int(sliding_window)


class CpuAttentionBuilder(AttentionBuilder[CpuAttentionMetadata]):
    @staticmethod
    def build(
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        v_head_size: int | None = None,
        alibi: bool = False,
        sliding_window: int | None = None,
        logit_softcapping: float | None = None,
        causal: bool = True,
        use_flash_mla: bool = False,
        learnable_sink: bool = False,
        block_sparse_size: int = 1,
        **kwargs,
    ) -> CpuAttentionImpl:
        unsupported = {
            "alibi": alibi,
            "bidirectional attention": not causal,
            "flash MLA": use_flash_mla,
            "block-sparse attention": block_sparse_size > 1,
        }
        wanted = [name for name, value in unsupported.items() if value]
        if wanted:
            raise EngineError(
                f"this model needs {', '.join(wanted)}, which the CPU device does not have; "
                "it runs grouped-query attention, causal, with or without a window, capped scores or sinks. Use --device cuda."
            )
        return CpuAttentionImpl(
            num_heads,
            head_size,
            scale=scale,
            num_kv_heads=num_kv_heads,
            v_head_size=v_head_size,
            sliding_window=sliding_window,
            logit_softcapping=logit_softcapping,
        )


FAMILY = OperatorFamily(builders={"PagedAttention": CpuAttentionBuilder})
