"""The slowdown that the gate must find: of the size it says, on what ci runs."""

import pytest

from benchmarks import planted_slowdown
from benchmarks.config import preset
from benchmarks.planted_slowdown import Slowdown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[now]; a sleep moves it."""
    now = [100.0]
    monkeypatch.setattr(planted_slowdown.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(planted_slowdown.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_it_sleeps_a_share_of_what_passed(clock: list[float]):
    slow = Slowdown(0.1)
    for _ in range(50):
        clock[0] += 0.006
        slow.schedule(None)
    assert clock[0] - 100.0 == pytest.approx(50 * 0.006 * 1.1)


def test_times_without_requests_are_not_slept_for(clock: list[float]):
    slow = Slowdown(0.1)
    clock[0] += 30.0
    slow.schedule(None)
    assert clock[0] == 130.0


def test_its_preset_is_ci_of_other_contestants():
    planted, ci = preset("planted_slowdown"), preset("ci")
    other = {"name": ci.name, "contestants": ci.contestants, "components": ci.components}
    assert planted.model_copy(update=other) == ci
    assert [side.name for side in planted.contestants] == ["base", "control", "head"]
