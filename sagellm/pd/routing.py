"""Which engines serve a request: policies, and the guard that keeps a faulty one from losing requests."""

import math
from collections.abc import Sequence

from sagellm.core.errors import PlanError, PolicyError
from sagellm.core.registry import Registry
from sagellm.pd.base import EngineView, RouteDecision, RouteKind, RouteRequest, RoutingPolicy
from sagellm.pd.guarded import GuardedRouting
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.pd_costs import PDCosts
from sagellm.scheduler_ir.pd_separator import Estimate, Instance, PDSeparator, Role
from sagellm.scheduler_ir.plan import ExecutionPlan

__all__ = ["POLICIES", "AlwaysSplit", "NeverSplit", "PDPolicy", "Router", "check_decision", "find_policy", "policy_names"]

EXPECTED_TOKENS = 64  # of an answer whose client gives no limit, or a higher one
Choice = tuple[float, Estimate, EngineView, EngineView]  # cost, estimate, prompts on, decoding on


class PDPolicy(RoutingPolicy):
    """Every pair of engines that can exchange keys and values, and every engine alone, by `PDSeparator`'s estimate: the seconds
    that all streams together spend on the request, those included that its prompt would hold up. A prefix that an engine has
    cached is not computed there, and one that the decoding engine has is not moved."""

    name = "pd"
    allows_stay = True
    allows_split = True

    def __init__(self) -> None:
        self._separator = PDSeparator()

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteDecision:
        by_id = {one.engine_id: one for one in engines}
        decoders = [one for one in engines if one.role != "prefill"]
        stays = [self._stay(request, one) for one in decoders]
        splits: list[Choice] = []
        if request.can_split and self.allows_split:
            found = (self._split(request, by_id[source], one)
                     for one in decoders for source in sorted(one.sources) if source in by_id)  # fmt: skip
            splits = list(filter(None, found))
        together = min(filter(None, stays), key=_cost, default=None)
        apart = min((each for each in splits if _is_in_time(each)), key=_cost, default=None)
        late = min(splits, key=_cost, default=None) if apart is None else None
        if together is None and apart is None:  # no pool has room now: it will wait where there is the least to do
            least = min(decoders, key=lambda one: (one.load_s, one.num_running, one.engine_id))
            return RouteDecision(RouteKind.STAY, least.engine_id, None, "no pool has room for it now; it waits")
        if apart is not None and (together is None or not self.allows_stay or apart[0] < together[0]):
            return self._decision(request, apart, together)
        assert together is not None
        return self._decision(request, together, apart, late)

    def _decision(
        self, request: RouteRequest, best: Choice, other: Choice | None, late: Choice | None = None
    ) -> RouteDecision:
        """`late`: the best of the splits, where none of them would be in time."""
        _, estimate, first, second = best
        guessed = " (tokens guessed, no tokenizer)" if request.is_estimate else ""
        prefix = f"; {first.cached_tokens} of {request.num_tokens} tokens{guessed} cached there"
        reason = f"{estimate}{prefix}"
        if other is not None:
            reason += f"; instead of {other[1]}"
        elif late is not None:
            reason += f"; {_lateness(late)}"
        elif not request.can_split:
            reason += "; it cannot be split"
        elif first is second and not second.sources:
            reason += "; no prefill engine is connected to it"
        wait_s = max(first.load_s + estimate.prefill_s + estimate.transfer_s, 0.0 if first is second else second.load_s)
        expected_s = wait_s + second.costs.decode_s(second.num_running + 1)
        if first is second:
            return RouteDecision(RouteKind.STAY, second.engine_id, None, reason, expected_s)
        # All that a prefill engine has to compute is what does not fill a block.
        is_load = request.num_tokens - 1 - first.cached_tokens < first.block_size and first.cached_tokens > 0
        kind = RouteKind.LOAD if is_load else RouteKind.SPLIT
        return RouteDecision(kind, second.engine_id, first.engine_id, reason, expected_s)

    def _stay(self, request: RouteRequest, one: EngineView) -> Choice | None:
        costs = _for_whole_answer(one.costs, request)
        try:
            found = self._separator.split(_plan(request.num_tokens, one.cached_tokens), [_instance(one)], costs).together
        except PlanError:
            return None
        return None if found is None else (found.stream_s, found, one, one)

    def _split(self, request: RouteRequest, first: EngineView, second: EngineView) -> Choice | None:
        computed = request.num_tokens - 1  # the decoding engine computes the last token itself, and draws the next
        if computed < 1:
            return None
        moved = 1 - min(second.cached_tokens, computed - 1) / computed
        costs = second.costs.model_copy(
            update={
                "prefill_step_s": first.costs.prefill_step_s, "prefill_token_s": first.costs.prefill_token_s,
                "prefill_pair_s": first.costs.prefill_pair_s,
                "kv_bytes_per_token": max(1, math.ceil(first.token_bytes * moved)),
            }
        )  # fmt: skip
        plan = _plan(computed, first.cached_tokens)
        try:
            pair = [_instance(first), _instance(second)]
            found = self._separator.split(plan, pair, _for_whole_answer(costs, request)).apart
        except PlanError:
            return None
        if found is None or found.prefill_on != first.engine_id:
            return None
        # The step that computes the last token of the prompt is one more than an engine alone needs.
        extra_s = second.costs.decode_s(second.num_running + 1, request.num_tokens)
        return (found.stream_s + extra_s, found, first, second)


class AlwaysSplit(PDPolicy):
    """Splits whatever can be split, by the pair that `pd` likes best; stays only where nothing else is possible."""

    name = "always-split"
    allows_stay = False


class NeverSplit(PDPolicy):
    """Prompts stay where they are decoded; prefill engines have nothing to do."""

    name = "never-split"
    allows_split = False


POLICIES: Registry[RoutingPolicy] = Registry(
    "routing policy", RoutingPolicy, PolicyError, "sagellm.routing_policies", (PDPolicy, AlwaysSplit, NeverSplit)
)


def policy_names() -> list[str]:
    return POLICIES.names()


def find_policy(name: str) -> RoutingPolicy:
    """A policy by name or as `module:Class`. Raises PolicyError: unknown, or it cannot be built."""
    return POLICIES.make(POLICIES.find(name), name)


class Router(GuardedRouting):
    """Asks a policy, checks what it says, and goes on with `pd` where it is at fault."""

    default = PDPolicy

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteDecision:
        """Raises SageError only where no engine decodes."""
        if all(one.role == "prefill" for one in engines):
            raise PolicyError("no engine decodes; start one with --role decode or hybrid.")
        return super().choose(request, engines)

    def check(self, answer: RouteDecision, request: RouteRequest, engines: Sequence[EngineView]) -> None:
        check_decision(answer, request, engines)

    def last_resort(self, engines: Sequence[EngineView], error: Exception) -> RouteDecision:
        least = min((one for one in engines if one.role != "prefill"), key=lambda one: (one.load_s, one.num_running))
        return RouteDecision(RouteKind.STAY, least.engine_id, None, f"the decision failed: {error}")


def check_decision(decision: RouteDecision, request: RouteRequest, engines: Sequence[EngineView]) -> None:
    """Raises PolicyError: engines that were not offered, or a split that is not allowed."""
    if not isinstance(decision, RouteDecision):
        raise PolicyError(f"got {decision!r}; give a RouteDecision.")
    decoder = next((one for one in engines if one.engine_id == decision.decode_on and one.role != "prefill"), None)
    if decoder is None:
        known = [one.engine_id for one in engines if one.role != "prefill"]
        raise PolicyError(f"decode_on is {decision.decode_on!r}; allowed are {known}.")
    if decision.prefill_on is not None:
        if not request.can_split:
            raise PolicyError("a split of a request that cannot be split; look at request.can_split.")
        living = {one.engine_id for one in engines} & decoder.sources
        if decision.prefill_on not in living:
            raise PolicyError(f"prefill_on is {decision.prefill_on!r}; {decoder.engine_id} can load from {sorted(living)}.")


def _cost(choice: Choice) -> float:
    return choice[0]


def _is_in_time(choice: Choice) -> bool:
    """Whether the prompt comes before the decoding engine stops waiting; a late one is computed again."""
    _, estimate, first, second = choice
    return first.load_s + estimate.prefill_s + estimate.transfer_s <= second.timeout_s


def _lateness(choice: Choice) -> str:
    _, estimate, first, second = choice
    return (
        f"{first.engine_id} would be too late: {first.load_s:.4g} s of work wait there, the prompt takes "
        f"{estimate.prefill_s:.4g} s, its transfer {estimate.transfer_s:.4g} s, and {second.engine_id} waits "
        f"{second.timeout_s:g} s"
    )


def _instance(one: EngineView) -> Instance:
    # To the separator a hybrid engine is as one that decodes: keys and values come from prefill engines alone.
    role = Role.PREFILL if one.role == "prefill" else Role.DECODE
    num_running = 0 if one.role == "prefill" else one.num_running  # nothing decodes there that a prompt could hold up
    return Instance(one.engine_id, role, one.load_s, num_running, max(0, one.free_blocks), one.block_size)


def _for_whole_answer(costs: PDCosts, request: RouteRequest) -> PDCosts:
    """The one decode node of the plan stands for all steps of the answer."""
    num = min(request.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
    return costs.model_copy(
        update={name: num * getattr(costs, name) for name in ("decode_step_s", "decode_request_s", "decode_context_s")}
    )


def _plan(num_tokens: int, cached: int) -> ExecutionPlan:
    """A prompt, of which some tokens are cached, and a decode step behind it."""
    start = max(0, min(cached, num_tokens - 1))
    nodes = []
    if start:
        nodes.append(IRNode("fetch", NodeType.PREFIX_FETCH, (), (f"kv:0:{start}",), {"request": 0, "tokens": start}))
    config = {"request": 0, "start": start, "tokens": num_tokens - start}
    before = (f"kv:0:{start}",) if start else ()
    nodes.append(IRNode("prefill", NodeType.PREFILL_CHUNK, before, (f"kv:0:{num_tokens}",), config))
    after = (f"kv:0:{num_tokens + 1}",)
    nodes.append(IRNode("decode", NodeType.DECODE_STEP, (f"kv:0:{num_tokens}",), after, {"requests": [0]}))
    return ExecutionPlan("route", IRGraph(nodes), (0,))
