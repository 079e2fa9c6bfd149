"""Collectives and messages among processes."""

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.fusion import CommFusion
from sagellm.comm_backend.overlap_window import OverlapWindow

__all__ = ["CommBackendProtocol", "CommConfig", "CommFusion", "OverlapWindow", "ReduceOp", "Work"]
