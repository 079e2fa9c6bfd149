"""A prefill/decode group, and a single server to compare it with."""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.processes import ServerProcess, free_port


class Group(ServerProcess):
    """A server or a proxy with its engines, ready within its `with`."""

    def engines(self) -> list[dict[str, Any]]:
        """Return name, pid and url of each engine at the start; a server alone is its own."""
        found = self.announcement.get("engines") or [{"name": "hybrid0", "pid": self.announcement["pid"], "url": self.url}]
        return [each | {"url": each["url"].removesuffix("/v1")} for each in found]

    def __enter__(self) -> "Group":
        try:
            self.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def pd_group(flags: Sequence[str] = (), *, serve: Sequence[str] = (), model: str = "demo") -> Group:
    """Start `sagellm pd up`; `serve`: flags of its engines."""
    port = free_port()
    sagellm = (sys.executable, "-c", "from sagellm.cli import main; main()")
    command = [*sagellm, "pd", "up", "--model", model, "--port", port, "--json", *flags]
    return Group([*command, "--", *serve] if serve else command, port)


def single_server(flags: Sequence[str] = (), cores: Sequence[int] = (), model: str = "demo") -> Group:
    """Start `sagellm serve`: one engine."""
    port = free_port()
    command = [sys.executable, "-m", "sagellm.serve", "--model", model]
    return Group([*command, "--port", port, "--json", *flags], port, cores=cores)
