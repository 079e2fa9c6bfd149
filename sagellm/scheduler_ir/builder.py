"""From the queue and a decision to a graph: who computes what next, in the order of the decision."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, RequestView, ScheduleDecision
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.trusted import trusted_node

__all__ = ["ENGINE_CHOICE", "STEP_REMARKS", "IRBuilder"]

ENGINE_CHOICE = "engine"
# In the config of a compute node: what holds for the whole step that the node is in, not for its requests.
STEP_REMARKS = frozenset({"phase", "token_budget"})
NOTHING: Mapping[Any, Any] = {}


class IRBuilder:
    """Makes graphs; it holds nothing, so that `IRBuilder.build` needs no instance.

    A request in line for prefill gets these nodes: tokens in the pool's prefix cache (`prefix_fetch`), tokens on slower
    tiers (`kv_load`), the rest (`prefill_chunk`), the next token (`sample`). A request that decodes gets its last
    token's keys and values (`decode_step`) and the next token (`sample`). A chunk that the decision cuts off stands
    before the rest of its prompt. Ids of
    nodes come from the request and the place of the first token, such as `prefill:7:512`.

    Remarks of a decision about the whole step are on the first node that computes: `token_budget`, and `phase` where
    that node's own is not meant; `engine` leaves it to the engine, as a decision without a phase does.
    """

    @staticmethod
    def build(
        requests: Sequence[RequestView],
        decision: ScheduleDecision | None = None,
        *,
        cached: Mapping[int, int] = NOTHING,
        lower: Mapping[int, Mapping[str, int]] = NOTHING,
        bytes_per_token: int = 0,
        fast_tier: str = "gpu",
        device: str = "",
        decode_batch: int = 1,
    ) -> IRGraph:
        """The next step of every request that is not held, in the order of the decision, else of `requests`.

        Args:
            cached: request -> tokens of its beginning in the pool. The last token of a request is computed nevertheless.
            lower: request -> tier -> tokens on it that continue what is cached, or on the tier before, in this order. Neither
                counts for requests that have begun: they have what there was.
            bytes_per_token: of keys and values in all layers.
            fast_tier: where the loads go.
            device: of all nodes.
            decode_batch: so many decode steps become one node, and their samples one, as `passes/merging.py` would have it of
                nodes of one request each, for a third of the time. 0: all.

        Raises:
            PlanError: a request twice or without tokens; a decision that names others, one twice, not all of them in its order,
                or cuts below 1 token; token or byte counts, or a batch, below 0.

        Complexity: O(requests).
        """
        by_id = {request.request_id: request for request in requests}
        if len(by_id) < len(requests):
            raise PlanError(f"requests {[request.request_id for request in requests]}; give each once.")
        if bytes_per_token < 0:
            raise PlanError(f"bytes_per_token is {bytes_per_token!r}; give a whole number from 0 on.")
        if decode_batch < 0:
            raise PlanError(f"decode_batch is {decode_batch!r}; give a whole number from 1 on, or 0 for no limit.")
        decision = decision or ScheduleDecision()
        _check(by_id, decision)
        hold, cuts = decision.hold, decision.chunk_tokens
        order = requests if decision.order is None else [by_id[name] for name in decision.order]
        nodes: list[IRNode] = []
        for part in _parts(order, hold, decode_batch):
            if part[0].phase is Phase.DECODE:
                nodes += _decode(part, device)
                continue
            (request,) = part
            start = request.num_computed
            if not start and (cached or lower):
                start = _fetch(nodes, request, cached, lower, bytes_per_token, fast_tier, device)
            _prefill(nodes, request, start, cuts.get(request.request_id), device)
        _remark(nodes, decision)
        return IRGraph(nodes)


def _parts(order: Iterable[RequestView], hold: Collection[int], decode_batch: int) -> list[list[RequestView]]:
    """Group the requests that are computed together: each waiting one alone, decoding ones in batches, each at its first
    one's place."""
    parts: list[list[RequestView]] = []
    batch: list[RequestView] = []
    for request in order:
        if request.request_id in hold:
            continue
        if request.num_tokens < 1:
            raise PlanError(f"request {request.request_id} has {request.num_tokens} tokens; give those with 1 or more.")
        if request.phase is not Phase.DECODE:
            parts.append([request])
            continue
        if len(batch) in (0, decode_batch):
            batch = []
            parts.append(batch)
        batch.append(request)
    return parts


def _check(by_id: Mapping[int, RequestView], decision: ScheduleDecision) -> None:
    if (order := decision.order) is not None:
        if len(order) != len(by_id) or by_id.keys() != set(order):
            raise PlanError(f"the order is {list(order)} for requests {list(by_id)}; name each of them once.")
    for what, names in (("hold", decision.hold), ("chunk_tokens", decision.chunk_tokens)):
        if names and (unknown := sorted(set(names) - by_id.keys())):
            raise PlanError(f"{what} names requests {unknown}; the step has {list(by_id)}.")
    for name, tokens in decision.chunk_tokens.items():
        if tokens < 1:
            raise PlanError(f"chunk_tokens of request {name} is {tokens!r}; give a whole number from 1 on.")
    if decision.token_budget is not None and decision.token_budget < 1:
        raise PlanError(f"token_budget is {decision.token_budget!r}; give a whole number from 1 on, or None.")


def _decode(batch: Sequence[RequestView], device: str) -> tuple[IRNode, IRNode]:
    """A step of them together, and the sample of it."""
    names: list[int] = []
    taken: list[str] = []
    given: list[str] = []
    places: list[str] = []
    for request in batch:
        name, tokens = request.request_id, request.num_tokens
        place, last = f":{name}:{tokens}", f":{name}:{tokens - 1}"
        names.append(name)
        places.append(place)
        taken += ("kv" + last, "token" + last) if tokens > 1 else ("token" + last,)
        given += ("kv" + place, "logits" + place)
    first, logits, drawn = places[0], tuple(given[1::2]), tuple(["token" + place for place in places])
    return (
        trusted_node("decode" + first, NodeType.DECODE_STEP, tuple(taken), tuple(given), {"requests": names}, device),
        trusted_node("sample" + first, NodeType.SAMPLE, logits, drawn, {"requests": list(names)}, device),
    )


def _fetch(
    nodes: list[IRNode], request: RequestView, cached: Mapping[int, int], lower: Mapping[int, Mapping[str, int]],
    bytes_per_token: int, fast_tier: str, device: str,
) -> int:  # fmt: skip
    """How many tokens need not be computed. Those after the first `last` ones are of no use: the last one gives the logits."""
    name, last = request.request_id, request.num_tokens - 1
    found = cached.get(name, 0)
    if found < 0:
        raise PlanError(f"cached of request {name} is {found!r}; give a whole number from 0 on.")
    start = min(found, last)
    if start:
        config = {"request": name, "tokens": start}
        nodes.append(trusted_node(f"fetch:{name}", NodeType.PREFIX_FETCH, (), (f"kv:{name}:{start}",), config, device))
    for tier, tokens in lower.get(name, NOTHING).items():
        if tokens < 0:
            raise PlanError(f"request {name} has {tokens!r} tokens on {tier}; give a whole number from 0 on.")
        end = min(start + tokens, last)
        if end > start:
            config = {"request": name, "start": start, "tokens": end - start, "src_tier": tier, "dst_tier": fast_tier,
                      "bytes": (end - start) * bytes_per_token}  # fmt: skip
            inputs = (f"kv:{name}:{start}",) if start else ()
            nodes.append(
                trusted_node(f"load:{name}:{start}", NodeType.KV_LOAD, inputs, (f"kv:{name}:{end}",), config, device)
            )
        start = end
    return start


def _prefill(nodes: list[IRNode], request: RequestView, start: int, cut: int | None, device: str) -> None:
    name, end = request.request_id, request.num_tokens
    start = min(start, end - 1)
    stops = [start + cut, end] if cut is not None and start + cut < end else [end]
    for stop in stops:
        inputs = (f"kv:{name}:{start}",) if start else ()
        outputs = (f"kv:{name}:{stop}", f"logits:{name}:{stop}") if stop == end else (f"kv:{name}:{stop}",)
        config = {"request": name, "start": start, "tokens": stop - start}
        nodes.append(trusted_node(f"prefill:{name}:{start}", NodeType.PREFILL_CHUNK, inputs, outputs, config, device))
        start = stop
    config = {"requests": [name]}
    logits, token = (f"logits:{name}:{end}",), (f"token:{name}:{end}",)
    nodes.append(trusted_node(f"sample:{name}:{end}", NodeType.SAMPLE, logits, token, config, device))


def _remark(nodes: Sequence[IRNode], decision: ScheduleDecision) -> None:
    """The nodes are this call's own still, so that their configs may be completed."""
    for node in nodes:
        if node.node_type in (NodeType.PREFILL_CHUNK, NodeType.DECODE_STEP):
            own = Phase.PREFILL if node.node_type is NodeType.PREFILL_CHUNK else Phase.DECODE
            if decision.phase is not own:
                node.config["phase"] = ENGINE_CHOICE if decision.phase is None else decision.phase.value  # type: ignore[index]
            if decision.token_budget is not None:
                node.config["token_budget"] = decision.token_budget  # type: ignore[index]
            return
