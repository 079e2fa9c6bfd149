"""Cuts a plan into one for each instance, with transfers where a value goes from one to another."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sagellm.core.errors import PlanError
from sagellm.core.hooks import RequestId
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.pd_costs import PDCosts
from sagellm.scheduler_ir.plan import ExecutionPlan

__all__ = ["Crossing", "crossings", "cut_plan"]

TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one instance gives and another takes. `tokens`: from `start` on; `num_bytes`: of all of them."""

    value: str
    request: RequestId
    source: str
    target: str
    start: int
    tokens: int
    num_bytes: int

    @property
    def config(self) -> dict[str, object]:
        return {
            "request": self.request, "start": self.start, "tokens": self.tokens, "src_instance": self.source,
            "dst_instance": self.target, "bytes": self.num_bytes,
        }  # fmt: skip


def crossings(graph: IRGraph, place: Mapping[str, str], costs: PDCosts) -> list[Crossing]:
    """Return the transfers that each node needs, by its id; each value once for each instance that takes it.

    Raises:
        PlanError: a value that belongs to no request, so that no transfer can be made of it.
    """
    givers = {value: node for node in graph for value in node.outputs}
    found: dict[tuple[str, str], Crossing] = {}
    for node in graph:
        target = place[node.node_id]
        for value in node.inputs:
            giver = givers.get(value)
            if giver is not None and place[giver.node_id] != target and (value, target) not in found:
                found[value, target] = _crossing(value, giver, place[giver.node_id], target, costs)
    return list(found.values())


def cut_plan(plan: ExecutionPlan, place: Mapping[str, str], costs: PDCosts, home: str) -> list[ExecutionPlan]:
    """Each node in the plan of its place, its device set to it. A transfer stands in both plans: in the one that sends it
    takes the value and gives it for the other instance, `value@instance`; in the other it takes this and gives the value. So
    nodes keep their inputs. A plan for one place keeps its id. `home`: where requests without a node go.

    Raises:
        PlanError: as `crossings`.
    """
    parts: dict[str, list[IRNode]] = {home: []}
    for node in plan.ir_graph:
        parts.setdefault(place[node.node_id], []).append(replace(node, device=place[node.node_id]))
    for one in crossings(plan.ir_graph, place, costs):
        away = f"{one.value}@{one.target}"
        send, take = f"send:{away}", f"take:{away}"
        parts[one.source].append(IRNode(send, NodeType.KV_TRANSFER, (one.value,), (away,), one.config, one.source))
        parts[one.target].append(IRNode(take, NodeType.KV_TRANSFER, (away,), (one.value,), one.config, one.target))
    named = {request for node in plan.ir_graph for request in node.requests}
    plans = []
    for instance, nodes in parts.items():
        own = {request for node in nodes for request in node.requests}
        if instance == home:
            own.update(set(plan.request_ids) - named)
        if own:
            requests = tuple(request for request in plan.request_ids if request in own)
            plans.append((instance, nodes, requests))
        elif nodes:
            plans.append((instance, nodes, plan.request_ids))  # collectives alone
    is_one = len(plans) == 1
    return [
        ExecutionPlan(plan.plan_id if is_one else f"{plan.plan_id}@{instance}", IRGraph(nodes), requests, instance)
        for instance, nodes, requests in plans
    ]


def _crossing(value: str, giver: IRNode, source: str, target: str, costs: PDCosts) -> Crossing:
    kind, _, rest = value.partition(":")
    request, _, place = rest.partition(":")
    if kind in ("kv", "token", "logits") and request.isdecimal() and place.isdecimal() and int(request) in giver.requests:
        end = int(place)
        if kind == "kv" and end > 0:
            return Crossing(value, RequestId(int(request)), source, target, 0, end, end * costs.kv_bytes_per_token)
        num_bytes = costs.logits_bytes if kind == "logits" else TOKEN_BYTES
        return Crossing(value, RequestId(int(request)), source, target, end, 1, num_bytes)
    if not giver.requests:
        raise PlanError(f"value {value} of node {giver.node_id} belongs to no request; it cannot go from {source} to {target}.")
    # A name of one's own: it stands for what its node has made, at most all of its keys and values.
    end = giver.config.get("start", 0) + giver.config.get("tokens", 1)
    return Crossing(value, giver.requests[0], source, target, 0, end, end * costs.kv_bytes_per_token)
