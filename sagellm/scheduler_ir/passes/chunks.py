"""Prefills that are longer than a step may be."""

from sagellm.scheduler_ir.builder import STEP_REMARKS
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType, kv_value
from sagellm.scheduler_ir.pass_settings import PassSettings
from sagellm.scheduler_ir.trusted import trusted_node

__all__ = ["chunk_prefills"]


def chunk_prefills(graph: IRGraph, settings: PassSettings) -> IRGraph:
    """A prefill of more than `token_budget` tokens becomes several of at most so many, each taking the keys and values of the
    one before. Each remarks the budget, so that no other prompt makes its step longer. The first keeps the id. A prefill
    stays whole where another node gives the keys and values of a part already, under the name that the part would need."""
    limit = settings.token_budget
    if not limit:
        return graph
    nodes: list[IRNode] = []
    for node in graph:
        if node.node_type is NodeType.PREFILL_CHUNK and node.config["tokens"] > limit:
            nodes += _pieces(graph, node, limit)
        else:
            nodes.append(node)
    return graph if len(nodes) == len(graph) else IRGraph(nodes)


def _pieces(graph: IRGraph, node: IRNode, limit: int) -> list[IRNode]:
    request, start = node.config["request"], node.config["start"]
    end = start + node.config["tokens"]
    stops = [*range(start + limit, end, limit), end]
    names = [kv_value(request, stop) for stop in stops[:-1]]
    ids = [node.node_id] + [f"{node.node_id}+{stop - start}" for stop in stops[:-1]]
    if any(graph.giver(name) for name in names) or any(each in graph for each in ids[1:]):
        return [node]
    budget = min(limit, node.config.get("token_budget", limit))
    later = {name: value for name, value in node.config.items() if name not in STEP_REMARKS}
    pieces, taken = [], node.inputs
    for index, stop in enumerate(stops):
        config = {**(later if index else node.config), "start": start, "tokens": stop - start, "token_budget": budget}
        outputs = (names[index],) if stop < end else node.outputs
        pieces.append(trusted_node(ids[index], node.node_type, taken, outputs, config, node.device))
        start, taken = stop, outputs
    return pieces
