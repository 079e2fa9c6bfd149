"""A graph as JSON and back."""

import json
import re

import pytest
from hypothesis import given

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import NodeType
from tests.scheduler_ir.made import graphs, node

GOOD = {"id": "s", "type": "sample", "outputs": ["t"], "config": {"requests": [1]}}


@given(graphs())
def test_nothing_is_lost(graph: IRGraph):
    text = graph.to_json()
    read = IRGraph.from_json(text)
    assert list(read) == list(graph)
    assert read.to_json() == text == IRGraph.from_dict(json.loads(text)).to_json()
    assert read == graph


def test_what_is_written():
    graph = IRGraph([node("s", NodeType.SAMPLE, "a", "b", "gpu0", requests=(1, 2), why="so")])
    written = {"id": "s", "type": "sample", "inputs": ["a"], "outputs": ["b"],
               "config": {"requests": [1, 2], "why": "so"}, "device": "gpu0"}  # fmt: skip
    assert graph.to_dict() == {"format": 1, "nodes": [written]}
    assert IRGraph().to_dict() == {"format": 1, "nodes": []}
    assert json.loads(graph.to_json(indent=2)) == graph.to_dict()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "node n: config.x is nan"),
        ([1, {"y": float("inf")}], "node n: config.x[1].y is inf"),
        ({3: 4}, "node n: config.x has the key 3"),
        ({1}, "node n: config.x is {1}"),
        (b"a", "node n: config.x is b'a'"),
    ],
)
def test_what_json_cannot_say(value: object, message: str):
    graph = IRGraph([node("n", NodeType.SAMPLE, requests=[1], x=value)])
    with pytest.raises(PlanError, match=re.escape(message)):
        graph.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is no JSON"),
        ("{", "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        ("[]", "this is no graph; give an object with `format` and a list `nodes`"),
        ('{"format": 1, "nodes": {}}', "this is no graph"),
        ('{"nodes": []}', "the graph has format None; this version reads 1"),
        ('{"format": 2, "nodes": []}', "the graph has format 2; this version reads 1"),
        ('{"format": true, "nodes": []}', "the graph has format True"),
        ('{"format": 1, "nodes": [], "edges": []}', "the graph has edges; allowed are format, nodes"),
    ],
)
def test_texts_that_are_no_graph(text: str, message: str):
    with pytest.raises(PlanError, match=re.escape(message)):
        IRGraph.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "dream"}, "node s: unknown type 'dream'; known are prefix_fetch"),
        ({"type": None}, "node s: type is None"),
        ({"type": ["sample"]}, "node s: type is ['sample']"),
        ({"id": 7}, "node number 0: id is 7"),
        ({"id": ""}, "node id ''"),
        ({"inputs": "t"}, "node s: inputs is 't'; give a list of names"),
        ({"outputs": [1]}, "node s: outputs is [1]; every name must be a text"),
        ({"inputs": ["a", "a"]}, "node s: inputs ['a', 'a']; give distinct names"),
        ({"config": []}, "node s: config is []; give an object"),
        ({"config": {}}, "node s: requests is None"),
        ({"config": {"requests": [1], "x": float("nan")}}, "node s: config.x is nan"),
        ({"device": 0}, "node s: device is 0"),
        ({"colour": "red", "size": 1}, "node s has colour, size; allowed are id, type, inputs"),
    ],
)
def test_a_bad_node_is_named(change: dict[str, object], message: str):
    with pytest.raises(PlanError, match=re.escape(message)):
        IRGraph.from_json(json.dumps({"format": 1, "nodes": [GOOD | change]}))


def test_nodes_that_are_none():
    for bad, message in ((3, "node number 1 is 3"), ({"id": "x"}, "node x has no type"), ({}, "has no id and no type")):
        with pytest.raises(PlanError, match=message):
            IRGraph.from_dict({"format": 1, "nodes": [GOOD, bad]})
    with pytest.raises(PlanError, match="node s is in the graph already"):
        IRGraph.from_dict({"format": 1, "nodes": [GOOD, GOOD]})
    with pytest.raises(PlanError, match="node r gives t, as s does"):
        IRGraph.from_dict({"format": 1, "nodes": [GOOD, GOOD | {"id": "r"}]})
