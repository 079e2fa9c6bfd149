"""Rewrites of a graph that do not change what is computed: pure functions, which return the same object if nothing changes.

The order of the default passes matters. Prompts are cut into chunks first. Decode steps are merged before their samples, which
belong together once their steps are one. A second run of a pass, or of all of them in this order, changes nothing.
"""

from collections.abc import Callable

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.pass_settings import PassSettings
from sagellm.scheduler_ir.passes.chunks import chunk_prefills
from sagellm.scheduler_ir.passes.invariants import check_same_work
from sagellm.scheduler_ir.passes.merging import merge_decode_steps, merge_samples

__all__ = [
    "DEFAULT_PASSES", "Pass", "PassSettings", "check_same_work", "chunk_prefills", "merge_decode_steps", "merge_samples",
]  # fmt: skip

Pass = Callable[[IRGraph, PassSettings], IRGraph]
DEFAULT_PASSES: tuple[Pass, ...] = (chunk_prefills, merge_decode_steps, merge_samples)

IRGraph.use_passes(DEFAULT_PASSES, check_same_work)
