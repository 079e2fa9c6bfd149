"""Collectives and messages among processes."""

from sagellm.core.late_imports import late_imports

_HOME = {
    "CommBackendProtocol": "base", "ReduceOp": "base", "Work": "base", "CommConfig": "config", "CommFusion": "fusion",
    "KVTransferChannel": "kv_transfer.base", "OverlapWindow": "overlap_window", "TopologyInfo": "topology.base",
    "TopologyManager": "topology.manager", "TransferPlan": "kv_transfer.plan",
}  # fmt: skip

__all__ = sorted(_HOME)

# Control messages need no tensors, nor torch, which takes more than a second to load.
__getattr__, __dir__ = late_imports(__name__, _HOME)
