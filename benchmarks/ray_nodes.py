"""A Ray cluster of several nodes on this machine, each at a loopback address of its own."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

RESOURCE = "sagellm"
HEAD = "127.0.0.2"  # address of the first node, which is neither killed nor frozen


def number_of(address: str) -> int:
    """Return the number of an added node, from 0, by its address."""
    return int(address.rpartition(".")[2]) - 3


class Nodes:
    """Nodes that take one worker each, with so many cores each.

    Attributes:
        address: of the head, host:port.
    """

    def __init__(self, count: int, num_cpus: int = 1) -> None:
        from ray.cluster_utils import Cluster

        # Ray takes 127.0.0.1 for the machine's own address, so the nodes begin with 127.0.0.2.
        self._num_cpus = num_cpus
        self._cluster = Cluster(initialize_head=True, head_node_args=_settings(2, num_cpus) | {"include_dashboard": False})
        self._added: list[Any] = []
        self._frozen: list[psutil.Process] = []
        for _ in range(count - 1):
            self.add()
        self.address: str = self._cluster.address

    def add(self) -> None:
        """Start one more node."""
        self._added.append(self._cluster.add_node(**_settings(3 + len(self._added), self._num_cpus)))

    def kill(self, number: int) -> None:
        """Kill a node that was added, with its workers and all processes below them, as the loss of a machine does."""
        _, *below = self._family(number)
        self._cluster.remove_node(self._added[number], allow_graceful=False)
        _kill(below)

    def freeze(self, number: int) -> None:
        """Stop all processes of a node that was added, as if its cable were pulled: its connections stay open."""
        self._frozen += self._family(number)
        for process in self._frozen:
            process.suspend()

    def _family(self, number: int) -> list[psutil.Process]:
        raylet = psutil.Process(self._added[number].all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def close(self) -> None:
        self._cluster.shutdown()
        _kill(self._frozen)  # they would hear of no end


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _settings(number: int, num_cpus: int) -> dict[str, Any]:
    return {
        "node_ip_address": f"127.0.0.{number}", "num_cpus": num_cpus, "resources": {RESOURCE: 1},
        "object_store_memory": 100 << 20,
    }  # fmt: skip


@contextmanager
def nodes(count: int, num_cpus: int = 1) -> Iterator[Nodes]:
    """Run so many nodes. This process leaves Ray at the end."""
    import ray

    started = Nodes(count, num_cpus)
    try:
        yield started
    finally:
        ray.shutdown()
        started.close()
