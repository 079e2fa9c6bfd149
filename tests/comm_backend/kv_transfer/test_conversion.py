"""Which bytes go where, against one token after the other in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm._core import KVStrides
from sagellm.comm_backend.kv_transfer.conversion import Conversion, HeadRun, Tokens
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart

WIDTH_BYTES = 3 * 2


def layout_of(blocks: int, size: int, heads: int) -> KVLayout:
    parts = tuple(KVPart(name=name, num_heads=heads, width=3, dtype="float16") for name in ("keys", "values"))
    return KVLayout(num_layers=2, num_blocks=blocks, block_size=size, total_heads=heads, parts=parts)


def place(layout: KVLayout, layer: int, blocks: list[int], start: int, token: int, head: int) -> int:
    block, within = blocks[(token - start) // layout.block_size], (token - start) % layout.block_size
    slot = (layer * layout.num_blocks + block) * layout.block_size + within
    return (slot * layout.parts[0].num_heads + head) * WIDTH_BYTES


def plain(own: KVLayout, peer: KVLayout, run: HeadRun, tokens: Tokens) -> list[tuple[int, int, int]]:
    """Source, target, and size of each piece."""
    pieces: list[tuple[int, int, int]] = []
    size = run.num_heads * WIDTH_BYTES
    for layer in range(own.num_layers):
        for token in range(tokens.first, tokens.first + tokens.num):
            src = place(peer, layer, tokens.src.tolist(), tokens.source_start, token, run.src_head)
            dst = place(own, layer, tokens.dst.tolist(), tokens.target_start, token, run.dst_head)
            if pieces and (pieces[-1][0] + pieces[-1][2], pieces[-1][1] + pieces[-1][2]) == (src, dst):
                pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + size)
            else:
                pieces.append((src, dst, size))
    return pieces


@st.composite
def transfers(draw):
    heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    peer, own = (layout_of(8, draw(st.integers(1, 5)), each) for each in heads)
    num_heads = draw(st.integers(1, min(heads)))
    run = HeadRun(0, 1, draw(st.integers(0, heads[0] - num_heads)), draw(st.integers(0, heads[1] - num_heads)), num_heads)
    starts = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    sides = []
    for _ in range(2):  # often side by side, so that there is something to join
        order = list(range(8)) if draw(st.booleans()) else draw(st.permutations(range(8)))
        sides.append(np.array(order[: draw(st.integers(1, 8))], np.int64))
    ends = [start + len(side) * each.block_size for start, side, each in zip(starts, sides, (peer, own), strict=True)]
    first = draw(st.integers(max(starts), max(max(starts), min(ends) - 1)))
    num = draw(st.integers(1, max(1, min(ends) - first)))
    return own, peer, run, Tokens(sides[0], starts[0], sides[1], starts[1], first, num), first + num <= min(ends)


@given(transfers())
def test_pieces_are_those_of_one_token_after_the_other(transfer):
    own, peer, run, tokens, is_covered = transfer
    conversion = Conversion(own, peer, [run])
    if not is_covered:
        with pytest.raises(IndexError, match="do not cover"):
            list(conversion.pieces(tokens))
        return
    ((found,),) = conversion.pieces(tokens)
    assert found.part == 1
    pieces = list(zip(found.src.tolist(), found.dst.tolist(), found.num_bytes.tolist(), strict=True))
    assert pieces == plain(own, peer, run, tokens)
    assert found.num_bytes.sum() == tokens.num * conversion.token_bytes


def test_copying_at_once_is_copying_pieces():
    """Two parts of one geometry and one of another, from a rank that has more heads and other blocks."""
    random = np.random.default_rng(0)
    own, peer = layout_of(8, 4, 2), layout_of(8, 2, 4)
    runs = [HeadRun(0, 0, 1, 0, 2), HeadRun(0, 1, 1, 0, 2), HeadRun(0, 1, 3, 1, 1)]
    conversion = Conversion(own, peer, runs)
    tokens = Tokens(random.permutation(8), 2, random.permutation(8)[:5], 0, 3, 14)
    sources = [random.integers(0, 256, peer.num_bytes(part), np.uint8) for part in peer.parts]
    targets = [np.zeros(own.num_bytes(part), np.uint8) for part in own.parts]
    expected = [each.copy() for each in targets]
    for some in (each for group in conversion.pieces(tokens) for each in group):
        for src, dst, size in zip(some.src, some.dst, some.num_bytes, strict=True):
            expected[some.part][dst : dst + size] = sources[some.part][src : src + size]
    assert conversion.copy(tokens, sources, targets, 1e12, np.zeros(1, np.uint8))
    for found, each in zip(targets, expected, strict=True):
        assert np.array_equal(found, each) and found.any()


def test_copying_at_once_writes_nothing_that_it_should_not():
    layout = layout_of(8, 4, 2)
    strides = KVStrides(1, (256, 4, 8, 0), (256, 4, 8, 0), 8)
    place, go_on = (np.arange(2), 0, np.arange(2), 0, 0, 8), np.zeros(1, np.uint8)
    source, target = np.ones(64, np.uint8), np.zeros(64, np.uint8)

    def copy(targets, sources, deadline=1e12, stop=go_on):
        return strides.copy_tokens(targets, sources, *place, deadline, stop)

    with pytest.raises(IndexError, match="does not lie within"):
        copy([target, target[:63]], [source, source])
    for targets in ([target], [target.astype(np.int8)] * 2, [np.broadcast_to(target, (64,))] * 2, [target[::2]] * 2):
        with pytest.raises((ValueError, TypeError)):
            copy(targets, [source, source])
    with pytest.raises(ValueError, match="stop"):
        copy([target], [source], stop=np.zeros(2, np.uint8))
    assert copy([target], [source], 0.0) == "deadline" and copy([target], [source], stop=np.ones(1, np.uint8)) == "stopped"
    assert not target.any()
    assert copy([target], [source]) == "done" and target.all()
    conversion = Conversion(layout, layout, [HeadRun(0, 0, 0, 0, 2)])
    blocks = [np.zeros(layout.num_bytes(part), np.uint8) for part in layout.parts]
    assert not conversion.copy(Tokens(*place[:4], 0, 8), blocks, blocks, 0.0, go_on)


def test_all_of_both_is_one_piece():
    layout, blocks = layout_of(8, 4, 2), np.arange(8)
    ((keys, values),) = Conversion(layout, layout, [HeadRun(0, part, 0, 0, 2) for part in (0, 1)]).pieces(
        Tokens(blocks, 0, blocks, 0, 0, 32)
    )
    assert keys.num_bytes.tolist() == values.num_bytes.tolist() == [layout.num_bytes(layout.parts[0])]


def test_many_tokens_come_in_lists_that_are_bounded(monkeypatch):
    monkeypatch.setattr("sagellm.comm_backend.kv_transfer.conversion.PIECES", 10)
    own, peer = layout_of(8, 4, 2), layout_of(8, 2, 1)
    tokens = Tokens(np.arange(8), 0, np.array([3, 1, 2, 0]), 0, 0, 16)
    lists = [some[0] for some in Conversion(own, peer, [HeadRun(0, 0, 0, 1, 1)]).pieces(tokens)]
    assert [len(each.src) for each in lists] == [10, 10, 10, 2]
    assert sum(each.num_bytes.sum() for each in lists) == 2 * 16 * WIDTH_BYTES


@pytest.mark.parametrize(
    ("first", "num", "blocks", "size"),
    [(0, 9, 2, 4), (-1, 2, 2, 4), (0, 0, 2, 4), (0, 1, 0, 4), (0, 1, 2, 0), (0, 2**62, 2, 4)],
)
def test_tokens_without_blocks_are_refused(first: int, num: int, blocks: int, size: int):
    strides = KVStrides(1, (64, size, 8, 0), (64, size, 8, 0), 8)
    with pytest.raises(IndexError, match="do not cover"):
        strides.pieces(np.arange(blocks), 0, np.arange(blocks), 0, first, num)


def test_offsets_too_large_for_a_number_come_out_as_what_no_memory_has():
    """A layout comes from the network; such a piece is refused when it is copied."""
    strides = KVStrides(2, (2**62, 4, 2**61, 2**62), (2**62, 4, 2**61, 0), 2**61)
    src, dst, num_bytes = strides.pieces(np.arange(2), 0, np.arange(2), 0, 0, 8)
    assert len(src) == len(dst) == len(num_bytes) > 0
