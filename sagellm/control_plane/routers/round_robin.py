"""Send requests to the engines in turn."""

from collections.abc import Sequence

from sagellm.control_plane.base import Candidates, EngineView, RouteChoice, Router, RouteRequest

__all__ = ["RoundRobin"]


class RoundRobin(Router):
    name = "round-robin"

    def __init__(self) -> None:
        self._num = 0

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        self._num += 1
        names = Candidates.of(engines).names
        return RouteChoice(names[self._num % len(names)], "next in turn")
