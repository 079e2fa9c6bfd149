"""Prefills of tokens whose keys and values come from a cache."""

from dataclasses import replace

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.kinds import FETCHES
from sagellm.scheduler_ir.nodes import IRNode, NodeType, kv_value
from sagellm.scheduler_ir.passes.base import PassSettings

__all__ = ["drop_cached_recompute"]


def drop_cached_recompute(graph: IRGraph, settings: PassSettings) -> IRGraph:
    """A prefill begins behind the tokens that a fetch, a load or a transfer gives from the request's first one on; of one that
    is given whole only the last token stays, and only if logits are drawn from it. Whoever took what a dropped
    prefill gave takes the longer beginning instead. A prefill that is needed for the cached part itself stays."""
    if not graph.count(FETCHES):
        return graph
    given = _given(graph)
    instead: dict[str, str] = {}
    nodes: list[IRNode] = []
    changed = False
    for node in graph.topological_order():
        if not instead.keys().isdisjoint(node.inputs):
            node = replace(node, inputs=tuple(dict.fromkeys(instead.get(name, name) for name in node.inputs)))
        if node.node_type is NodeType.PREFILL_CHUNK and (key := (node.config["request"], node.device)) in given:
            behind = _behind(graph, node, *given[key], instead)
            changed = changed or behind is not node
            if behind is None:
                continue
            node = behind
        nodes.append(node)
    if not changed:
        return graph
    # In the old order of insertion, which is the order of urgency.
    kept = {node.node_id: node for node in nodes}
    return IRGraph(kept[node.node_id] for node in graph if node.node_id in kept)


def _given(graph: IRGraph) -> dict[tuple[int, str], tuple[int, IRNode]]:
    """(request, device) -> how many tokens of its beginning come from caches, and the node that gives the last of them. One
    that gives later tokens counts only if it takes the earlier ones, as its value stands for all of them."""
    found: dict[tuple[int, str], tuple[int, IRNode]] = {}
    for node in sorted((node for node in graph if node.node_type in FETCHES), key=lambda node: node.config.get("start", 0)):
        request, start = node.config["request"], node.config.get("start", 0)
        end, key = start + node.config["tokens"], (request, node.device)
        have = found[key][0] if key in found else 0
        joined = start == 0 or kv_value(request, start) in node.inputs
        if joined and start <= have < end and kv_value(request, end) in node.outputs:
            found[key] = (end, node)
    return found


def _behind(graph: IRGraph, node: IRNode, have: int, last: IRNode, instead: dict[str, str]) -> IRNode | None:
    """What is left of a prefill; None for nothing, and then `instead` says where its keys and values come from."""
    request, start = node.config["request"], node.config["start"]
    end = start + node.config["tokens"]
    if start >= have or _needs(graph, last, node):
        return node
    own, cached = kv_value(request, end), kv_value(request, have)
    if end <= have:
        if all(name == own for name in node.outputs):
            instead[own] = cached
            return None
        start = max(start, end - 1)
    else:
        start = have
    others = [name for name in node.inputs if name != kv_value(request, node.config["start"])]
    inputs = tuple(dict.fromkeys([cached, *(name for name in others if name != cached)]))
    config = {**node.config, "start": start, "tokens": end - start}
    if (inputs, start) == (node.inputs, node.config["start"]):
        return node
    return replace(node, inputs=inputs, config=config)


def _needs(graph: IRGraph, node: IRNode, other: IRNode) -> bool:
    """Whether `node` depends on `other`, directly or not."""
    seen, todo = set(), [node.node_id]
    while todo:
        for name in graph.predecessors(todo.pop()):
            if name == other.node_id:
                return True
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return False
