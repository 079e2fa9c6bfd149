"""Loads run beside compute that does not need them."""

from dataclasses import replace

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.kinds import COMPUTE
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.passes.base import PassSettings

__all__ = ["overlap_loads"]

EARLY = (NodeType.KV_LOAD, NodeType.PREFIX_FETCH)


def overlap_loads(graph: IRGraph, settings: PassSettings) -> IRGraph:
    """Each load stands as early as its inputs allow, everything else in its order. It remarks in `beside` the first node of its
    device that computes while it runs and does not need it; a load that the next computing node waits for has no such remark.
    With the speed of its link known it remarks its seconds too, `cost_s`; loads of one link run one after the other, and beside
    which node each begins is told by the `cost_s` of those nodes, where they have one."""
    if not graph.count((NodeType.KV_LOAD,)):
        return graph
    order = graph.topological_order(first=EARLY)
    begins: list[float] = []  # of each place in the order, in seconds of compute
    elapsed_s = 0.0
    for node in order:
        begins.append(elapsed_s)
        if node.node_type in COMPUTE:
            elapsed_s += node.config.get("cost_s", 0.0)
    links: dict[tuple[str, str, str], float] = {}
    nodes = list(order)
    for place, node in enumerate(order):
        if node.node_type is NodeType.KV_LOAD:
            pair = (node.config["src_tier"], node.config["dst_tier"])
            config = {name: value for name, value in node.config.items() if name != "beside"}
            if pair in settings.bytes_per_s:
                config["cost_s"] = config["bytes"] / settings.bytes_per_s[pair]
            begin_s = max(links.get((*pair, node.device), 0.0), begins[place])
            links[(*pair, node.device)] = begin_s + config.get("cost_s", 0.0)
            if (beside := _beside(order, begins, place, begin_s)) is not None:
                config["beside"] = beside
            if config != node.config:
                nodes[place] = replace(node, config=config)
    same = all(old is new for old, new in zip(graph, nodes, strict=True))
    return graph if same else IRGraph(nodes)


def _beside(order: list[IRNode], begins: list[float], place: int, begin_s: float) -> str | None:
    """The first node of the device that computes when the load begins, before the first that needs the load."""
    needing = set(order[place].outputs)
    for index in range(place + 1, len(order)):
        node = order[index]
        if not needing.isdisjoint(node.inputs):
            needing.update(node.outputs)
            if node.node_type in COMPUTE and node.device == order[place].device:
                return None
        elif node.node_type in COMPUTE and node.device == order[place].device:
            if "cost_s" not in node.config or begin_s < begins[index] + node.config["cost_s"]:
                return node.node_id
    return None
