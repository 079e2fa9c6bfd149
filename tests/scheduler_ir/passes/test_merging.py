"""Decode steps of one device become batches, samples of one step one."""

from dataclasses import replace

import pytest

from sagellm.scheduler_ir.passes import PassSettings, check_same_work, merge_decode_steps, merge_samples
from tests.scheduler_ir.passes.parts import decode, graph, ids, prefill, sample

ANY = PassSettings()


def test_independent_steps_become_one():
    before = graph(decode(1, 5), sample(1, 5), decode(2, 9), sample(2, 9), decode(3, 4), sample(3, 4))
    after = merge_decode_steps(before, ANY)
    check_same_work(before, after)
    assert ids(after) == ["d1.5", "s1.5", "s2.9", "s3.4"]
    assert after["d1.5"].config == {"requests": [1, 2, 3]}
    assert after["d1.5"].inputs == ("kv:1:4", "token:1:4", "kv:2:8", "token:2:8", "kv:3:3", "token:3:3")
    assert after["d1.5"].outputs == ("kv:1:5", "logits:1:5", "kv:2:9", "logits:2:9", "kv:3:4", "logits:3:4")
    assert len(before) == 6 and before["d1.5"].config == {"requests": [1]}
    both = merge_samples(after, ANY)
    check_same_work(before, both)
    assert ids(both) == ["d1.5", "s1.5"] and both["s1.5"].config == {"requests": [1, 2, 3]}


@pytest.mark.parametrize(("limit", "batches"), [(1, [1] * 5), (2, [2, 2, 1]), (4, [4, 1]), (5, [5]), (0, [5])])
def test_batches_are_no_larger_than_allowed(limit: int, batches: list[int]):
    before = graph(*[decode(name, 5) for name in range(5)])
    after = merge_decode_steps(before, PassSettings(max_batch_size=limit))
    assert [len(each.config["requests"]) for each in after] == batches
    assert [name for each in after for name in each.config["requests"]] == [0, 1, 2, 3, 4]
    check_same_work(before, after)


def test_a_batch_that_is_one_already_counts_its_requests():
    two = replace(decode(1, 5), config={"requests": [1, 2]})
    after = merge_decode_steps(graph(two, decode(3, 5), decode(4, 5)), PassSettings(max_batch_size=3))
    assert [each.config["requests"] for each in after] == [[1, 2, 3], [4]]


def test_steps_of_two_rounds_are_merged_round_by_round():
    before = graph(decode(1, 5), sample(1, 5), decode(1, 6), decode(2, 7), sample(2, 7), decode(2, 8))
    after = merge_decode_steps(before, ANY)
    check_same_work(before, after)
    assert {each.node_id: each.config["requests"] for each in after} == {
        "d1.5": [1, 2], "s1.5": [1], "d1.6": [1, 2], "s2.7": [2]
    }  # fmt: skip


def test_crosswise_dependence_makes_no_cycle():
    """Were d1.5 put with d2.6 and d2.5 with d1.6, each batch would wait for the other one."""
    before = graph(decode(1, 5), decode(2, 6), decode(2, 5), decode(1, 6))
    after = merge_decode_steps(before, ANY)
    check_same_work(before, after)
    assert [each.config["requests"] for each in after] == [[1, 2], [2, 1]]


def test_a_step_does_not_wait_for_a_prompt_it_has_nothing_to_do_with():
    before = graph(prefill(1, 0, 4, last=True), sample(1, 4), decode(1, 5), decode(2, 5))
    assert merge_decode_steps(before, ANY) is before


@pytest.mark.parametrize(
    "nodes",
    [
        (decode(1, 5, device="a"), decode(2, 5, device="b")),
        (decode(1, 5, reason="x"), decode(2, 5)),
        (decode(1, 5, token_budget=4), decode(2, 5, token_budget=5)),
        (decode(1, 5), replace(decode(1, 5), node_id="again", outputs=("other",))),
        (sample(1, 5), sample(2, 5)),
        (decode(1, 5), decode(1, 6)),
    ],
    ids=["devices", "remarks", "budgets", "one request", "samples", "dependent"],
)
def test_what_stays_apart(nodes: tuple):
    before = graph(*nodes)
    assert merge_decode_steps(before, ANY) is before


def test_remarks_of_a_step_are_the_batchs():
    after = merge_decode_steps(graph(decode(1, 5, phase="engine", why="x"), decode(2, 5, token_budget=7, why="x")), ANY)
    (batch,) = after
    assert batch.config == {"requests": [1, 2], "why": "x", "phase": "engine", "token_budget": 7}


def test_samples_of_different_steps_do_not_wait_for_each_other():
    before = graph(decode(1, 5), decode(2, 5), sample(1, 5), sample(2, 5))
    assert merge_samples(before, ANY) is before
    outside = graph(sample(1, 5), sample(2, 5))  # their steps are not in this graph
    assert merge_samples(outside, ANY) is outside
