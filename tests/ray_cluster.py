"""A Ray cluster of several nodes on this machine, each at a loopback address of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RESOURCE = "sagellm"


class Nodes:
    """Nodes that take one worker each.

    Attributes:
        address: of the head, host:port.
    """

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        # Ray takes 127.0.0.1 for the machine's own address, so the nodes begin with 127.0.0.2.
        self._cluster = Cluster(initialize_head=True, head_node_args=_settings(2) | {"include_dashboard": False})
        self._added: list[Any] = []
        for _ in range(count - 1):
            self.add()
        self.address: str = self._cluster.address

    def add(self) -> None:
        """Start one more node."""
        self._added.append(self._cluster.add_node(**_settings(3 + len(self._added))))

    def kill(self, number: int) -> None:
        """Kill a node that was added, with its workers."""
        self._cluster.remove_node(self._added[number], allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def _settings(number: int) -> dict[str, Any]:
    return {
        "node_ip_address": f"127.0.0.{number}", "num_cpus": 1, "resources": {RESOURCE: 1}, "object_store_memory": 100 << 20,
    }  # fmt: skip


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Run so many nodes. Ray is left at the end, whoever has joined it in this process."""
    import ray

    started = Nodes(count)
    try:
        yield started
    finally:
        ray.shutdown()
        started.close()
