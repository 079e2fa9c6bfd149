"""Whether halves pay, decided from the times of steps, alike on all ranks."""

import random

import pytest

from sagellm.comm_backend.overlap_window import LEAST_SHARE, LOOKS, TRIALS, OverlapWindow

SORT = ("decode", 8)


class Ranks:
    """Windows of two ranks whose clocks differ, in lockstep."""

    def __init__(self):
        self.told = []  # by rank 0, for rank 1
        self.windows = [OverlapWindow(self.tell), OverlapWindow(self.hear)]

    def tell(self, number):
        self.told.append(number)
        return number

    def hear(self, _):
        return self.told[-1]

    def steps(self, seconds, share, count=LOOKS + 2 * TRIALS):
        """Run steps. `seconds`: by pieces, of rank 0; rank 1 has times of its own. Returns the pieces of each."""
        draw, found = random.Random(1), []
        for _ in range(count):
            pieces = {window.pieces(SORT) for window in self.windows}
            assert len(pieces) == 1, "ranks computed the step in different ways"
            found += pieces
            for rank, window in enumerate(self.windows):
                if window.is_open(SORT):
                    taken = seconds[found[-1]] if rank == 0 else draw.random() + 0.1
                    window.note(SORT, found[-1], taken, share * taken)
        return found


@pytest.mark.parametrize("halves_s, verdict", [(0.9, 2), (0.99, 1), (1.2, 1)])
def test_the_quicker_way_is_taken(halves_s, verdict):
    ranks = Ranks()
    assert ranks.steps({1: 1.0, 2: halves_s}, share=0.3) == [1] * LOOKS + [2, 1] * TRIALS
    assert ranks.steps({1: 1.0, 2: halves_s}, share=0.3, count=5) == [verdict] * 5
    (row,) = ranks.windows[0].report()
    assert row == {"sort": SORT, "share": pytest.approx(0.3), "halves_over_whole": pytest.approx(halves_s), "pieces": verdict}
    assert ranks.windows[1].report() == [row] and len(ranks.told) == 2


def test_steps_without_long_waits_are_never_halved():
    ranks = Ranks()
    assert set(ranks.steps({1: 1.0, 2: 0.1}, share=0.9 * LEAST_SHARE, count=50)) == {1}
    assert not ranks.windows[0].is_open(SORT) and len(ranks.told) == 1
    assert ranks.windows[0].report()[0]["halves_over_whole"] is None


def test_sorts_are_judged_apart_and_drift_does_not_decide():
    window, seconds = OverlapWindow(float), 1.0
    while window.is_open(SORT):
        pieces = window.pieces(SORT)
        window.note(SORT, pieces, seconds * (0.8 if pieces == 2 else 1), 0.3 * seconds)
        seconds *= 1.05  # others begin to work on the machine
    assert window.pieces(SORT) == 2
    assert window.pieces(("prompt", 8)) == 1 and window.is_open(("prompt", 8))
