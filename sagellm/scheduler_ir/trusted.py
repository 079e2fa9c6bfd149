"""Nodes past their check, for makers whose nodes are right by their making: the check costs more than everything else they do.
The tests hold such nodes against checked ones."""

from typing import Any

from sagellm.scheduler_ir.nodes import IRNode, NodeType

__all__ = ["trusted_node"]

_new = object.__new__
_set_id, _set_type, _set_inputs, _set_outputs, _set_config, _set_device = (
    getattr(IRNode, name).__set__ for name in ("node_id", "node_type", "inputs", "outputs", "config", "device")
)


def trusted_node(
    node_id: str, node_type: NodeType, inputs: tuple[str, ...], outputs: tuple[str, ...], config: dict[str, Any], device: str
) -> IRNode:
    """Inputs and outputs are distinct, the config has what the type asks for, and no other object holds it."""
    node = _new(IRNode)
    _set_id(node, node_id)
    _set_type(node, node_type)
    _set_inputs(node, inputs)
    _set_outputs(node, outputs)
    _set_config(node, config)
    _set_device(node, device)
    return node
