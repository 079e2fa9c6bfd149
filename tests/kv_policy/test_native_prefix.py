"""The replay of prefixes in C++: what only it reports and refuses. Its rules: `test_native_and_twin`."""

import numpy as np
import pytest

from sagellm import _core
from sagellm.core.errors import CapacityError, PolicyError
from sagellm.kv_policy.eviction.native import NATIVE

ONLINE = [name for name in NATIVE if name != "belady"]


def replay(name: str, capacity: int, rows: list[list[int]], **how):
    offsets = np.cumsum([0] + [len(row) for row in rows])
    keys = np.array([key for row in rows for key in row], np.uint64)
    return _core.replay_prefix(name, capacity, keys, offsets, **how)


def tree_rows(seed: int, num_requests: int, longest: int = 9) -> list[list[int]]:
    """Paths of a random tree in which a few branches are walked often."""
    random = np.random.default_rng(seed)
    numbers: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(num_requests):
        turns = np.minimum(random.geometric(0.45, random.integers(1, longest + 1)), 4).tolist()
        path = [tuple(turns[: end + 1]) for end in range(len(turns))]
        rows.append([numbers.setdefault(one, len(numbers) + 1) for one in path])
    return rows


def test_of_an_oversized_request_the_first_blocks_take_part():
    done = replay("lru", 3, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2]])
    assert done.hit_blocks.tolist() == [0, 3, 2]
    assert (done.num_oversized, done.num_evicted) == (2, 0)


def test_outputs_take_room_and_the_last_one_admitted_gives_way():
    # Admitted together in a tier of 6: [1, 2] with 4 output blocks, half of which it has when [3, 4] comes.
    done = replay("lru", 6, [[1, 2], [3, 4], [5]], running=2, output_blocks=[4, 0, 0])
    assert (done.num_preempted, done.num_evicted) == (0, 0)
    done = replay("lru", 5, [[1, 2], [3, 4], [5]], running=2, output_blocks=[4, 0, 0])
    # 2 + 2 + 2 do not fit: [3, 4] gives way, of which 4 is then evicted; its retry finds 3, and makes [1, 2] end.
    assert done.num_preempted == 1
    assert done.retries.tolist() == [0, 1, 0]
    assert done.retry_blocks.tolist() == [0, 2, 0]
    assert done.retry_hit_blocks.tolist() == [0, 1, 0]
    assert done.hit_blocks.tolist() == [0, 0, 0]
    assert done.hit_blocks.dtype == np.int32 and done.retries.dtype == np.int64
    assert done.num_evicted == 1


def test_requests_that_preempt_each_other_for_good_are_refused():
    with pytest.raises(CapacityError, match="preempt each other for good with capacity 3; give more"):
        replay("lru", 3, [[1, 2, 3], [1, 2, 3]], running=2, output_blocks=[1, 1])


def test_belady_hits_most_on_these_requests():
    """This holds for these requests alone: in prefix mode Belady is a good policy and no bound."""
    rows = tree_rows(3, 400)
    best = replay("belady", 12, rows).hit_blocks.sum()
    assert all(replay(name, 12, rows).hit_blocks.sum() <= best for name in ONLINE)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"offsets": [0, 3]}, "offsets must rise from 0 to the number of keys, 2"),
        ({"offsets": [0, 2, 1, 2]}, "offsets must rise"),
        ({"offsets": []}, "offsets are empty"),
        ({"keys": [1, 1]}, "key 1 of request 0 has another block before it"),
        ({"keys": [1.5, 2.0]}, "keys are of type float64"),
        ({"running": 0}, "running 0; at least 1"),
        ({"capacity": 0}, "capacity 0: a policy needs room"),
        ({"soon": -1}, "soon -1; allowed are 0 and more"),
        ({"output_blocks": [1, 2]}, "output_blocks has 2 values for 1 requests"),
        ({"output_blocks": [-1]}, "output_blocks of request 0 are negative"),
        ({"times_s": [0.0, 1.0]}, "times_s has 2 values for 1 requests"),
        ({"name": "best"}, "'best' is unknown; known are fifo, lru, "),
        ({"options": {"colour": 1}}, "policy lru has no options colour"),
    ],
)
def test_bad_input_is_told(how: dict, words: str):
    given = {"name": "lru", "capacity": 2, "keys": [1, 2], "offsets": [0, 2]} | how
    with pytest.raises(PolicyError, match=words):
        _core.replay_prefix(**given)
