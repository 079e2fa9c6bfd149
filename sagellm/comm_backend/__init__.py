"""Collectives and messages among processes."""

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.comm_backend.config import CommConfig

__all__ = ["CommBackendProtocol", "CommConfig", "ReduceOp", "Work"]
