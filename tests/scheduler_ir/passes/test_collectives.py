"""Neighbouring collectives become one."""

from dataclasses import replace

import pytest

from sagellm.scheduler_ir.passes import PassSettings, check_same_work, fuse_collectives
from tests.scheduler_ir.passes.parts import collective, decode, graph, ids, load


def test_neighbours_become_one():
    before = graph(decode(1, 5), collective("a", "kv:1:5", 10), collective("b", "logits:1:5", 20), collective("c", "x"))
    after = fuse_collectives(before, PassSettings())
    check_same_work(before, after)
    assert ids(after) == ["d1.5", "a"] and after["a"].config == {"op": "all_reduce", "group": "tp", "bytes": 38}
    assert after["a"].inputs == ("kv:1:5", "logits:1:5", "x") and after["a"].outputs == ("a!", "b!", "c!")


@pytest.mark.parametrize(("limit", "sizes"), [(7, [8] * 4), (16, [16, 16]), (31, [24, 8]), (32, [32])])
def test_up_to_a_limit(limit: int, sizes: list[int]):
    before = graph(*[collective(name, name * 2) for name in "abcd"])
    after = fuse_collectives(before, PassSettings(max_collective_bytes=limit))
    assert [each.config["bytes"] for each in after] == sizes
    check_same_work(before, after)


@pytest.mark.parametrize(
    "second",
    [
        collective("b", "a!"),
        collective("b", op="broadcast"),
        collective("b", group="pp"),
        collective("b", device="gpu1"),
        collective("b", root=1),
    ],
    ids=["dependent", "op", "group", "device", "remark"],
)
def test_what_stays_apart(second):
    before = graph(collective("a"), second)
    assert fuse_collectives(before, PassSettings()) is before


def test_ops_whose_layout_goes_by_rank_stay_apart():
    before = graph(collective("a", op="all_gather"), collective("b", op="all_gather"))
    assert fuse_collectives(before, PassSettings()) is before
    assert len(fuse_collectives(before, PassSettings(fusable_ops=frozenset({"all_gather"})))) == 1


def test_neighbours_in_topological_order_not_in_insertion():
    before = graph(collective("b", "kv:1:5"), decode(1, 5), collective("a", "x"))
    after = fuse_collectives(before, PassSettings())
    assert ids(after) == ["d1.5", "b"]  # a stood behind b in topological order, with nothing between
    apart = graph(collective("b"), decode(1, 5), collective("a", "x"))
    assert fuse_collectives(apart, PassSettings()) is apart


def test_dependence_through_others_is_no_neighbourhood():
    before = graph(collective("a"), replace(decode(1, 5), inputs=("a!",)), collective("b", "kv:1:5"))
    assert fuse_collectives(before, PassSettings()) is before


def test_a_load_that_moves_away_leaves_neighbours():
    plan = graph(decode(1, 5), collective("a"), load(2, 0, 4), collective("b"))
    best = plan.optimize(check=True)
    assert ids(best) == ["l2.0", "d1.5", "a"] and best.optimize() == best
