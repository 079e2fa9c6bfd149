"""Tests of the differences between two graphs."""

import json

from hypothesis import given

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import NodeType
from tests.scheduler_ir.made import chain, graphs, node


def test_equal_graphs_do_not_differ():
    diff = chain(a="", b="a").diff(chain(a="", b="a"))
    assert not diff and str(diff) == "no difference"


def test_a_difference_for_a_person_and_for_a_program():
    before = IRGraph([
        node("gone", NodeType.SAMPLE, requests=[1]),
        node("same", NodeType.SAMPLE, requests=[2]),
        node("kept", NodeType.PREFILL_CHUNK, "a", "b", request=3, start=0, tokens=9, why="x"),
    ])  # fmt: skip
    after = IRGraph([
        node("kept", NodeType.PREFILL_CHUNK, "a c", "b", "gpu1", request=3, start=4, tokens=9, remark=None),
        node("same", NodeType.SAMPLE, requests=(2,)),
        node("new", NodeType.DECODE_STEP, device="gpu0", requests=[5]),
    ])  # fmt: skip
    diff = before.diff(after)
    assert [each.node_id for each in diff.added] == ["new"] and [each.node_id for each in diff.removed] == ["gone"]
    (change,) = diff.changed
    assert (change.node_id, dict(change.fields)) == ("kept", {
        "inputs": (["a"], ["a", "c"]), "config.start": (0, 4), "config.why": ("x", None), "device": (None, "gpu1"),
        "config.remark": (None, None),
    })  # fmt: skip
    assert diff.reordered == ("kept", "same")
    assert str(diff).splitlines() == [
        "- gone (sample): requests [1]",
        "+ new (decode_step on gpu0): requests [5]",
        "~ kept: inputs ['a'] -> ['a', 'c'], config.start 0 -> 4, config.why 'x' -> None, device None -> 'gpu1', "
        "config.remark None -> None",
        "order: kept, same",
    ]
    assert json.loads(json.dumps(diff.to_dict())) == diff.to_dict()
    assert diff.to_dict()["changed"][0]["fields"]["config.start"] == [0, 4]


@given(graphs(), graphs())
def test_graphs_differ_unless_they_are_written_alike(one: IRGraph, other: IRGraph):
    assert (not one.diff(other)) == (one.to_json() == other.to_json()) == (one == other)
    there, back = one.diff(other), other.diff(one)
    assert (there.added, there.removed) == (back.removed, back.added)
    assert not one.diff(IRGraph(one))
