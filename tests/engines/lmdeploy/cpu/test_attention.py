"""Paged attention against brute force: lengths, pasts, windows, head groups, scattered blocks, unwritten slots."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.cpu.cache import CachedRows
from sagellm.engines.lmdeploy.cpu.operators.attention import (
    CpuAttentionBuilder,
    CpuAttentionImpl,
    CpuAttentionMetadata,
    _plan,
    _window,
)
from sagellm.models.levels import FLOAT8, LEVELS4, LEVELS8

BLOCK, BLOCKS, DIM = 16, 40, 16
GUESSED = 6  # sequences with so few new tokens decode, with guesses behind their last ones


def brute_force(query, keys, values, past, window):
    """All scores of a sequence, masked, in one softmax. `query`: [q, heads, dim]; `keys`: [past + q, kv_heads, dim]."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    distance = torch.arange(past, past + len(query))[:, None] - torch.arange(len(keys))[None]
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), values)


def metadata_of(lengths, tables, caches):
    """Return the metadata that a step over sequences of (new, past) tokens computes once for all layers."""
    new, whole = ([n for n, _ in lengths], [n + p for n, p in lengths])
    step = SimpleNamespace(
        q_seqlens=torch.tensor(new), kv_seqlens=torch.tensor(whole), kv_caches=[caches],
        block_offsets=torch.from_numpy(tables), is_decoding=max(new) <= GUESSED,
        q_start_loc=torch.tensor(new).cumsum(0) - torch.tensor(new), kv_quant_policy=0,
    )  # fmt: skip
    return CpuAttentionMetadata.of_step(step)


def run(lengths, window, heads, kv_heads, scattered, seed):
    """A step over sequences of (new, past) tokens in a paged cache whose other slots are NaN, and by the oracle."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    caches = [torch.full((BLOCKS, BLOCK, kv_heads, DIM), float("nan")) for _ in range(2)]
    flat = [cache.flatten(0, 1) for cache in caches]
    free = rng.permutation(BLOCKS) if scattered else np.arange(BLOCKS)
    widest = max(-(-(new + past) // BLOCK) for new, past in lengths)
    tables = np.zeros((len(lengths), widest), np.int32)
    queries, keys, values, expected = [], [], [], []
    for row, (new, past) in enumerate(lengths):
        need = -(-(new + past) // BLOCK)
        tables[row, :need], free = free[:need], free[need:]
        q = torch.randn(new, heads, DIM, generator=generator)
        k, v = (torch.randn(new + past, kv_heads, DIM, generator=generator) for _ in range(2))
        tokens = np.arange(past)
        slots = torch.from_numpy(tables[row][tokens // BLOCK].astype(np.int64) * BLOCK + tokens % BLOCK)
        flat[0][slots], flat[1][slots] = k[:past], v[:past]
        queries.append(q), keys.append(k[past:]), values.append(v[past:])
        expected.append(brute_force(q, k, v, past, window))
    metadata = metadata_of(lengths, tables, caches)
    attention = CpuAttentionImpl(heads, DIM, num_kv_heads=kv_heads, sliding_window=window)
    out = attention.forward(torch.cat(queries), torch.cat(keys), torch.cat(values), *caches, metadata)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)
    written = sum(new + past for new, past in lengths)
    assert int((~flat[0][:, 0, 0].isnan()).sum()) == written, "it wrote outside of its own slots"


SEQUENCE = st.one_of(
    st.tuples(st.integers(1, 60), st.just(0)),
    st.tuples(st.just(1), st.integers(0, 90)),
    st.tuples(st.integers(1, 40), st.integers(0, 60)),
)


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.one_of(
        st.lists(SEQUENCE, min_size=1, max_size=4),
        st.lists(st.tuples(st.just(1), st.integers(0, 90)), min_size=2, max_size=6),  # a step that only decodes
        st.lists(st.tuples(st.integers(1, GUESSED), st.integers(0, 60)), min_size=2, max_size=6),
    ),
    window=st.sampled_from([None, 1, 15, 16, 24, 200]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_is_brute_force(lengths, window, heads, scattered, seed):
    run(lengths, window, *heads, scattered, seed)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 0)], [(16, 0)], [(1, 15)], [(1, 16)], [(33, 0)], [(20, 50)], [(30, 3)], [(1, 100), (40, 0), (5, 11)]],
)
def test_lengths_at_the_edges_of_blocks(lengths, window):
    for scattered in (False, True):
        run(lengths, window, 4, 2, scattered, seed=0)


@pytest.mark.parametrize("form", [LEVELS4, LEVELS8, FLOAT8, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("lengths", [[(1, 0), (1, 15)], [(33, 0), (5, 11)], [(30, 3)], [(1, 100)]])
def test_a_cache_of_another_type(form, window, lengths):
    """Tokens are written by the step itself, first the past ones; what counts is what the cache then says of them."""
    is_plain, width = isinstance(form, torch.dtype), DIM // 2 if form == LEVELS4 else DIM
    dtype = form if is_plain else torch.float8_e4m3fn if form == FLOAT8 else torch.uint8
    caches = [torch.zeros(BLOCKS, BLOCK, 2, width, dtype=dtype) for _ in range(2)]
    scales = [None, None] if is_plain else [torch.full((BLOCKS, BLOCK, 2, 2), float("nan")) for _ in range(2)]
    tables = np.random.default_rng(0).permutation(BLOCKS)[: len(lengths) * 8].reshape(len(lengths), 8).astype(np.int32)
    attention = CpuAttentionImpl(4, DIM, num_kv_heads=2, sliding_window=window)
    texts = [[torch.randn(new + past, heads, DIM) for heads in (4, 2, 2)] for new, past in lengths]

    def forward(spans):
        parts = [torch.cat([text[i][start:end] for text, (start, end) in zip(texts, spans, strict=True)]) for i in range(3)]
        metadata = metadata_of([(end - start, start) for start, end in spans], tables, caches)
        return attention.forward(*parts, *caches, metadata, *scales)

    if any(past for _, past in lengths):
        forward([(0, max(past, 1)) for _, past in lengths])
    out = forward([(past, past + new) for new, past in lengths]).split([new for new, _ in lengths])
    for row, (new, past) in enumerate(lengths):
        tokens = np.arange(new + past)
        slots = torch.from_numpy(tables[row][tokens // BLOCK].astype(np.int64) * BLOCK + tokens % BLOCK)
        stored = [
            CachedRows(cache, scale, DIM, number == 0).read(slots, torch.float32)
            for number, (cache, scale) in enumerate(zip(caches, scales, strict=True))
        ]
        expected = brute_force(texts[row][0][past:], *stored, past, window)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
        for number, exact in zip(stored, texts[row][1:], strict=True):
            assert (number - exact).abs().max() < {LEVELS4: 0.4, LEVELS8: 0.02, FLOAT8: 0.15}.get(form, 0.02)


def test_blocks_in_a_row_are_read_in_place():
    tables = np.array([[3, 4, 5], [3, 5, 4]], np.int32)
    spans, _ = _plan([1, 1], [40, 40], tables, BLOCK)
    assert (spans[0].first_slot, spans[0].slots) == (48, None)
    assert spans[1].first_slot == -1
    assert spans[1].slots.tolist() == [*range(48, 64), *range(80, 96), *range(64, 72)]


def test_entries_of_a_table_behind_the_last_token_do_not_matter():
    spans, _ = _plan([1], [20], np.array([[3, 4, 0, 17]], np.int32), BLOCK)
    assert spans[0].first_slot == 48


def test_a_warm_up_step_touches_nothing():
    cache = torch.full((4, BLOCK, 2, DIM), float("nan"))
    metadata = metadata_of([(1, -1), (1, -1)], np.zeros((2, 1), np.int32), [cache, cache])
    query = torch.randn(2, 4, DIM)
    out = CpuAttentionImpl(4, DIM, num_kv_heads=2).forward(query, query[:, :2], query[:, :2], cache, cache, metadata)
    assert out.abs().sum() == 0 and bool(cache.isnan().all())


def test_window_as_lmdeploy_writes_it():
    assert [_window(value) for value in (None, -1, 0, (-1, -1), (24, 24), 24, [24, 0])] == [None] * 4 + [24] * 3


def test_what_is_missing_is_refused_by_name():
    with pytest.raises(EngineError, match="needs alibi, block-sparse attention, which the CPU device does not have"):
        CpuAttentionBuilder.build(4, 16, alibi=True, block_sparse_size=2)
    assert isinstance(CpuAttentionBuilder.build(4, 16, num_kv_heads=2), CpuAttentionImpl)
