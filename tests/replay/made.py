"""Traces made by hand."""

import numpy as np

from sagellm.replay.base import Trace
from sagellm.replay.prefix import replay_prefix_reference


def flat(rows):
    """(keys uint64 [n], offsets int64 [r + 1]) of lists of keys."""
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return np.array([key for row in rows for key in row], np.uint64), offsets


def trace_of(rows, block_size=4, inputs=None, outputs=None, **fields):
    keys, offsets = flat(rows)
    inputs = [len(row) * block_size for row in rows] if inputs is None else inputs
    return Trace(
        name="by hand", block_size=block_size, times_s=np.arange(len(rows), dtype=np.float64),
        input_tokens=np.array(inputs, np.int32), output_tokens=np.array(outputs or [0] * len(rows), np.int32),
        keys=keys, offsets=offsets, **fields,
    )  # fmt: skip


def replayed(kind, rows, capacity, outputs=None, **options):
    keys, offsets = flat(rows)
    output_blocks = None if outputs is None else np.array(outputs, np.int32)
    return replay_prefix_reference(
        kind(capacity), keys, offsets, capacity=capacity, output_blocks=output_blocks, **options
    )
