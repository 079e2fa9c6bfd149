"""Prefills longer than a step's budget are cut."""

import pytest

from sagellm.scheduler_ir.passes import PassSettings, check_same_work, chunk_prefills
from tests.scheduler_ir.passes.parts import fetch, graph, ids, load, prefill, sample


def test_a_long_prompt_is_cut():
    before = graph(prefill(1, 4, 29, last=True, phase="engine", why="long"), sample(1, 29), prefill(2, 0, 10))
    after = chunk_prefills(before, PassSettings(token_budget=10))
    check_same_work(before, after)
    assert ids(after) == ["p1.4", "p1.4+10", "p1.4+20", "s1.29", "p2.0"]
    pieces = [after[name] for name in ids(after)[:3]]
    assert [each.inputs for each in pieces] == [("kv:1:4",), ("kv:1:14",), ("kv:1:24",)]
    assert [each.outputs for each in pieces] == [("kv:1:14",), ("kv:1:24",), ("kv:1:29", "logits:1:29")]
    rest = {"request": 1, "why": "long", "token_budget": 10}
    assert [each.config for each in pieces] == [
        {"start": 4, "tokens": 10, "phase": "engine"} | rest, {"start": 14, "tokens": 10} | rest,
        {"start": 24, "tokens": 5} | rest,
    ]  # fmt: skip
    assert after["p2.0"] is before["p2.0"]


def test_a_smaller_budget_stays():
    after = chunk_prefills(graph(prefill(1, 0, 12, token_budget=3)), PassSettings(token_budget=6))
    assert [each.config["token_budget"] for each in after] == [3, 3]


@pytest.mark.parametrize("budget", [0, 25, 26])
def test_nothing_to_cut(budget: int):
    before = graph(prefill(1, 0, 25))
    assert chunk_prefills(before, PassSettings(token_budget=budget)) is before


def test_names_that_are_taken_leave_it_whole():
    settings = PassSettings(token_budget=10)
    before = graph(fetch(1, 10), prefill(1, 0, 25))
    assert chunk_prefills(before, settings) is before
    before = graph(load(1, 0, 20), prefill(1, 0, 25), fetch(2, 3))
    assert chunk_prefills(before, settings) is before
