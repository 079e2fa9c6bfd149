"""Settings of the passes that rewrite a graph."""

from dataclasses import dataclass

from sagellm.core.errors import PlanError

__all__ = ["PassSettings"]


@dataclass(frozen=True)
class PassSettings:
    """Limits of the passes. With the defaults nothing is cut.

    Attributes:
        token_budget: new tokens of a step; longer prefills are cut. 0: no limit.
        max_batch_size: requests in one decode step. 0: no limit.

    Raises:
        PlanError: a number below 0.
    """

    token_budget: int = 0
    max_batch_size: int = 0

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PlanError(f"{name} is {value!r}; give a whole number from 0 on.")
