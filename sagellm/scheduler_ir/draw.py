"""A graph as text that Graphviz or Mermaid draws. Nodes are numbered, so that no id needs to be a name there."""

from collections.abc import Callable, Iterator
from typing import Protocol

from sagellm.scheduler_ir.nodes import IRNode, NodeType

__all__ = ["describe", "to_graphviz", "to_mermaid"]

MOST_REQUESTS = 4
# Mermaid ends a label at a quotation mark, reads HTML, entities behind `#`, and Markdown between backticks.
MERMAID = str.maketrans({
    '"': "#quot;", "#": "#35;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\\": "#92;", "\n": " ", "\r": " "
})  # fmt: skip
DOT = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": " ", "\r": " "})


class Drawable(Protocol):
    """The part of an `IRGraph` that drawing needs."""

    def __iter__(self) -> Iterator[IRNode]: ...

    def giver(self, value: str) -> str | None: ...


def describe(node: IRNode) -> list[str]:
    """Return the label of a node, in lines."""
    config, lines = node.config, [node.node_id, node.node_type.value]
    requests = node.requests
    if len(requests) > MOST_REQUESTS:
        lines.append(f"{len(requests)} requests")
    elif requests:
        lines.append(f"request{'s' if len(requests) > 1 else ''} {', '.join(map(str, requests))}")
    if "tokens" in config:
        start = config.get("start", 0)
        lines.append(f"tokens {start}..{start + config['tokens']}")
    if node.node_type is NodeType.COLLECTIVE:
        lines.append(f"{config['op']} in {config['group']}")
    for way in ("tier", "instance"):
        if f"src_{way}" in config:
            lines.append(f"{config[f'src_{way}']} to {config[f'dst_{way}']}")
    if "bytes" in config:
        lines.append(f"{config['bytes']} bytes")
    return lines


def to_graphviz(graph: Drawable, name: str = "plan") -> str:
    def label(node: IRNode) -> str:
        return "\\n".join(line.translate(DOT) for line in describe(node))

    lines = [f'digraph "{name.translate(DOT)}" {{', "  rankdir=LR;", "  node [shape=box];"]
    numbers = _numbers(graph)
    lines += _nodes(
        graph, lambda node: f'{numbers[node.node_id]} [label="{label(node)}"];',
        lambda index, device: [f"  subgraph cluster_{index} {{", f'    label="{device.translate(DOT)}";'], "  }",
    )  # fmt: skip
    lines += _edges(graph, numbers, lambda one, value, other: f'  {one} -> {other} [label="{value.translate(DOT)}"];')
    return "\n".join([*lines, "}"]) + "\n"


def to_mermaid(graph: Drawable) -> str:
    def label(node: IRNode) -> str:
        return "<br/>".join(line.translate(MERMAID) for line in describe(node))

    lines, numbers = ["flowchart LR"], _numbers(graph)
    lines += _nodes(
        graph, lambda node: f'{numbers[node.node_id]}["{label(node)}"]',
        lambda index, device: [f'  subgraph d{index}["{device.translate(MERMAID)}"]'], "  end",
    )  # fmt: skip
    lines += _edges(graph, numbers, lambda one, value, other: f'  {one} -->|"{value.translate(MERMAID)}"| {other}')
    return "\n".join(lines) + "\n"


def _numbers(graph: Drawable) -> dict[str, str]:
    return {node.node_id: f"n{index}" for index, node in enumerate(graph)}


def _nodes(
    graph: Drawable, line: Callable[[IRNode], str], begin: Callable[[int, str], list[str]], end: str
) -> list[str]:
    """One line a node. Those of a device are between the lines that begin and end it."""
    devices: dict[str, list[IRNode]] = {}
    for node in graph:
        devices.setdefault(node.device, []).append(node)
    lines = []
    for index, (device, nodes) in enumerate(devices.items()):
        drawn = [f"  {line(node)}" for node in nodes]
        lines += [*begin(index, device), *(f"  {each}" for each in drawn), end] if device else drawn
    return lines


def _edges(graph: Drawable, numbers: dict[str, str], line: Callable[[str, str, str], str]) -> list[str]:
    """One for each pair of nodes. More than one value between them are counted."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in graph:
        for value in node.inputs:
            if (giver := graph.giver(value)) is not None:
                found.setdefault((giver, node.node_id), []).append(value)
    return [
        line(numbers[giver], values[0] if len(values) == 1 else f"{len(values)} values", numbers[taker])
        for (giver, taker), values in found.items()
    ]
