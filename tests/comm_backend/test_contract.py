"""Every backend that works here keeps to the contract, and each planted fault is caught by the rule that it breaks."""

import pytest

from sagellm.comm_backend.contract import faults, scenarios, seat, witness
from sagellm.comm_backend.contract.rules import PLAYS, RULES, check_backend
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.comm_backend.registry import backend_names, find_backend
from tests.comm_backend.bad_backends import BREAKS, FOLLOWS
from tests.contract import broken, check_caught, check_kept

HERE = [name for name in backend_names() if not find_backend(name).missing()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", HERE)
def test_every_backend_keeps_to_it(name, world_size):
    report = check_backend(find_backend(name), world_size=world_size, seed=world_size)
    check_kept(report, RULES)
    assert report.num_events > 40 and report.event_us > 0


# Faults that show after seconds of waiting, which are fewer here. All others keep the contract's own deadlines, which a busy
# machine does not miss.
WAITED_FOR = ("AnyRank", "LooksAround", "NeverCompleted", "Late", "Mended")


@pytest.fixture
def in_a_hurry(kind, monkeypatch):
    if kind.__name__ in WAITED_FOR:
        monkeypatch.setattr(seat, "GROUP_S", 3.0)
    if kind.__name__ == "NeverCompleted":
        monkeypatch.setattr(scenarios, "GROUP_S", 0.5)
    if kind.__name__ in ("Late", "Mended"):  # off by a second or two
        monkeypatch.setattr(witness, "SLACK_S", 0.8)


@pytest.mark.parametrize("kind", BREAKS, ids=lambda kind: kind.__name__)
def test_each_fault_breaks_its_rule(kind, in_a_hurry):
    rule, play = BREAKS[kind]
    plays = {name: PLAYS[name] for name in ("joining", play) if name}
    report = check_backend(kind, limit_s=8.0 if kind.__name__ == "Hangs" else 20.0, plays=plays)
    check_caught(report, rule, FOLLOWS.get(kind, ()), f"[scenario {play or 'joining'}, seed 0]")
    assert rule in COMPARED or "of 3: " in broken(report)[rule]


COMPARED = ("same_bits", "barrier", "ends")  # seen from outside


def test_every_rule_is_broken_by_a_fault():
    assert {rule for rule, _ in BREAKS.values()} == set(RULES)


def test_what_cannot_be_built_is_not_said_to_be_fine():
    (unbuilt,) = [kind for kind in BREAKS if kind.__name__ == "Unbuilt"]
    report = check_backend(unbuilt)
    assert list(broken(report)) == ["builds"] and "RuntimeError: no" in broken(report)["builds"]
    assert {r.message for r in report.results if not r.seen} == {"not checked: the backend could not be built."}


def test_a_class_that_processes_cannot_import_is_refused_in_words():
    class Local(find_backend("gloo")):
        pass

    assert "define the class in a module" in broken(check_backend(Local))["builds"]


def test_what_was_not_played_is_not_passed():
    report = check_backend(MemoryBackend, plays={"joining": PLAYS["joining"]})
    states = {result.rule: (result.seen, result.passed) for result in report.results}
    assert states["builds"] == (True, True) and states["deadline"] == (False, False) and not report.passed


def test_scenarios_are_all_there():
    parts = [*scenarios.__all__, *faults.__all__]
    assert sorted(PLAYS) == sorted(parts)
