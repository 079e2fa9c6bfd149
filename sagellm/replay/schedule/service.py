"""The `service` of an `arrive` line: what the request asked of the scheduler."""

import math
from typing import Any

from sagellm.core.scheduling import NO_SERVICE, ServiceLevel
from sagellm.core.service import MAX_PRIORITY, MIN_PRIORITY
from sagellm.replay.base import shortened
from sagellm.replay.traces.lines import Broken

TIMES = ("deadline_s", "ttft_s", "tpot_s")
FIELDS = ("priority", *TIMES)


def service_of(asked: Any, tenant: str, arrival_s: float) -> ServiceLevel:
    """`asked`: None, or an object of what was asked alone, the deadline from the arrival. Raises Broken."""
    if asked is None:
        return ServiceLevel(tenant_id=tenant) if tenant else NO_SERVICE
    if type(asked) is not dict:
        raise Broken(f"service is {shortened(asked)}; an object was expected.")
    if unknown := sorted(set(asked) - set(FIELDS)):
        raise Broken(f"service has {shortened(unknown[0])}; known are {', '.join(FIELDS)}.")
    priority = asked.get("priority", 0)
    if type(priority) is not int or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise Broken(f"priority is {shortened(priority)}; an integer from {MIN_PRIORITY} to {MAX_PRIORITY} was expected.")
    times = {}
    for name in TIMES:
        value = asked.get(name, math.inf)
        if type(value) not in (int, float) or (name in asked and not math.isfinite(value)):
            raise Broken(f"{name} is {shortened(value)}; a finite number of seconds was expected.")
        if name != "deadline_s" and value <= 0:  # a deadline may have passed on the way to the engine
            raise Broken(f"{name} is {shortened(value)}; it must be above 0.")
        times[name] = value
    return ServiceLevel(priority, tenant, arrival_s + times["deadline_s"], times["ttft_s"], times["tpot_s"])


def asked_of(service: ServiceLevel, arrival_s: float) -> dict[str, Any]:
    """The other way round: what an `arrive` line has of it; empty if nothing was asked."""
    level = service._replace(deadline_s=service.deadline_s - arrival_s)
    return {name: getattr(level, name) for name in FIELDS if getattr(level, name) != getattr(NO_SERVICE, name)}
