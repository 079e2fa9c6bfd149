"""Several nodes that one step can do become one."""

from collections.abc import Mapping
from typing import Any

from sagellm.scheduler_ir.builder import STEP_REMARKS
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.kinds import COMPUTE
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.pass_settings import PassSettings
from sagellm.scheduler_ir.trusted import trusted_node

__all__ = ["merge_decode_steps", "merge_samples", "merged"]


def merge_decode_steps(graph: IRGraph, settings: PassSettings) -> IRGraph:
    """Decode steps of one device in batches of up to `max_batch_size` requests, no request twice in one.

    Only steps with equally many computing nodes before them are merged, counted on the longest way. On a way from one decode
    step to another this number grows, so merged steps never depend on each other, neither directly nor through another batch.
    The batch has the place and the id of its first step. Steps with different remarks stay apart, but for those that are of a
    whole step.
    """
    if graph.count((NodeType.DECODE_STEP,)) < 2:
        return graph
    depths: dict[str, int] = {}  # of values; none is 0
    groups: dict[tuple[Any, ...], list[IRNode]] = {}
    for node in graph.topological_order():
        depth = 0
        for name in node.inputs:
            if name in depths and depths[name] > depth:
                depth = depths[name]
        kind = node.node_type
        if kind in COMPUTE:
            depth += 1
            if kind is NodeType.DECODE_STEP:
                groups.setdefault((depth, node.device, _remarks(node.config)), []).append(node)
        if depth:
            for name in node.outputs:
                depths[name] = depth
    batches = [batch for group in groups.values() for batch in _batches(group, settings.max_batch_size)]
    return _replaced(graph, batches)


def merge_samples(graph: IRGraph, settings: PassSettings) -> IRGraph:
    """The samples that take what one step gives, and nothing of another, become one: they are drawn together anyway."""
    if graph.count((NodeType.SAMPLE,)) < 2:
        return graph
    groups: dict[tuple[Any, ...], list[IRNode]] = {}
    for node in graph:
        if node.node_type is NodeType.SAMPLE:
            givers = {graph.giver(name) for name in node.inputs} - {None}
            if len(givers) == 1:
                groups.setdefault((*givers, node.device, _remarks(node.config)), []).append(node)
    return _replaced(graph, [batch for group in groups.values() for batch in _batches(group, 0)])


def merged(nodes: list[IRNode], **config: Any) -> IRNode:
    """The first of them with the values of all, and this in its config; what one gives to another is no longer taken."""
    outputs = dict.fromkeys([name for node in nodes for name in node.outputs])
    inputs = dict.fromkeys([name for node in nodes for name in node.inputs if name not in outputs])
    first, config = nodes[0], {**nodes[0].config, **config}
    return trusted_node(first.node_id, first.node_type, tuple(inputs), tuple(outputs), config, first.device)


def _remarks(config: Mapping[str, Any]) -> str:
    """Equal for equal remarks. Nodes without any, the most, are quick."""
    if len(config) == 1:
        return ""
    mine = {name: value for name, value in config.items() if name != "requests" and name not in STEP_REMARKS}
    return repr(sorted(mine.items())) if mine else ""


def _batches(nodes: list[IRNode], limit: int) -> list[list[IRNode]]:
    """Those of more than one node."""
    batches: list[list[IRNode]] = []
    seen: set[int] = set()
    step: dict[str, Any] = {}
    for node in nodes:
        requests = node.config["requests"]
        full = limit and len(seen) + len(requests) > limit
        if not batches or full or not seen.isdisjoint(requests) or _disagree(step, node):
            batches.append([])
            seen, step = set(), {}
        batches[-1].append(node)
        seen.update(requests)
        if len(node.config) > 1:
            step.update(_of_step(node))
    return [batch for batch in batches if len(batch) > 1]


def _of_step(node: IRNode) -> dict[str, Any]:
    return {name: node.config[name] for name in STEP_REMARKS if name in node.config}


def _disagree(step: Mapping[str, Any], node: IRNode) -> bool:
    return bool(step) and len(node.config) > 1 and any(step.get(name, it) != it for name, it in _of_step(node).items())


def _replaced(graph: IRGraph, batches: list[list[IRNode]]) -> IRGraph:
    if not batches:
        return graph
    new: dict[str, IRNode | None] = {}
    for batch in batches:
        requests = [name for node in batch for name in node.config["requests"]]
        step = {name: value for node in batch if len(node.config) > 1 for name, value in _of_step(node).items()}
        new.update(dict.fromkeys([node.node_id for node in batch]))
        new[batch[0].node_id] = merged(batch, requests=requests, **step)
    return IRGraph([node for node in [new.get(each.node_id, each) for each in graph] if node is not None])
