"""Nodes in an order, joined by the values that they give and take."""

import heapq
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.diff import GraphDiff, diff_graphs
from sagellm.scheduler_ir.draw import to_graphviz, to_mermaid
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.pass_settings import PassSettings
from sagellm.scheduler_ir.serial import FORMAT, node_from_dict, node_to_dict

__all__ = ["IRGraph"]


class IRGraph:
    """A directed graph of `IRNode`s. The order of insertion is the order of urgency: of nodes that are ready, the one that
    was added first goes first. Nodes are added and never removed; a pass makes a new graph. Not thread-safe while it is built.

    Raises:
        PlanError: a node id twice, or an output that another node gives already.
    """

    __slots__ = ("_givers", "_nodes", "_order")
    _passes: "ClassVar[tuple[Callable[[IRGraph, PassSettings], IRGraph], ...]]" = ()
    _check: "ClassVar[Callable[[IRGraph, IRGraph, str], None]]"

    def __init__(self, nodes: Iterable[IRNode] = ()) -> None:
        self._nodes: dict[str, IRNode] = {}
        self._givers: dict[str, str] = {}
        self._order: list[IRNode] | None = None
        nodes = list(nodes)
        if not self._fill(nodes):
            for node in nodes:  # one of these raises, and says why
                self.add(node)

    def add(self, node: IRNode) -> None:
        """Last in order. The graph is unchanged if this raises."""
        if not isinstance(node, IRNode):
            raise PlanError(f"{node!r} is no node; give an IRNode.")
        node_id, givers = node.node_id, self._givers
        if node_id in self._nodes:
            raise PlanError(f"node {node_id} is in the graph already; give each node an id of its own.")
        for name in node.outputs:
            if name in givers:
                raise PlanError(f"node {node_id} gives {name}, as {givers[name]} does; let one node give each value.")
        for name in node.outputs:
            givers[name] = node_id
        self._nodes[node_id] = node
        self._order = None

    def _fill(self, nodes: list[IRNode]) -> bool:
        """All at once, in a third of the time of `add`; False, and nothing done, where one of them is not to be added."""
        if not all([type(node) is IRNode for node in nodes]):
            return False
        by_id = {node.node_id: node for node in nodes}
        givers = {name: node.node_id for node in nodes for name in node.outputs}
        if len(by_id) < len(nodes) or len(givers) < sum([len(node.outputs) for node in nodes]):
            return False
        self._nodes, self._givers = by_id, givers
        return True

    def _copy(self) -> "IRGraph":
        """To be added to on its own."""
        graph = IRGraph()
        graph._nodes, graph._givers, graph._order = dict(self._nodes), dict(self._givers), self._order
        return graph

    def __iter__(self) -> Iterator[IRNode]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._nodes

    def __getitem__(self, node_id: str) -> IRNode:
        """Raises PlanError: no such node."""
        try:
            return self._nodes[node_id]
        except KeyError:
            known = ", ".join(list(self._nodes)[:8]) + (", ..." if len(self._nodes) > 8 else "")
            raise PlanError(f"no node {node_id!r} in the graph; it has {known or 'none'}.") from None

    def __eq__(self, other: object) -> bool:
        """The same nodes in the same order. Tuples in a config equal lists, as JSON tells no difference."""
        if not isinstance(other, IRGraph):
            return NotImplemented
        return not self.diff(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"IRGraph({len(self)} nodes: {', '.join(list(self._nodes)[:8])}{', ...' if len(self) > 8 else ''})"

    def giver(self, value: str) -> str | None:
        """The id of the node that gives this value; None where no node does, so that it was there before."""
        return self._givers.get(value)

    def count(self, types: Sequence[NodeType]) -> int:
        """How many nodes are of one of these types. O(nodes)."""
        every = [node.node_type for node in self._nodes.values()]
        return sum([every.count(each) for each in types])

    def predecessors(self, node_id: str) -> list[str]:
        """Ids of the nodes that give what this one takes, in the order of its inputs. Raises PlanError: no such node."""
        givers = [self._givers[name] for name in self[node_id].inputs if name in self._givers]
        return list(dict.fromkeys(givers))

    def successors(self, node_id: str) -> list[str]:
        """Ids of the nodes that take what this one gives, in order of insertion. O(nodes). Raises PlanError: no such node."""
        given = set(self[node_id].outputs)
        return [node.node_id for node in self if not given.isdisjoint(node.inputs)]

    def topological_order(self, first: Container[NodeType] = ()) -> list[IRNode]:
        """Every node behind those that it depends on; among the ready in order of insertion. Nodes of the types `first` go as
        soon as they are ready. O(nodes + values), times log(nodes) where insertion is not such an order.

        Raises:
            PlanError: a cycle; the message names it, `a -> b -> a` where b takes what a gives, and a what b gives.
        """
        if first:
            return self._sorted(lambda node: 0 if node.node_type in first else 1)
        if self._order is None:
            self._order = list(self) if self._is_in_order() else self._sorted(lambda node: 0)
        return list(self._order)

    def _is_in_order(self) -> bool:
        to_come = set(self._givers)
        for node in self._nodes.values():
            if not to_come.isdisjoint(node.inputs):
                return False
            to_come.difference_update(node.outputs)
        return True

    def _sorted(self, rank: Callable[[IRNode], int]) -> list[IRNode]:
        place = {node_id: index for index, node_id in enumerate(self._nodes)}
        takers: dict[str, list[str]] = {}
        missing: dict[str, int] = {}
        for node_id in self._nodes:
            givers = self.predecessors(node_id)
            missing[node_id] = len(givers)
            for giver in givers:
                takers.setdefault(giver, []).append(node_id)
        ready = [(rank(self._nodes[name]), place[name], name) for name, count in missing.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            name = heapq.heappop(ready)[2]
            order.append(self._nodes[name])
            del missing[name]
            for taker in takers.get(name, ()):
                missing[taker] -= 1
                if not missing[taker]:
                    heapq.heappush(ready, (rank(self._nodes[taker]), place[taker], taker))
        if missing:
            raise PlanError(f"the graph has a cycle, {self._cycle(missing)}; leave out one of these inputs.")
        return order

    def _cycle(self, stuck: Mapping[str, int]) -> str:
        """Each node that is stuck waits for one that is stuck, so that going back ends where it has been before."""
        path = [next(iter(stuck))]
        while True:
            before = next(name for name in self.predecessors(path[-1]) if name in stuck)
            if before in path:
                break
            path.append(before)
        cycle = path[path.index(before) :][::-1]
        start = min(range(len(cycle)), key=lambda index: list(stuck).index(cycle[index]))
        cycle = cycle[start:] + cycle[:start]
        return " -> ".join([*cycle, cycle[0]])

    @classmethod
    def use_passes(
        cls, passes: "Sequence[Callable[[IRGraph, PassSettings], IRGraph]]", check: "Callable[[IRGraph, IRGraph, str], None]"
    ) -> None:
        """Set the default passes of `optimize`, and its check of what a pass has changed; the package does it on import."""
        cls._passes, cls._check = tuple(passes), staticmethod(check)

    def optimize(
        self,
        passes: "Sequence[Callable[[IRGraph, PassSettings], IRGraph]] | None" = None,
        settings: PassSettings | None = None,
        check: bool = False,
    ) -> "IRGraph":
        """Return a new graph that does the same work, after each of `passes` in turn; by default `passes.DEFAULT_PASSES`.

        Raises:
            PlanError: a cycle; with `check` also a pass that changed what is computed, by name (`passes/invariants.py`).
        """
        settings = settings or PassSettings()
        self.topological_order()  # a cycle is told here, not by a pass
        graph = self
        for each in self._passes if passes is None else passes:
            before, graph = graph, each(graph, settings)
            if check and graph is not before:
                type(self)._check(before, graph, getattr(each, "__name__", repr(each)))
        return graph._copy() if graph is self else graph

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Raises PlanError: a config that it cannot, naming the node."""
        return {"format": FORMAT, "nodes": [node_to_dict(node) for node in self]}

    @classmethod
    def from_dict(cls, document: Any) -> "IRGraph":
        """Raises PlanError: not what `to_dict` gives, naming the node; an unknown format; a cycle."""
        if not isinstance(document, Mapping) or not isinstance(document.get("nodes"), (list, tuple)):
            raise PlanError(
                "this is no graph; give an object with `format` and a list `nodes`, as IRGraph.to_dict does."
            )
        if document.get("format") != FORMAT or isinstance(document["format"], bool):
            raise PlanError(f"the graph has format {document.get('format')!r}; this version reads {FORMAT}.")
        if unknown := sorted(map(str, document.keys() - {"format", "nodes"})):
            raise PlanError(f"the graph has {', '.join(unknown)}; allowed are format, nodes.")
        graph = cls(node_from_dict(each, index) for index, each in enumerate(document["nodes"]))
        graph.topological_order()
        return graph

    def to_json(self, indent: int | None = None) -> str:
        """Raises PlanError: as `to_dict`."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "IRGraph":
        """Raises PlanError: no JSON, or as `from_dict`."""
        try:
            document = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(f"this is no JSON ({error}); give what IRGraph.to_json writes.") from None
        return cls.from_dict(document)

    def to_graphviz(self, name: str = "plan") -> str:
        """A digraph in the DOT language; a device is a cluster."""
        return to_graphviz(self, name)

    def to_mermaid(self) -> str:
        """A flowchart; a device is a subgraph."""
        return to_mermaid(self)

    def diff(self, other: "IRGraph") -> GraphDiff:
        """Return the changes that turn this graph into the other one. Nodes are the same if their ids are."""
        return diff_graphs(self, other)
