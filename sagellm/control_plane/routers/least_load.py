"""Send each request to the engine with the fewest requests.

Among equals the one with the most room for keys and values comes first, then the one that was sent least.
"""

from collections.abc import Sequence

from sagellm.control_plane.base import Candidates, EngineView, RouteChoice, Router, RouteRequest

__all__ = ["LeastLoad"]


class LeastLoad(Router):
    name = "least-load"

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        best = Candidates.of(engines).least()
        return RouteChoice(best.engine_id, "least load", f"{best.queue[0]} requests there")
