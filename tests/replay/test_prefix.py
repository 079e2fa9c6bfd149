"""Prefix semantics on cases whose numbers were worked out by hand, rule by rule."""

import numpy as np
import pytest

from sagellm.core.errors import CapacityError, PolicyError, TraceError
from sagellm.replay.prefix import PrefixReplay, replay_prefix_reference
from tests.replay.made import flat, replayed
from tests.replay.policies import Foreign, Greedy, Lazy, Nothing, Recency


class Told(Recency):
    """Remembers what it is told and asked."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.events = []

    def on_insert(self, block):
        super().on_insert(block)
        self.events.append(("insert", block.key, block.parent, block.depth, block.time_s))

    def on_hit(self, key, time_s=0.0):
        super().on_hit(key)
        self.events.append(("hit", key, time_s))

    def on_remove(self, key, evicted=True):
        super().on_remove(key)
        self.events.append(("remove", key, evicted))

    def select_victims(self, context):
        self.events.append(("select", context.count, tuple(context.incoming)))
        return super().select_victims(context)


def test_hits_are_leading_blocks():
    counts = replayed(Recency, [[1, 2, 3], [1, 2, 4], [1, 9], [8, 2 + 90]], capacity=20)
    assert counts.hit_blocks.tolist() == [0, 2, 1, 0] and counts.num_evicted == 0


def test_what_a_policy_is_told_and_in_which_order():
    keys, offsets = flat([[1, 2, 3], [1, 2, 4, 5]])
    policy = Told(4)
    replay_prefix_reference(policy, keys, offsets, capacity=4, times_s=np.array([1.5, 2.5]))
    assert policy.events == [
        ("insert", 3, 2, 3, 1.5), ("insert", 2, 1, 2, 1.5), ("insert", 1, None, 1, 1.5),
        ("hit", 2, 2.5), ("hit", 1, 2.5), ("select", 1, (5, 4)), ("remove", 3, True),
        ("insert", 5, 4, 4, 2.5), ("insert", 4, 2, 3, 2.5),
    ]  # fmt: skip


def test_a_block_that_others_continue_stays():
    """3 goes for 4, though 1 and 2 are no newer; then 4 for 3, since 1 and 2 are locked."""
    counts = replayed(Recency, [[1, 2, 3], [4], [1, 2, 3]], capacity=3)
    assert counts.hit_blocks.tolist() == [0, 0, 2] and counts.num_evicted == 2


@pytest.mark.parametrize(("soon", "expected"), [(3, 0), (4, 1), (None, 0)])
def test_evictions_that_came_back_soon(soon, expected):
    """3 is evicted when 4 accesses have been, and inserted when there have been 7."""
    counts = replayed(Recency, [[1, 2, 3], [4], [1, 2, 3]], capacity=3, soon=soon)
    assert counts.num_evicted_soon == expected


def test_oversized_requests_take_part_with_what_fits():
    counts = replayed(Recency, [[1, 2, 3], [1, 2, 3], [1, 2]], capacity=2)
    assert counts.hit_blocks.tolist() == [0, 2, 2] and counts.num_oversized == 2 and counts.num_evicted == 0


def test_the_first_one_ends_when_enough_run():
    """With two at a time [1, 2] has ended when [4] comes, so 2 may go; [3] still runs."""
    counts = replayed(Recency, [[1, 2], [3], [4], [3], [1]], capacity=3, running=2)
    assert counts.hit_blocks.tolist() == [0, 0, 0, 1, 1] and counts.num_evicted == 1


def test_the_first_one_ends_early_where_there_is_no_room():
    """Three may run. [4] finds all locked: [1, 2] ends, 2 goes. [1, 2] finds 1, and [3] ends for the other."""
    counts = replayed(Recency, [[1, 2], [3], [4], [1, 2], [3]], capacity=3, running=3)
    assert counts.hit_blocks.tolist() == [0, 0, 0, 1, 0] and counts.num_evicted == 3


def test_answers_grow_and_their_room_comes_back():
    """A's answer has 2 of 4 blocks when B has come: with 4 blocks it fits. A ends before C, and B has 1 of 2 then."""
    counts = replayed(Recency, [[1], [2], [3]], capacity=4, running=2, outputs=[4, 2, 0])
    assert (counts.num_evicted, counts.num_preempted) == (0, 0)


def test_an_answer_evicts_then_preempts_the_last_one():
    """A wants 2 blocks where 1 is free: B is preempted, 2 goes. B comes again: A ends. C comes: B's answer evicts 1."""
    counts = replayed(Recency, [[1], [2], [3]], capacity=3, running=2, outputs=[4, 2, 0])
    assert (counts.num_evicted, counts.num_preempted) == (2, 1)
    assert (counts.retries, counts.retry_hit_blocks, counts.retry_blocks) == (1, 0, 1)
    assert counts.hit_blocks.tolist() == [0, 0, 0]


def test_an_answer_too_long_for_the_tier_preempts_its_own_request():
    """A wants 5 blocks of 3: B goes, then A. B is admitted again, then A, whose block is still there."""
    counts = replayed(Recency, [[1], [2]], capacity=3, running=2, outputs=[10, 0])
    assert (counts.num_preempted, counts.retries, counts.retry_hit_blocks, counts.retry_blocks) == (2, 2, 1, 2)
    assert counts.num_evicted == 1


def test_a_retry_comes_before_the_next_new_request():
    requests = []

    class Order(Recency):
        def on_request(self, index):
            requests.append(index)

    replayed(Order, [[1], [2], [3]], capacity=3, running=2, outputs=[4, 2, 0])
    assert requests == [0, 1, 1, 2]
    # Three may run. The tier is full when the first answer wants its second block: of the others the last one goes.
    requests.clear()
    replayed(Order, [[1], [2], [3]], capacity=4, running=3, outputs=[3, 0, 0])
    assert requests == [0, 1, 2, 2]


def test_answers_without_the_option_take_no_room():
    assert replayed(Recency, [[1], [2], [3]], capacity=3, running=2).num_preempted == 0


def test_requests_that_preempt_each_other_for_ever_are_an_error():
    with pytest.raises(CapacityError, match="preempt each other without end.*raise the capacity"):
        replayed(Recency, [[1], [2], [3]], capacity=6, running=3, outputs=[4, 4, 4])


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Lazy, "gave 1 of 2 victims though 2 more"), (Foreign, "not on tier"), (Greedy, "held by a request"),
     (Nothing, "gave 0 of 2 victims though 2 more")],
)  # fmt: skip
def test_policies_that_answer_nonsense(kind, words):
    with pytest.raises(PolicyError, match=words):
        replayed(kind, [[1, 2, 3], [4], [5, 6]], capacity=4)


def test_a_key_twice_in_a_request_or_under_two_parents():
    for rows in ([[1, 2, 1]], [[1, 2], [3, 2]]):
        with pytest.raises(TraceError, match="there already"):
            replayed(Recency, rows, capacity=9)


@pytest.mark.parametrize(("capacity", "running"), [(0, 1), (3, 0)])
def test_no_room_or_nobody_running(capacity, running):
    keys, offsets = flat([[1]])
    with pytest.raises(CapacityError, match="at least one"):
        PrefixReplay(Recency(1), keys, offsets, capacity=capacity, running=running)


def test_blocks_carry_tokens_and_tenant():
    seen = []

    class Look(Recency):
        def on_insert(self, block):
            super().on_insert(block)
            seen.append((block.key, block.num_tokens, block.tenant_id))

    keys, offsets = flat([[1], [2]])
    replay_prefix_reference(Look(3), keys, offsets, capacity=3, block_tokens=64, tenants=("red", "blue"))
    assert seen == [(1, 64, "red"), (2, 64, "blue")]


def test_no_requests_and_empty_prompts():
    assert len(replayed(Recency, [], capacity=3).hit_blocks) == 0
    assert replayed(Recency, [[], [1], []], capacity=1).hit_blocks.tolist() == [0, 0, 0]
