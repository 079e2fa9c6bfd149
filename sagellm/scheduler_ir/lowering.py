"""From a graph to the decision for the next step of an engine."""

from collections.abc import Mapping

from sagellm.core.hooks import Phase, RequestView, ScheduleDecision, StepView
from sagellm.scheduler_ir.builder import ENGINE_CHOICE
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.kinds import COMPUTE, WITH_THE_STEP
from sagellm.scheduler_ir.nodes import IRNode, NodeType

__all__ = ["is_done", "lower"]


def lower(
    graph: IRGraph, view: StepView, device: str | None = None, *, made_from: ScheduleDecision | None = None
) -> ScheduleDecision:
    """Return the decision that the graph wants for the step of `view`.

    The progress of the graph is read from the view. A chunk is done once its tokens have keys and values. A decode step
    or a sample is done once its value is there (`kv:7:100`, `token:7:100`); names of another form are never done. A
    request that
    the view has not, as it is in flight or has ended, is left out and keeps no other waiting. So one graph does for several
    steps.

    The phase is that of the first ready node that computes, or its remark (`builder.IRBuilder`). The order has requests
    of ready nodes first, then others in the graph, then the rest. Held are requests without a ready node, and those of
    decode steps beyond `view.max_batch_size`. A ready chunk that ends before its prompt gives chunk_tokens. The token
    budget is the least remark of a ready node. An empty graph holds everybody.

    Args:
        device: only nodes on it, and those that say none, are for this engine; None takes all. Others' nodes count as done
            once the view shows what they give.
        made_from: the decision that the graph was built from. A graph says who does what, and when; the reasons and the
            limits of guesses are those of this decision.

    Raises:
        PlanError: a cycle.

    Complexity: O(nodes + requests).
    """
    requests: dict[int, RequestView] = {request.request_id: request for request in view.requests}
    ready, later = _ready(graph, requests, device)
    hold = set(requests)
    order: dict[int, None] = {}
    chunks: dict[int, int] = {}
    budgets: list[int] = []
    num_decoding = 0
    for node in ready:
        config, present = node.config, [name for name in node.requests if name in requests]
        if "token_budget" in config:
            budgets.append(config["token_budget"])
        order.update(dict.fromkeys(present))
        if node.node_type is NodeType.PREFILL_CHUNK:
            _cut(node, requests[present[0]], chunks)
        else:
            if num_decoding and 0 < view.max_batch_size < num_decoding + len(present):
                continue
            num_decoding += len(present)
        hold.difference_update(present)
    for names in (*later, requests):
        order.update(dict.fromkeys(name for name in names if name in requests))
    lowered = tuple(order), frozenset(hold), min(budgets, default=None)
    phase = _phase(ready, requests)
    if made_from is not None:
        return ScheduleDecision(
            *lowered, made_from.reason, phase, chunks, made_from.reasons, made_from.draft_tokens, made_from.collectives
        )
    reason = f"{ready[0].node_id} is the first that is ready" if ready else "no node is ready"
    return ScheduleDecision(*lowered, reason, phase, chunks)


def is_done(node: IRNode, requests: Mapping[int, RequestView]) -> bool:
    """Whether these requests, by id, show that the node's work is done. Missing requests need nothing."""
    config = node.config
    if "request" in config and "tokens" in config:
        request = requests.get(config["request"])
        return request is None or request.num_computed >= config.get("start", 0) + config["tokens"]
    what = "token" if node.node_type is NodeType.SAMPLE else "kv"
    here = [name for name in node.requests if name in requests]
    if not here:
        return True
    # Those of a node are at one place mostly, so that one of them tells of it whether it is still to be done.
    mine = f"{what}:{here[0]}:"
    if not any([_is_there(value, requests[here[0]]) for value in node.outputs if value.startswith(mine)]):
        return False
    left = {str(name): requests[name] for name in here}
    for value in node.outputs:
        kind, _, rest = value.partition(":")
        name = rest.partition(":")[0]
        if kind == what and name in left and _is_there(value, left[name]):
            del left[name]
    return not left


def _is_there(value: str, request: RequestView) -> bool:
    """Whether the request has come as far as this value, keys and values or a token."""
    what, _, rest = value.partition(":")
    place = rest.partition(":")[2]
    if not place.isdecimal():
        return False
    return request.num_tokens > int(place) if what == "token" else request.num_computed >= int(place)


def _ready(
    graph: IRGraph, requests: Mapping[int, RequestView], device: str | None
) -> tuple[list[IRNode], list[tuple[int, ...]]]:
    """Nodes to compute now, and the requests of those that wait for others."""
    blocked: set[str] = set()  # values that are still to come
    ready: list[IRNode] = []
    later: list[tuple[int, ...]] = []
    for node in graph.topological_order():
        waits = bool(blocked) and not blocked.isdisjoint(node.inputs)
        if node.node_type in WITH_THE_STEP:
            if waits:
                blocked.update(node.outputs)
            continue
        if is_done(node, requests):
            continue
        blocked.update(node.outputs)
        if node.node_type in COMPUTE:
            if waits or not (device is None or node.device in ("", device)):
                later.append(node.requests)
            else:
                ready.append(node)
    return ready, later


def _cut(node: IRNode, request: RequestView, chunks: dict[int, int]) -> None:
    end = node.config["start"] + node.config["tokens"]
    if end < request.num_tokens:
        chunks[request.request_id] = end - max(node.config["start"], request.num_computed)


def _phase(ready: list[IRNode], requests: Mapping[int, RequestView]) -> Phase | None:
    """A request that was preempted must have its prompt computed again before its decode step."""
    if not ready:
        return None
    first = ready[0]
    decodes = any(requests[name].phase is Phase.DECODE for name in first.requests if name in requests)
    own = Phase.DECODE if decodes and first.node_type is not NodeType.PREFILL_CHUNK else Phase.PREFILL
    said = first.config.get("phase", own)
    return None if said == ENGINE_CHOICE else Phase(said)
