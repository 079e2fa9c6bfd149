"""Contract of a routing policy: `sagellm check routing module:Class`."""

import random
from collections.abc import Callable

from sagellm.core.contract import Broke, Played, Report, Scenario, Suite
from sagellm.core.errors import PolicyError
from sagellm.pd.base import EngineView, RouteDecision, RouteRequest, RoutingPolicy
from sagellm.pd.routing import check_decision

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "has a name and can be built",
    "raises_nothing": "raises at no request for which an engine decodes",
    "answers": "answers with a RouteDecision among the engines that it was offered",
    "splits": "splits no request that cannot be split, and only between engines that exchange keys and values",
    "asking": "answers the same if it is asked again at once",
}
NUM_REQUESTS = 150
Make = Callable[..., RoutingPolicy]


def _engines(chance: random.Random) -> list[EngineView]:
    """A group with at least one engine that decodes."""
    prefills = [f"http://p{number}" for number in range(chance.randrange(3))]
    roles = ["prefill"] * len(prefills) + chance.choices(("decode", "hybrid"), k=chance.randint(1, 3))
    return [
        EngineView(
            prefills[place] if role == "prefill" else f"http://d{place}", role, cached_tokens=chance.choice((0, 64, 512)),
            waiting_tokens=chance.choice((0, 0, 4000)), num_running=chance.choice((0, 1, 30)),
            free_blocks=chance.choice((0, 5, 10_000)), token_bytes=12_288, timeout_s=chance.choice((0.1, 10.0)),
            sources=frozenset(chance.sample(prefills, chance.randint(0, len(prefills)))) if role != "prefill" else frozenset(),
        )
        for place, role in enumerate(roles)
    ]  # fmt: skip


def _asked(policy: RoutingPolicy, request: RouteRequest, engines: list[EngineView], report: Report) -> RouteDecision:
    try:
        decision = policy.choose(request, engines)
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"choose raised {type(error).__name__}: {error}.")
        raise Broke from error
    try:
        check_decision(decision, request, engines)
    except PolicyError as error:
        report("splits" if getattr(decision, "prefill_on", None) is not None else "answers", str(error))
        raise Broke from error
    return decision


def requests(make: Make, seed: int, report: Report) -> Played:
    """Route requests among groups of all kinds."""
    policy = make()
    if not (isinstance(getattr(policy, "name", None), str) and policy.name):
        report("builds", "it has no name; give the class a text `name`.")
    chance = random.Random(seed)
    for _ in range(NUM_REQUESTS):
        request = RouteRequest(
            chance.choice((1, 2, 100, 5000)), chance.choice((None, 1, 256)), chance.random() < 0.7, chance.random() < 0.2,
            chance.randint(1, 2),
        )  # fmt: skip
        engines = _engines(chance)
        decision = _asked(policy, request, engines, report)
        if _asked(policy, request, engines, report) != decision:
            report("asking", "asked again at once, it answered otherwise.")
    return Played(2 * NUM_REQUESTS, set(RULES))


SUITE = Suite("policy", RULES, {"requests": Scenario(requests, is_random=True)})
