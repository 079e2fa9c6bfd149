"""Differences between two graphs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sagellm.scheduler_ir.nodes import IRNode
from sagellm.scheduler_ir.serial import node_to_dict

__all__ = ["GraphDiff", "NodeChange", "diff_graphs"]

FIELDS = ("type", "inputs", "outputs", "config", "device")


@dataclass(frozen=True)
class NodeChange:
    """`fields`: the name of a field, of one in the config as `config.tokens`, -> what it was, what it is; None where it was
    not there."""

    node_id: str
    fields: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class GraphDiff:
    """From one graph to another. It is true if anything differs.

    Attributes:
        added, removed: nodes whose ids the other graph has not, in the order of their graph.
        changed: nodes of both, with the fields that differ.
        reordered: ids of the nodes of both in their new order, if that is another than before; else empty.
    """

    added: tuple[IRNode, ...] = ()
    removed: tuple[IRNode, ...] = ()
    changed: tuple[NodeChange, ...] = ()
    reordered: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.reordered)

    def __str__(self) -> str:
        """A line for each node, `-` removed, `+` added, `~` changed; one more for the order."""
        lines = [f"- {_line(node)}" for node in self.removed] + [f"+ {_line(node)}" for node in self.added]
        for change in self.changed:
            said = ", ".join(f"{name} {before!r} -> {after!r}" for name, (before, after) in change.fields.items())
            lines.append(f"~ {change.node_id}: {said}")
        if self.reordered:
            lines.append(f"order: {', '.join(self.reordered)}")
        return "\n".join(lines) or "no difference"

    def to_dict(self) -> dict[str, Any]:
        return {
            "added": [node_to_dict(node) for node in self.added],
            "removed": [node_to_dict(node) for node in self.removed],
            "changed": [
                {"id": change.node_id, "fields": {name: list(pair) for name, pair in change.fields.items()}}
                for change in self.changed
            ],
            "reordered": list(self.reordered),
        }


def diff_graphs(before: Iterable[IRNode], after: Iterable[IRNode]) -> GraphDiff:
    """O(nodes)."""
    old = {node.node_id: node for node in before}
    new = {node.node_id: node for node in after}
    kept = [name for name in new if name in old]
    changes = (_change(old[name], new[name]) for name in kept if old[name] is not new[name])
    return GraphDiff(
        added=tuple(node for name, node in new.items() if name not in old),
        removed=tuple(node for name, node in old.items() if name not in new),
        changed=tuple(change for change in changes if change.fields),
        reordered=tuple(kept) if kept != [name for name in old if name in new] else (),
    )


def _change(before: IRNode, after: IRNode) -> NodeChange:
    old, new = _fields(before), _fields(after)
    # Python takes 1, 1.0 and True for the same, JSON does not.
    names = [name for name in old | new if (name in old) != (name in new) or repr(old[name]) != repr(new[name])]
    return NodeChange(before.node_id, {name: (old.get(name), new.get(name)) for name in names})


def _fields(node: IRNode) -> dict[str, Any]:
    document = node_to_dict(node)
    fields = {name: document.get(name) for name in FIELDS if name != "config" and name in document}
    return fields | {f"config.{name}": value for name, value in document.get("config", {}).items()}


def _line(node: IRNode) -> str:
    document = node_to_dict(node)
    config = ", ".join(f"{name} {value!r}" for name, value in document.get("config", {}).items())
    return f"{node.node_id} ({node.node_type.value}{f' on {node.device}' if node.device else ''}): {config or 'nothing'}"
