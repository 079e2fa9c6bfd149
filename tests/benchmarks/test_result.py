"""Tests of the values of a result that count as one observation."""

import numpy as np
import pytest

from benchmarks.result import Result, Run


def result(*runs: tuple[str, int, int, float]) -> Result:
    """Runs as (contestant, launch, round, value of metric x)."""
    return Result(
        name="made-up", status="complete", started="", duration_s=0.0, config={}, environment={}, definitions={},
        runs=[
            Run(contestant=name, scenario="serve", launch=launch, round=number, seed=0, metrics={"x": value})
            for name, launch, number, value in runs
        ],
    )  # fmt: skip


def test_rounds_of_one_launch_count_each():
    table = result(("a", 0, 0, 1.0), ("b", 0, 0, 2.0), ("b", 0, 1, 4.0), ("a", 0, 1, 3.0)).independent("ab", "serve", "x")
    assert table.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_launches_count_as_the_means_of_their_rounds():
    found = result(
        ("a", 0, 0, 1.0), ("b", 0, 0, 10.0), ("a", 0, 1, 3.0), ("b", 0, 1, 20.0), ("a", 1, 2, 5.0), ("b", 1, 2, 30.0)
    )
    means = found.independent(["a", "b"], "serve", "x")
    assert means == pytest.approx(np.array([[3**0.5, 200**0.5], [5.0, 30.0]])), "a rate and its inverse tell the same"
    for run in found.runs:
        run.metrics["x"] -= 1.0
    assert found.independent(["a", "b"], "serve", "x").tolist() == [[1.0, 14.0], [4.0, 29.0]], "0 has no logarithm"


def test_a_round_that_one_contestant_lacks_counts_for_none():
    found = result(("a", 0, 0, 1.0), ("b", 0, 0, 1.0), ("a", 0, 1, 9.0), ("b", 0, 1, 1.0), ("a", 1, 2, 2.0), ("b", 1, 2, 2.0))
    found.runs[3].status = "void"
    assert found.independent(["a", "b"], "serve", "x") == pytest.approx(np.array([[1.0, 1.0], [2.0, 2.0]]))
    found.runs[4].status = "void"
    assert found.independent(["a", "b"], "serve", "x").tolist() == [[1.0, 1.0]]


def test_nothing_in_common_is_an_empty_table():
    table = result(("a", 0, 0, 1.0), ("b", 0, 1, 2.0)).independent(["a", "b"], "serve", "x")
    assert table.shape == (0, 2) and isinstance(table, np.ndarray)
