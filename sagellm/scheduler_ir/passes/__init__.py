"""Rewrites of a graph that leave what is computed as it is: pure functions, a new graph or the very one if nothing changes.

The order of the default ones has its reasons. Recomputation goes first, so that only what is left is cut into chunks. Chunks
come before loads are placed, as a load runs beside one chunk and not beside a whole prompt. Decode steps are merged before
their samples, which belong together once their steps are one. Loads are placed when the nodes that compute are what they
will be, as their remark names one of these. Collectives come last, because a load that moves away may leave neighbours.
Run again, each pass and all of them in this order change nothing.
"""

from sagellm.scheduler_ir.passes.base import Pass, PassSettings
from sagellm.scheduler_ir.passes.cached import drop_cached_recompute
from sagellm.scheduler_ir.passes.chunks import chunk_prefills
from sagellm.scheduler_ir.passes.collectives import fuse_collectives
from sagellm.scheduler_ir.passes.invariants import check_same_work
from sagellm.scheduler_ir.passes.loads import overlap_loads
from sagellm.scheduler_ir.passes.merging import merge_decode_steps, merge_samples

__all__ = [
    "DEFAULT_PASSES", "Pass", "PassSettings", "check_same_work", "chunk_prefills", "drop_cached_recompute", "fuse_collectives",
    "merge_decode_steps", "merge_samples", "overlap_loads",
]  # fmt: skip

DEFAULT_PASSES: tuple[Pass, ...] = (
    drop_cached_recompute, chunk_prefills, merge_decode_steps, merge_samples, overlap_loads, fuse_collectives
)  # fmt: skip
