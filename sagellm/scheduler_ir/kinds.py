"""Node types that belong together."""

from sagellm.scheduler_ir.nodes import NodeType

__all__ = ["COMPUTE", "FETCHES", "WITH_THE_STEP"]

COMPUTE = (NodeType.DECODE_STEP, NodeType.PREFILL_CHUNK, NodeType.VERIFY)
FETCHES = (NodeType.PREFIX_FETCH, NodeType.KV_LOAD, NodeType.KV_TRANSFER)  # give keys and values that were computed before
# An engine does these together with the step that needs them. What else a step needs must be done before it.
WITH_THE_STEP = (NodeType.PREFIX_FETCH, NodeType.KV_LOAD, NodeType.KV_STORE, NodeType.COLLECTIVE)
