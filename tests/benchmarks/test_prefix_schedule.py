"""The comparison of schedulers counts what it says, on requests of which every match is known."""

import itertools

import pytest

from benchmarks.prefix.workload import PrefixWorkload
from benchmarks.scenarios import prefix_schedule

SIZE = 64


@pytest.mark.parametrize("side", prefix_schedule.SIDES)
def test_with_room_for_everything_the_whole_shared_part_is_found(side):
    workload = PrefixWorkload(1, SIZE, num_sequences=60, num_lookups=1)
    scheduler = prefix_schedule.Side(side, workload.num_blocks + 200, SIZE, max_batches=1)
    scheduler.crowd((sequence.tokens for sequence in workload.sequences()), 1, num_new=2)
    assert scheduler.num_asked == workload.num_tokens
    assert scheduler.num_found == sum(sequence.num_cached for sequence in workload.sequences()) * SIZE > 0


def test_more_at_a_time_than_one_find_each_other():
    """With hooks, a request finds what a request of the step before computed. Blocks of the same step are not there yet."""
    (prompt,) = itertools.islice(prefix_schedule.documents(1, SIZE), 1)
    for side, found in (("ours", 1), ("upstream", 0)):
        scheduler = prefix_schedule.Side(side, 400, SIZE, max_batches=2)
        scheduler._add(prompt)
        scheduler._step(is_prefill=True)
        scheduler._add(prompt)
        scheduler._step(is_prefill=True)
        assert scheduler.num_found == found * ((len(prompt) - 1) // SIZE) * SIZE


@pytest.mark.parametrize("kind", ["chats", "documents"])
def test_every_request_that_is_measured_evicts(kind, monkeypatch):
    evicted = []

    class Watched(prefix_schedule.Side):
        def request(self, prompt):
            spent_us = super().request(prompt)
            if self._scheduler.sage is not None:
                evicted.append(self._scheduler.sage.report()["evicted"]["prefix"])
            return spent_us

    monkeypatch.setattr(prefix_schedule, "Side", Watched)
    prompts = getattr(prefix_schedule, kind)(1, SIZE)
    assert min(prefix_schedule.cost_us(prompts, 500, SIZE, num_requests=20)) > 0
    before, *measured = evicted[-21:]
    assert all(later > earlier for earlier, later in itertools.pairwise([before, *measured]))


def test_a_pool_that_cannot_hold_the_requests_is_refused():
    options = prefix_schedule.OPTIONS | {"num_blocks_found": 500}
    with pytest.raises(ValueError, match="num_blocks_found 500; the longest request takes 128, and 8 of them run at a time"):
        prefix_schedule.run(1, **options)
