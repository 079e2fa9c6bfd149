"""Collectives one after the other that can be one."""

from typing import Any

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.passes.base import PassSettings
from sagellm.scheduler_ir.passes.merging import merged

__all__ = ["fuse_collectives"]


def fuse_collectives(graph: IRGraph, settings: PassSettings) -> IRGraph:
    """Collectives with the same op, group, device and remarks, next to each other in topological order and independent,
    become one while their bytes together stay within `max_collective_bytes`. Only ops that work place by place (`fusable_ops`).

    Nothing lies between neighbours of a topological order, so neither can depend on the other but directly, which is checked.
    """
    if graph.count((NodeType.COLLECTIVE,)) < 2:
        return graph
    runs: list[list[IRNode]] = []
    for node in graph.topological_order():
        if runs and _fits(runs[-1], node, settings):
            runs[-1].append(node)
        else:
            runs.append([node])
    if all(len(run) == 1 for run in runs):
        return graph
    return IRGraph(_fused(run) for run in runs)


def _fits(run: list[IRNode], node: IRNode, settings: PassSettings) -> bool:
    first = run[0]
    if node.node_type is not NodeType.COLLECTIVE or first.node_type is not NodeType.COLLECTIVE:
        return False
    if first.config["op"] not in settings.fusable_ops or (first.device, _kind(first)) != (node.device, _kind(node)):
        return False
    if sum(each.config["bytes"] for each in (*run, node)) > settings.max_collective_bytes:
        return False
    return not any(name in node.inputs for each in run for name in each.outputs)


def _kind(node: IRNode) -> dict[str, Any]:
    return {name: value for name, value in node.config.items() if name != "bytes"}


def _fused(run: list[IRNode]) -> IRNode:
    return run[0] if len(run) == 1 else merged(run, bytes=sum(node.config["bytes"] for node in run))
