"""Keep a number of engines: the one that is given, or the one that there is."""

from sagellm.control_plane.base import PoolView, ScalingDecision, ScalingPolicy
from sagellm.core.errors import PolicyError

__all__ = ["Fixed"]


class Fixed(ScalingPolicy):
    """Args: `engines`: their number; None: as many as there are."""

    name = "fixed"

    def __init__(self, engines: int | None = None) -> None:
        if engines is not None and (type(engines) is not int or engines < 1):
            raise PolicyError(f"scaling policy fixed: got engines={engines!r}; give a whole number from 1 on.")
        self._engines = engines

    def decide(self, view: PoolView) -> ScalingDecision:
        return ScalingDecision(view.present if self._engines is None else self._engines, "a fixed number")
