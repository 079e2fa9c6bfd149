"""Sparse policies: what they choose, and that the contract finds faults."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.sparsity.base import SparsePolicy, SparseView, TopBlocks, top_blocks
from sagellm.accel.sparsity.contract import RULES, SUITE
from sagellm.accel.sparsity.registry import SPARSITIES, make_sparsity
from sagellm.core.errors import SparsityError


def view(lengths: list[int], keep: list[int], **more) -> SparseView:
    return SparseView(step=0, layer=-1, block_size=16, lengths=np.array(lengths), keep=np.array(keep), **more)


@pytest.mark.parametrize("name", SPARSITIES.names())
def test_policies_keep_to_the_contract(name):
    report = SUITE.prepare(SPARSITIES, name, {})()
    assert report.passed, [result for result in report.results if not result.passed]


def test_streaming_reads_both_ends():
    chosen = make_sparsity("streaming", first=2, last=1).select_blocks(view([200, 5, 64], [6, 1, 4]))
    assert [one.tolist() for one in chosen] == [[0, 1, 9, 10, 11, 12], [0], [0, 1, 2, 3]]


def test_budgets():
    policy = make_sparsity("streaming", share=0.25, min_blocks=4)
    assert [policy.budget(blocks) for blocks in (1, 4, 5, 16, 18, 100)] == [1, 4, 4, 4, 4, 25]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 3), st.integers(1, 3))
def test_the_blocks_of_most_weight(weights, keep, first, last):
    """Of those between both ends none that was left out weighs more than one that was taken."""
    weights = np.array(weights, np.float32)
    keep = min(keep, len(weights))
    chosen = top_blocks(weights, keep, first, last).tolist()
    assert len(chosen) == keep and chosen == sorted(set(chosen)) and chosen[-1] == len(weights) - 1
    ends = {*range(min(first, len(weights))), *range(max(0, len(weights) - last), len(weights))}
    inner, others = set(chosen) - ends, set(range(len(weights))) - ends - set(chosen)
    if inner and others:
        assert ends <= set(chosen) and weights[list(inner)].min() >= weights[list(others)].max()


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"share": 0}, "share is 0"), ({"share": 1.5}, "share is 1.5"), ({"last": 0}, "last at least 1"),
     ({"first": -1}, "first -1"), ({"min_blocks": 1}, "min_blocks at least their sum"), ({"shares": 1}, "unexpected keyword")],
)  # fmt: skip
def test_options_that_are_refused(options, fault):
    with pytest.raises(SparsityError, match=fault):
        make_sparsity("streaming", **options)


def test_an_unknown_policy():
    with pytest.raises(SparsityError, match="unknown sparse policy 'squest'; known are: oracle, quest, random, streaming"):
        make_sparsity("squest")


class WeightsOfAStep(TopBlocks):
    """Wants weights, and chooses once a step."""

    name = "weights-of-a-step"
    weights = "bounds"

    def __init__(self):
        super().__init__()
        self.per = "step"


def test_a_policy_of_no_known_kind():
    with pytest.raises(SparsityError, match="per 'step' and weights 'bounds'"):
        make_sparsity(f"{__name__}:WeightsOfAStep")


class Latest(SparsePolicy):
    name = "latest"

    def select_blocks(self, view):
        return [np.arange(blocks - keep, blocks) for blocks, keep in zip(view.num_blocks, view.keep, strict=True)]


class Repeats(Latest):
    def select_blocks(self, view):
        return [np.maximum(one, one[0] + 1) if len(one) > 1 else one for one in super().select_blocks(view)]


class Foreign(Latest):
    def select_blocks(self, view):
        return [one + 1 for one in super().select_blocks(view)]


class DropsTheLast(Latest):
    def select_blocks(self, view):
        return [one - (one[0] > 0) for one in super().select_blocks(view)]


class TooFew(Latest):
    def select_blocks(self, view):
        return [one[-1:] for one in super().select_blocks(view)]


class ForgetsASequence(Latest):
    def select_blocks(self, view):
        return super().select_blocks(view)[:-1]


class Raises(Latest):
    def select_blocks(self, view):
        return [None][view.step + 1]


class Changes(Latest):
    def select_blocks(self, view):
        chosen = super().select_blocks(view)
        view.lengths[:] = 1
        return chosen


class Guesses(Latest):
    def select_blocks(self, view):
        return [top_blocks(np.random.random(blocks), keep) for blocks, keep in zip(view.num_blocks, view.keep, strict=True)]


class Greedy(Latest):
    def budget(self, num_blocks):
        return num_blocks + 1


class Shrinks(Latest):
    def budget(self, num_blocks):
        return max(1, min(num_blocks, 50 - num_blocks))


class Nameless(Latest):
    name = "x"
    per = "block"


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(Latest, "ends"), (Repeats, "choice"), (Foreign, "choice"), (DropsTheLast, "choice"), (TooFew, "choice"),
     (ForgetsASequence, "choice"), (Raises, "raises_nothing"), (Changes, "changes_nothing"), (Guesses, "deterministic"),
     (Greedy, "budget"), (Shrinks, "budget"), (Nameless, "kind")],
)  # fmt: skip
def test_the_contract_finds_faults(kind, rule):
    broken = {result.rule for result in SUITE.check(kind).results if not result.passed and result.seen}
    assert rule in broken and set(RULES) >= broken
