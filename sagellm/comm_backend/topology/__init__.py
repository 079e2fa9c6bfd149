"""The machine as communication sees it: NUMA nodes, GPUs, NICs, NVMe, the links among them, and what a copy costs."""

from sagellm.comm_backend.topology.base import Link, LinkKind, PathKind, TopologyInfo
from sagellm.comm_backend.topology.manager import TopologyManager

__all__ = ["Link", "LinkKind", "PathKind", "TopologyInfo", "TopologyManager"]
