"""Paged attention of a decode step that reads keys which sequences have in common once for all of them.

Sequences that begin with the same KV blocks form a group. Some programs of a kernel read the blocks of a group and multiply
them with the queries of all members, the others read what each sequence has for itself. They leave partial results, which a
second kernel merges: a part comes with the logarithm of the sum of its exponentials, and so much it weighs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

__all__ = ["Groups", "find_groups", "prefix_aware_attention"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int32, torch.int64)
# `tl.dot` takes 16 rows or more, and the matrix units of an H100 take 64 at once. Sums of 64 rows of 128 numbers are 64
# registers of each of 128 threads. In float32 there are no such units for exact products, and 64 rows would not fit.
MIN_ROWS, MAX_ROWS, MAX_ROWS_FLOAT32 = 16, 64, 16
# A tile has 64 keys or values, fewer if they would take more than 16 KiB. With three stages, two tiles of each are in flight,
# which took 4 to 7% longer on an H200, as fewer programs fit.
MAX_KEYS, TILE_BYTES = 64, 16 * 1024
NUM_WARPS, NUM_STAGES = 4, 2
# Keys are split until there are about four programs for each of an H100's 132 multiprocessors. 128 splits occupy nearly all of
# them with one tile.
PROGRAMS, MAX_SPLITS = 512, 128
# A split has at least so many keys, and 8 for each row of its tile: a row of 128 float32 sums is written and read again, 1 KiB.
# On an H100 half as many took 0 to 12% longer.
MIN_SPLIT, KEYS_PER_ROW = 128, 8
MERGED = 16  # parts that the merge reads at once
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Groups:
    """Sequences of a step that begin with the same KV blocks, as the kernels read them.

    The kernels cannot check the numbers: `of` does, where they are on the host.

    Attributes:
        members: int32 [members], numbers of sequences, group by group.
        starts: int32 [groups + 1], where the members of each group begin, and where the last ones end.
        common: int32 [groups], whole blocks at the start that a group reads together. They are those of its first member.
        shared: int32 [sequences], the number of them for each sequence; 0 outside of groups.
        most_members, most_common: at least those of any group. Larger numbers cost programs that end at once.
        most_own: blocks that a sequence reads by itself, about; decides how their keys are split. 0: all of its table.
    """

    members: torch.Tensor
    starts: torch.Tensor
    common: torch.Tensor
    shared: torch.Tensor
    most_members: int
    most_common: int
    most_own: int = 0

    @classmethod
    def of(cls, members: Any, starts: Any, common: Any, sequences: int, blocks: Any = 0) -> "Groups":
        """Make groups on the host from whole numbers.

        Args:
            members, starts, common: as the attributes; anything that NumPy makes an array of.
            sequences: number of sequences of the step.
            blocks: [sequences], blocks that each has; 0 if unknown.

        Raises:
            ValueError: they do not describe groups of these sequences.
        """
        members, starts, common = (np.asarray(each, np.int32) for each in (members, starts, common))
        if members.ndim != 1 or starts.shape != (len(common) + 1,) or not len(common):
            raise ValueError(
                f"members {list(members.shape)}, starts {list(starts.shape)}, common {list(common.shape)}; give [members], "
                "[groups + 1] and [groups], with at least one group"
            )
        sizes = np.diff(starts)
        if starts[0] != 0 or starts[-1] != len(members) or sizes.min() < 1 or common.min() < 1:
            raise ValueError(
                f"starts {starts.tolist()} and common {common.tolist()} of {len(members)} members; starts must rise from 0 to "
                "the number of members, and each group must have a block in common"
            )
        if members.min() < 0 or members.max() >= sequences or len(np.unique(members)) < len(members):
            raise ValueError(f"members {members.tolist()}; each must be a sequence of the {sequences} once at most")
        shared = np.zeros(sequences, np.int32)
        shared[members] = np.repeat(common, sizes)
        tensors = (torch.from_numpy(each) for each in (members, starts, common, shared))
        most_own = max(0, int(np.max(blocks - shared)))
        return cls(*tensors, most_members=int(sizes.max()), most_common=int(common.max()), most_own=most_own)


def find_groups(
    tables: np.ndarray, lengths: np.ndarray | Sequence[int], block_size: int, min_tokens: int
) -> Groups | None:
    """Return groups of sequences that begin with the same blocks, or None without any.

    A sequence joins one group at most. The first one without a group leads the next, which reads as many of its blocks as save
    most: those that all members have, times the members less one. The last block of a sequence is never among them.

    Args:
        tables: whole numbers [sequences, width], blocks of each sequence.
        lengths: [sequences], tokens with the new one.
        block_size: tokens of a block.
        min_tokens: a group has at least so many tokens in common, and at least one block.
    """
    # The last block takes the new token, so it is left out even if it is full.
    whole = (np.asarray(lengths, np.int64) - 1) // block_size
    least = max(1, -(-min_tokens // block_size))
    alike: dict[bytes, list[int]] = {}
    for sequence in np.flatnonzero(whole >= least).tolist():
        alike.setdefault(tables[sequence, :least].tobytes(), []).append(sequence)
    members: list[int] = []
    starts, common = [0], []
    for bucket in alike.values():
        rest = np.array(bucket)
        while len(rest) > 1:
            leader, others = rest[0], rest[1:]
            ends = np.minimum(whole[others], whole[leader])
            differs = tables[others, : whole[leader]] != tables[leader, : whole[leader]]
            first = np.where(differs.any(1), differs.argmax(1), whole[leader])
            same = np.minimum(first, ends)
            most_first = -np.sort(-same)
            blocks = most_first[np.argmax(most_first * np.arange(1, len(same) + 1))]
            joins = same >= blocks
            members += [int(leader), *others[joins].tolist()]
            starts.append(len(members))
            common.append(int(blocks))
            rest = others[~joins]
    return Groups.of(members, starts, common, len(whole), whole + 1) if common else None


@triton.jit
def _attend(
    query, k_cache, v_cache, tables, lengths, members, starts, common, shared, parts, weights,
    owner, first_row, head, split, splits, part,
    inner, outer, num_parts, num_heads,
    query_stride, query_head_stride, k_stride, k_token_stride, k_head_stride, v_stride, v_token_stride, v_head_stride,
    table_stride,
    TOGETHER: tl.constexpr, CAPPED: tl.constexpr, SHARE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, V_SIZE: tl.constexpr, HEAD_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the keys of a group (TOGETHER) or of what one sequence has for itself.

    A row of the tile is one query head of one sequence; SHARE heads of each sequence read the same key head.
    """
    row = first_row + tl.arange(0, ROWS)
    if TOGETHER:
        start = tl.load(starts + owner)
        num_rows = (tl.load(starts + owner + 1) - start) * SHARE
        is_row = row < num_rows
        sequence = tl.load(members + start + row // SHARE, mask=is_row, other=0).to(tl.int64)
        table = tables + tl.load(members + start, mask=num_rows > 0, other=0).to(tl.int64) * table_stride
        begin = 0
        # Smaller groups have fewer tiles than the largest one: the others have no keys to read.
        end = tl.where(first_row < num_rows, tl.load(common + owner) * BLOCK_SIZE, 0)
    else:
        is_row = row < SHARE
        sequence = owner.to(tl.int64) + tl.zeros([ROWS], tl.int64)
        table = tables + owner.to(tl.int64) * table_stride
        begin = tl.load(shared + owner) * BLOCK_SIZE
        end = tl.load(lengths + owner).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), splits) * KEYS
    begin += split * per_split
    end = tl.minimum(begin + per_split, end)

    query_head = head * SHARE + row % SHARE
    column = tl.arange(0, HEAD_WIDTH)
    v_column = tl.arange(0, V_WIDTH)
    is_column = column < HEAD_SIZE
    is_v_column = v_column < V_SIZE
    q = tl.load(
        query + (sequence * query_stride + query_head * query_head_stride)[:, None] + column[None, :],
        mask=is_row[:, None] & is_column[None, :], other=0.0,
    )  # fmt: skip
    keys = k_cache + head.to(tl.int64) * k_head_stride
    values = v_cache + head.to(tl.int64) * v_head_stride
    top = tl.zeros([ROWS], tl.float32) - float("inf")
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for first_key in range(begin, end, KEYS):
        key = first_key + tl.arange(0, KEYS)
        is_key = key < end
        # Numbers of a large cache do not fit into 32 bits.
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = key % BLOCK_SIZE
        k = tl.load(
            keys + (block * k_stride + place * k_token_stride)[None, :] + column[:, None],
            mask=is_key[None, :] & is_column[:, None], other=0.0,
        )  # fmt: skip
        # In float32 the units for matrices would round inputs to 10 bits.
        score = tl.dot(q, k, input_precision="ieee") * inner
        if CAPPED:
            score = (2.0 * tl.sigmoid(score) - 1.0) * outer  # the hyperbolic tangent, which the interpreter lacks
        score = tl.where(is_key[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        fade = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        v = tl.load(
            values + (block * v_stride + place * v_token_stride)[:, None] + v_column[None, :],
            mask=is_key[:, None] & is_v_column[None, :], other=0.0,
        )  # fmt: skip
        total = total * fade + tl.sum(weight, 1)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top

    place_of_part = (sequence * num_heads + query_head) * num_parts + part
    is_read = is_row & (end > begin)
    # A part without keys gets no weight, and its sums are never read.
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(weights + place_of_part, top + tl.log2(divisor), mask=is_row)
    tl.store(
        parts + place_of_part[:, None] * V_SIZE + v_column[None, :], sums / divisor[:, None],
        mask=is_read[:, None] & is_v_column[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_together", "splits_together", "tiles_alone", "splits_alone", "together", "num_parts"])
def _part_kernel(
    query, k_cache, v_cache, tables, lengths, members, starts, common, shared, parts, weights,
    together, tiles_together, splits_together, tiles_alone, splits_alone,
    inner, outer, num_parts, num_heads,
    query_stride, query_head_stride, k_stride, k_token_stride, k_head_stride, v_stride, v_token_stride, v_head_stride,
    table_stride,
    CAPPED: tl.constexpr, SHARE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, V_SIZE: tl.constexpr, HEAD_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr, ROWS_ALONE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The first `together` programs of a head read what groups have in common, the others what sequences have of their own."""
    number = tl.program_id(0)
    if number < together:
        split, tile = number % splits_together, number // splits_together
        _attend(
            query, k_cache, v_cache, tables, lengths, members, starts, common, shared, parts, weights,
            tile // tiles_together, tile % tiles_together * ROWS_TOGETHER, tl.program_id(1), split, splits_together, split,
            inner, outer, num_parts, num_heads,
            query_stride, query_head_stride, k_stride, k_token_stride, k_head_stride, v_stride, v_token_stride, v_head_stride,
            table_stride,
            True, CAPPED, SHARE, BLOCK_SIZE, HEAD_SIZE, V_SIZE, HEAD_WIDTH, V_WIDTH, ROWS_TOGETHER, KEYS,
        )  # fmt: skip
    else:
        split, tile = (number - together) % splits_alone, (number - together) // splits_alone
        _attend(
            query, k_cache, v_cache, tables, lengths, members, starts, common, shared, parts, weights,
            tile // tiles_alone, tile % tiles_alone * ROWS_ALONE, tl.program_id(1), split, splits_alone,
            splits_together + split,
            inner, outer, num_parts, num_heads,
            query_stride, query_head_stride, k_stride, k_token_stride, k_head_stride, v_stride, v_token_stride, v_head_stride,
            table_stride,
            False, CAPPED, SHARE, BLOCK_SIZE, HEAD_SIZE, V_SIZE, HEAD_WIDTH, V_WIDTH, ROWS_ALONE, KEYS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["own_part", "num_parts"])
def _merge_kernel(
    parts, weights, shared, result, own_part, num_parts, num_heads,
    V_SIZE: tl.constexpr, V_WIDTH: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one query head of one sequence, by their weights. A sequence without keys gets zeros."""
    sequence = tl.program_id(0)
    row = sequence.to(tl.int64) * num_heads + tl.program_id(1)
    column = tl.arange(0, V_WIDTH)
    is_column = column < V_SIZE
    top = tl.zeros([1], tl.float32) - float("inf")
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([V_WIDTH], tl.float32)
    # No program wrote parts of a group for a sequence without one.
    begin = tl.where(tl.load(shared + sequence) > 0, 0, own_part)
    for first in range(begin, num_parts, MERGED):
        part = first + tl.arange(0, MERGED)
        weight = tl.load(weights + row * num_parts + part, mask=part < num_parts, other=-float("inf"))
        numbers = tl.load(
            parts + (row * num_parts + part)[:, None] * V_SIZE + column[None, :],
            mask=(weight > -float("inf"))[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(weight, 0))
        base = tl.where(new_top > -float("inf"), new_top, 0.0)
        fade = tl.exp2(top - base)
        weight = tl.exp2(weight - base)
        total = total * fade + tl.sum(weight, 0)
        sums = sums * fade + tl.sum(numbers * weight[:, None], 0)
        top = new_top
    tl.store(result + row * V_SIZE + column, sums / tl.where(total > 0, total, 1.0), mask=is_column)


def prefix_aware_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    kv_lengths: torch.Tensor, scale: float, groups: Groups, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend from the new token of each sequence to all its keys, reading those of a group once for its members.

    Nothing waits for the device. The last dimension of all tensors must be dense.

    Args:
        query: [sequences, heads, head_size], float32, bfloat16 or float16.
        k_cache: [blocks, block_size, kv_heads, head_size], of the same type; keys of the new tokens are in it.
        v_cache: [blocks, block_size, kv_heads, v_head_size], of the same type.
        block_tables: int32 or int64 [sequences, width].
        kv_lengths: int32 or int64 [sequences], tokens with the new one. A sequence of length 0 gets zeros.
        scale: factor of the products of queries and keys.
        groups: which sequences read which blocks together, on the same device. Fewer blocks than each member has.
        softcap: scores are softcap * tanh(score / softcap); None for none.

    Returns:
        [sequences, heads, v_head_size], of the type of the queries.

    Raises:
        ValueError: a tensor of the wrong rank, type, size or device, groups of other sequences, a softcap not above 0.
    """
    _check(query, k_cache, v_cache, block_tables, kv_lengths, groups, softcap)
    sequences, heads, head_size = query.shape
    _, block_size, kv_heads, v_size = v_cache.shape
    share = heads // kv_heads
    num_groups = len(groups.common)
    # tl.dot takes 16 columns or more, and powers of two.
    head_width, v_width = (max(16, triton.next_power_of_2(size)) for size in (head_size, v_size))
    keys = min(MAX_KEYS, max(16, TILE_BYTES // (max(head_width, v_width) * query.element_size())))

    most_rows = MAX_ROWS_FLOAT32 if query.dtype == torch.float32 else MAX_ROWS
    rows_together, tiles_together = _tiles(groups.most_members * share, most_rows)
    rows_alone, tiles_alone = _tiles(share, most_rows)
    splits_together = _splits(num_groups * tiles_together * kv_heads, groups.most_common * block_size, rows_together)
    most_own = min(groups.most_own or block_tables.shape[1], block_tables.shape[1])
    splits_alone = _splits(sequences * tiles_alone * kv_heads, most_own * block_size, rows_alone)
    num_parts = splits_together + splits_alone
    parts = query.new_empty(sequences, heads, num_parts, v_size, dtype=torch.float32)
    weights = query.new_empty(sequences, heads, num_parts, dtype=torch.float32)
    # Powers of two are quicker than those of e. tanh(x) is 2 * sigmoid(2 * x) - 1.
    inner, outer = (scale * LOG2_E, 1.0) if softcap is None else (2 * scale / softcap, softcap * LOG2_E)

    together = num_groups * tiles_together * splits_together
    _part_kernel[(together + sequences * tiles_alone * splits_alone, kv_heads)](
        query, k_cache, v_cache, block_tables, kv_lengths,
        groups.members, groups.starts, groups.common, groups.shared, parts, weights,
        together, tiles_together, splits_together, tiles_alone, splits_alone, inner, outer, num_parts, heads,
        *query.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_tables.stride(0),
        CAPPED=softcap is not None, SHARE=share, BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size, V_SIZE=v_size, HEAD_WIDTH=head_width, V_WIDTH=v_width,
        ROWS_TOGETHER=rows_together, ROWS_ALONE=rows_alone, KEYS=keys, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    result = query.new_empty(sequences, heads, v_size)
    _merge_kernel[(sequences, heads)](
        parts, weights, groups.shared, result, splits_together, num_parts, heads,
        V_SIZE=v_size, V_WIDTH=v_width, MERGED=MERGED, num_warps=NUM_WARPS,
    )  # fmt: skip
    return result


def _tiles(rows: int, most: int) -> tuple[int, int]:
    """Return the rows of a tile, at most so many, and the number of tiles for all rows."""
    size = min(most, max(MIN_ROWS, triton.next_power_of_2(rows)))
    return size, -(-rows // size)


def _splits(programs: int, most_keys: int, rows: int) -> int:
    """Return into how many splits to divide keys that so many programs of so many rows would read."""
    wanted = min(MAX_SPLITS, -(-PROGRAMS // programs))
    return max(1, min(wanted, most_keys // max(MIN_SPLIT, KEYS_PER_ROW * rows)))


def _check(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    kv_lengths: torch.Tensor, groups: Groups, softcap: float | None,
) -> None:  # fmt: skip
    """Raise ValueError for what the kernels cannot read."""
    given = {
        "query": (query, 3, TYPES), "k_cache": (k_cache, 4, (query.dtype,)), "v_cache": (v_cache, 4, (query.dtype,)),
        "block_tables": (block_tables, 2, WHOLE), "kv_lengths": (kv_lengths, 1, WHOLE),
        **{name: (getattr(groups, name), 1, (torch.int32,)) for name in ("members", "starts", "common", "shared")},
    }  # fmt: skip
    for name, (tensor, rank, types) in given.items():
        if tensor.ndim != rank or tensor.dtype not in types or tensor.device != query.device or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} with strides {list(tensor.stride())}; give "
                f"{' or '.join(map(str, types))} of {rank} dimensions on {query.device}, the last one dense"
            )
    sequences, heads, head_size = query.shape
    kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != head_size or v_cache.shape[:3] != k_cache.shape[:3] or heads % kv_heads:
        raise ValueError(
            f"query {list(query.shape)}, k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; heads must be a "
            "multiple of the caches' kv_heads, head_size that of k_cache, and only the last size of the caches may differ"
        )
    counts = len(block_tables), len(kv_lengths), len(groups.shared), len(groups.starts) - len(groups.common)
    if counts != (sequences, sequences, sequences, 1):
        raise ValueError(
            f"{sequences} sequences with {len(block_tables)} block tables and {len(kv_lengths)} lengths, groups of "
            f"{len(groups.shared)} sequences, {len(groups.common)} groups with {len(groups.starts)} starts; give as many of "
            "each as there are sequences, and one more start than groups"
        )
    if not 0 < groups.most_common < block_tables.shape[1] or groups.most_members < 1:
        raise ValueError(
            f"groups of up to {groups.most_members} members with {groups.most_common} blocks in common, tables of "
            f"{block_tables.shape[1]} blocks; a member must have a block of its own"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; give more than 0, or None for none")
