"""Order, neighbours and cycles of a graph."""

import pytest
from hypothesis import given

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import NodeType
from tests.scheduler_ir.made import chain, graphs, node


def ids(nodes) -> list[str]:
    return [each.node_id for each in nodes]


def test_nodes_in_the_order_of_insertion():
    graph = chain(b="", a="b")
    assert (len(graph), ids(graph), "a" in graph, "c" in graph) == (2, ["b", "a"], True, False)
    assert graph["a"].inputs == ("b",)
    assert (graph.giver("a"), graph.giver("elsewhere")) == ("a", None)


def test_neighbours_go_through_values():
    graph = IRGraph([
        node("x", NodeType.SAMPLE, "", "v w", requests=[1]),
        node("z", NodeType.SAMPLE, "w v u outside", "", requests=[1]),
        node("y", NodeType.SAMPLE, "v", "u", requests=[1]),
    ])  # fmt: skip
    assert graph.predecessors("z") == ["x", "y"] and graph.predecessors("x") == []
    assert graph.successors("x") == ["z", "y"] and graph.successors("z") == []


def test_the_ready_go_in_order_of_insertion():
    assert ids(chain(a="d", b="", c="a", d="", e="").topological_order()) == ["b", "d", "a", "c", "e"]


def test_types_that_go_first():
    load = node("load", NodeType.PREFIX_FETCH, "", "kv", request=1, tokens=1)
    behind = node("behind", NodeType.PREFIX_FETCH, "a", "kv2", request=1, tokens=1)
    graph = IRGraph([*chain(b="", a="b", c=""), load, behind])
    assert ids(graph.topological_order(first=(NodeType.PREFIX_FETCH,))) == ["load", "b", "a", "behind", "c"]
    assert ids(graph.topological_order()) == ["b", "a", "c", "load", "behind"]


@given(graphs())
def test_every_node_stands_behind_its_givers_and_before_younger_ones_that_are_ready(graph: IRGraph):
    order = ids(graph.topological_order())
    left, expected = ids(graph), []
    while left:  # the definition, in quadratic time
        ready = next(name for name in left if not set(graph.predecessors(name)) & set(left))
        left.remove(ready)
        expected.append(ready)
    assert order == expected


@pytest.mark.parametrize(
    ("inputs", "cycle"),
    [
        ({"a": "a"}, "a -> a"),
        ({"a": "b", "b": "a"}, "a -> b -> a"),
        ({"x": "", "c": "b", "a": "x c", "b": "a", "y": "a"}, "c -> a -> b -> c"),
        ({"late": "b", "a": "b", "b": "a"}, "a -> b -> a"),
    ],
)
def test_a_cycle_is_named(inputs: dict[str, str], cycle: str):
    graph = chain(**inputs)
    for ask in (graph.topological_order, graph.optimize, lambda: IRGraph.from_json(graph.to_json())):
        with pytest.raises(PlanError, match=f"cycle, {cycle};"):
            ask()


def test_a_node_that_comes_later_is_heard_of():
    graph = chain(a="b")
    assert ids(graph.topological_order()) == ["a"]
    graph.add(*chain(b=""))
    assert ids(graph.topological_order()) == ["b", "a"]


def test_ids_and_values_are_of_one_node():
    graph = chain(a="")
    with pytest.raises(PlanError, match="node a is in the graph already"):
        graph.add(*chain(a=""))
    with pytest.raises(PlanError, match="node b gives a, as a does"):
        graph.add(node("b", NodeType.SAMPLE, "", "fresh a", requests=[1]))
    assert (ids(graph), graph.giver("fresh")) == (["a"], None)
    with pytest.raises(PlanError, match="'b' is no node"):
        graph.add("b")  # type: ignore[arg-type]
    for nodes, message in ((["b"], "'b' is no node"), ([*graph, *graph], "node a is in the graph already")):
        with pytest.raises(PlanError, match=message):
            IRGraph(nodes)
    with pytest.raises(PlanError, match="node b gives a, as a does"):
        IRGraph([*graph, node("b", NodeType.SAMPLE, "", "a", requests=[1])])


@pytest.mark.parametrize("ask", ["predecessors", "successors", "__getitem__"])
def test_unknown_ids(ask: str):
    with pytest.raises(PlanError, match=r"no node 'z' in the graph; it has a, b\."):
        getattr(chain(a="", b=""), ask)("z")


def test_graphs_are_equal_by_content():
    assert chain(a="", b="a") == chain(a="", b="a")
    assert chain(a="", b="") != chain(b="", a="")
    assert chain(a="") != chain(a="x") and chain(a="") != chain() and chain() != 3
    assert IRGraph([node("a", NodeType.SAMPLE, requests=(1, 2))]) == IRGraph([node("a", NodeType.SAMPLE, requests=[1, 2])])
    one, true = (IRGraph([node("a", NodeType.SAMPLE, requests=[1], x=value)]) for value in (1, True))
    assert one != true
    first, other = ({"x": 1, "y": 2}, {"y": 2, "x": 1})
    first, other = (IRGraph([node("a", NodeType.SAMPLE, requests=[1], it=it)]) for it in (first, other))
    assert first == other and first.to_json() == other.to_json()
    with pytest.raises(TypeError, match="unhashable"):
        hash(chain())
    assert repr(chain(a="", b="")) == "IRGraph(2 nodes: a, b)"
