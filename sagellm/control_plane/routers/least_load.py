"""Send each request to the engine with the fewest requests; of equals, to the one with the most room for keys and values."""

from collections.abc import Sequence

from sagellm.control_plane.base import EngineView, RouteChoice, Router, RouteRequest

__all__ = ["LeastLoad"]


class LeastLoad(Router):
    name = "least-load"

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        best = min(engines, key=lambda one: one.queue)
        return RouteChoice(best.engine_id, "least load", f"{best.queue[0]} requests there")
