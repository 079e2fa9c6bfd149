"""Prefer devices in an order, such as domestic accelerators first, up to a queue of each engine."""

from collections.abc import Sequence

from sagellm.control_plane.base import EngineView, RouteChoice, Router, RouteRequest
from sagellm.core.errors import PolicyError

__all__ = ["Order"]


class Order(Router):
    """The engine with the least load on the first device of the order that has room.

    Args:
        order: types of devices; one that is not named comes last, and so does one whose check is missing or failed.
        queue: requests of an engine from which on the next device is taken.
    """

    name = "order"

    def __init__(self, order: Sequence[str] = ("ascend", "camb", "maca", "cuda", "cpu"), queue: int = 64) -> None:
        if isinstance(order, str) or not all(isinstance(each, str) for each in order) or queue < 1:
            raise PolicyError(f"router order: got order={order!r}, queue={queue!r}; give a list of devices and a number.")
        self._places = {device: place for place, device in enumerate(order)}
        self._queue = queue

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        best = min(engines, key=lambda one: (one.queue[0] >= self._queue, self._place(one), one.queue))
        reason = "preferred device" if self._place(best) < len(self._places) else "no preferred device"
        device = f"{best.device or 'unknown device'}{'' if best.is_checked else ', unchecked'}"
        return RouteChoice(best.engine_id, reason, f"{device}, {best.queue[0]} requests there")

    def _place(self, one: EngineView) -> int:
        return self._places.get(one.device, len(self._places)) if one.is_checked else len(self._places)
