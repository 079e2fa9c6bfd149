"""The machine as communication sees it: NUMA nodes, GPUs, NICs, NVMe, the links among them, and what a copy costs."""

from sagellm.comm_backend.topology.base import Link, LinkKind, PathKind, TopologyInfo
from sagellm.comm_backend.topology.candidates import Candidates, Seat
from sagellm.comm_backend.topology.manager import TopologyManager

__all__ = ["Candidates", "Link", "LinkKind", "PathKind", "Seat", "TopologyInfo", "TopologyManager"]
