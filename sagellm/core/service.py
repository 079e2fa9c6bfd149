"""Scheduling wishes of a request: checked on arrival, carried to the engine as JSON."""

import math
import time

from pydantic import Field, StrictFloat, StrictInt

from sagellm.core.config import Model
from sagellm.core.scheduling import NO_SERVICE, ServiceLevel

__all__ = ["MAX_PRIORITY", "MIN_PRIORITY", "EngineRequest", "ServiceRequest"]

MIN_PRIORITY, MAX_PRIORITY = -100, 100
LONGEST_MS = 24 * 3600 * 1000
LATEST = 2**33  # the year 2242


class ServiceRequest(Model):
    """As it comes over the API. A missing field is no wish.

    Attributes:
        priority: lower is more urgent, as in vLLM's API.
        tenant: on whose account.
        deadline: Unix time in seconds at which the last token should be there.
        ttft_slo_ms, tpot_slo_ms: milliseconds to the first token from the arrival, and for each further one on average.
    """

    priority: StrictInt = Field(0, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    tenant: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9_.:@-]*$")
    deadline: StrictFloat | StrictInt | None = Field(None, gt=0, le=LATEST)
    ttft_slo_ms: StrictFloat | StrictInt | None = Field(None, gt=0, le=LONGEST_MS)
    tpot_slo_ms: StrictFloat | StrictInt | None = Field(None, gt=0, le=LONGEST_MS)

    def is_past(self) -> bool:
        """Whether the deadline has passed, so that no scheduler could meet it. To be asked where the request comes in: on its
        way to the engine a deadline that was accepted may pass."""
        return self.deadline is not None and self.deadline <= time.time()

    def level(self) -> ServiceLevel:
        """For the scheduler of this process, on its own clock."""
        deadline_s = math.inf
        if self.deadline is not None:
            deadline_s = time.perf_counter() + (self.deadline - time.time())
        level = ServiceLevel(self.priority, self.tenant, deadline_s, _seconds(self.ttft_slo_ms), _seconds(self.tpot_slo_ms))
        return NO_SERVICE if level == NO_SERVICE else level


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1000


NOTHING_ASKED = ServiceRequest()


class EngineRequest(ServiceRequest):
    """Wishes of a client as they reach the engine, with what the client does not write itself.

    Attributes:
        parent: id of the request that this one is a branch of.
    """

    parent: StrictInt | None = None

    @classmethod
    def text(cls, wishes: str | None, parent: int | None) -> str | None:
        """Return the JSON for the engine. `wishes`: JSON of a `ServiceRequest`; None: no wish."""
        if parent is None:
            return wishes
        asked = cls.model_validate_json(wishes or "{}").model_copy(update={"parent": parent})
        return asked.model_dump_json(exclude_defaults=True)
