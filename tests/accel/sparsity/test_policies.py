"""Sparse policies: what they choose, and that the contract finds faults."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.sparsity.base import DropView, PromptView, SparsePolicy, SparseView, TopBlocks, top_blocks
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


def test_a_policy_of_prompts_and_drops_keeps_to_the_contract():
    assert SUITE.check(Recent).passed


def test_a_shape_reads_both_ends_of_what_lies_before_a_tile():
    prompts = PromptView(0, 16, np.array([0, 0, 0]), np.array([0, 3, 9]), np.array([2, 5, 11]), np.array([0, 3, 4]))
    chosen = make_sparsity("a_shape", first=1).select_prompt_blocks(prompts)
    assert [one.tolist() for one in chosen] == [[], [0, 1, 2], [0, 6, 7, 8]]


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_the_blocks_of_least_weight_are_given_up(name):
    positions, weights = np.array([0, 1, 4, 5, 6, 9]), np.array([[0, 3, 1, 0, 2, 0], [0, 0, 1, 0, 1, 0]], np.float32)
    after = DropView(16, np.array([150]), [positions], [weights], np.array([1]), np.array([4]), first=1, last=1)
    (lost,) = make_sparsity(name, first=1, last=1, min_blocks=4).drop_blocks(after)
    assert lost.tolist() == [2, 3]  # numbers in `positions`: 0 and 5 are the ends, 1 and 4 weigh most
    assert after.ages[0].tolist() == [134, 118, 70, 54, 38, 0]
    held = replace(after, held=np.array([3]))
    assert make_sparsity(name, first=1, last=1, min_blocks=4).drop_blocks(held)[0].tolist() == [3, 4]


def test_budgets():
    policy = make_sparsity("streaming", share=0.25, min_blocks=4)
    assert [policy.budget(blocks) for blocks in (1, 4, 5, 16, 18, 100)] == [1, 4, 4, 4, 4, 25]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 3), st.integers(1, 3))
def test_the_blocks_of_most_weight(weights, keep, first, last):
    """Between both ends, no block that was left out weighs more than one that was taken."""
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
    with pytest.raises(SparsityError, match="unknown sparse policy 'squest'; known are: a_shape, h2o, oracle, quest"):
        make_sparsity("squest")


class WeightsOfAStep(TopBlocks):
    """Wants weights, and chooses once a step."""

    name = "weights-of-a-step"
    weights = "bounds"

    def __init__(self):
        super().__init__()
        self.per = "step"


class SummariesOfAStep(WeightsOfAStep):
    weights = ""
    summaries = ("means",)


class UnknownSummaries(TopBlocks):
    name = "unknown-summaries"
    summaries = ("medians",)


@pytest.mark.parametrize(
    ("policy", "fault"),
    [("WeightsOfAStep", "per 'step' and weights 'bounds'"), ("SummariesOfAStep", "per 'step' and summaries"),
     ("UnknownSummaries", "give 'bounds', 'means'")],
)  # fmt: skip
def test_a_policy_of_no_known_kind(policy, fault):
    with pytest.raises(SparsityError, match=fault):
        make_sparsity(f"{__name__}:{policy}")


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


class AsksNothing(SparsePolicy):
    name = "asks-nothing"


class Recent(SparsePolicy):
    """Prompts read the latest blocks, and sequences keep them."""

    name = "recent"

    def select_prompt_blocks(self, view):
        return [np.arange(before - keep, before) for before, keep in zip(view.before, view.keep, strict=True)]

    def drop_blocks(self, view):
        rows = zip(view.held.tolist(), view.positions, view.keep.tolist(), strict=True)
        return [np.arange(max(held, self.first), max(held, self.first, len(blocks) - keep)) for held, blocks, keep in rows]


class ReadsItsOwn(Recent):
    def select_prompt_blocks(self, view):
        return [np.r_[one, before] for one, before in zip(super().select_prompt_blocks(view), view.before, strict=True)]


class GivesUpTheLast(Recent):
    def drop_blocks(self, view):
        return [np.array([len(blocks) - 1]) for blocks in view.positions]


class GivesUpTheHeld(Recent):
    def drop_blocks(self, view):
        return [np.arange(len(blocks) - 1)[:1] for blocks in view.positions]


class GivesUpTheFirst(Recent):
    def drop_blocks(self, view):
        return [np.arange(held, len(blocks) - 1)[:1] for held, blocks in zip(view.held, view.positions, strict=True)]


class ChangesWeights(Recent):
    observed = 4

    def drop_blocks(self, view):
        for weights in view.weights:
            weights[:] = 0
        return super().drop_blocks(view)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(Latest, "ends"), (Repeats, "choice"), (Foreign, "choice"), (DropsTheLast, "choice"), (TooFew, "choice"),
     (ForgetsASequence, "choice"), (Raises, "raises_nothing"), (Changes, "changes_nothing"), (Guesses, "deterministic"),
     (Greedy, "budget"), (Shrinks, "budget"), (Nameless, "kind"), (AsksNothing, "kind"), (ReadsItsOwn, "choice"),
     (GivesUpTheLast, "drops"), (GivesUpTheHeld, "drops"), (GivesUpTheFirst, "ends"), (ChangesWeights, "changes_nothing")],
)  # fmt: skip
def test_the_contract_finds_faults(kind, rule):
    broken = {result.rule for result in SUITE.check(kind).results if not result.passed and result.seen}
    assert rule in broken and set(RULES) >= broken
