"""Every registered policy keeps to the contract, and each planted fault is caught by the rule that it breaks."""

import signal

import pytest

from sagellm.core.errors import PolicyError
from sagellm.kv_policy import (
    CachedBlock,
    EvictionDecision,
    PolicyContext,
    check_decision,
    check_policy,
    find_policy,
    make_policy,
    policy_names,
)  # fmt: skip
from sagellm.kv_policy.contract.rules import RULES
from sagellm.kv_policy.contract.world import World
from sagellm.kv_policy.eviction.lru import Lru
from tests.contract import check_caught, check_kept, check_unbuilt
from tests.kv_policy.bad_policies import BREAKS, FOLLOWS, SHOWN_IN
from tests.sweeps import slow_but

# Belady needs to know its future, which depends on its own decisions; its tests are by hand.
CASES = [
    (name, reference)
    for name in policy_names()
    for reference in (True, False)
    if name != "belady" and (reference or find_policy(name) is not find_policy(name, reference=True))
]


@pytest.mark.parametrize(("name", "reference"), slow_but(CASES, *(case for case in CASES if not case[1])))
def test_every_policy_keeps_to_it(name, reference):
    report = check_policy(lambda capacity: make_policy(name, capacity, reference=reference), rounds=2)
    check_kept(report, RULES)
    assert report.num_events > 1000 and report.event_us > 0


@pytest.mark.parametrize("kind", BREAKS, ids=lambda kind: kind.__name__)
def test_each_fault_breaks_its_rule(kind):
    rule = BREAKS[kind]
    report = check_policy(kind, rounds=1, only=(SHOWN_IN.get(kind) or SHOWN_IN.get(rule, "requests"),))
    check_caught(report, rule, RULES if rule == "builds" else FOLLOWS.get(rule, ()))


def test_what_cannot_be_built_is_not_said_to_be_fine():
    check_unbuilt(check_policy(lambda capacity: 1 / 0, rounds=1), "policy")


class NoInsert(Lru):
    def on_insert(self, block):
        raise SystemExit(5)


class Nameless(Lru):
    name = None


class Endless(Lru):
    def select_victims(self, context):
        while True:
            pass


class Nothing(Lru):
    def select_victims(self, context):
        return EvictionDecision((), "", ())


def test_rules_that_nothing_could_break_are_not_said_to_be_kept():
    report = check_policy(NoInsert, rounds=1)
    states = {result.rule: (result.seen, result.passed) for result in report.results}
    assert not report.passed and states.pop("builds") == (True, True) and states.pop("raises_nothing") == (True, False)
    assert set(states.values()) == {(False, False)}
    states = {result.rule: (result.seen, result.passed) for result in check_policy(Nothing, rounds=1).results}
    assert states["no_more"] == (True, True) and states["enough"] == (True, False) and states["unpinned"] == (False, False)


def test_rules_of_scenarios_that_were_not_played_are_not_said_to_be_kept():
    report = check_policy(Lru, only=("building", "bad_events"))
    assert [result.rule for result in report.results if result.passed] == ["builds", "bad_events"] and not report.passed
    assert {result.message for result in report.results} == {"", "not seen: no scenario that was played shows it."}


def test_a_policy_that_never_ends_is_stopped():
    before = signal.getsignal(signal.SIGALRM)
    check_caught(check_policy(Endless, rounds=1, limit_s=0.2), "raises_nothing", (), "no end within 0.2 s [scenario requests")
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_policy_has_a_name():
    (builds,) = [result for result in check_policy(Nameless, rounds=1).results if not result.passed]
    assert builds.rule == "builds" and "its name is None" in builds.message


@pytest.mark.parametrize("decision", [None, [1], EvictionDecision(("x",), "", ()), EvictionDecision(None, "", ())])
def test_what_is_no_decision_is_said_to_be_none(decision):
    world = World(Lru(4), 4, 0, lambda rule, message: None)
    with pytest.raises(PolicyError, match="return an EvictionDecision|does not hold keys"):
        check_decision(decision, PolicyContext(1, world))


def test_a_seed_shows_the_same_again():
    class Late(Lru):
        """Wrong only at the tenth question of an instance."""

        num_asked = 0

        def select_victims(self, context):
            self.num_asked += 1
            return super().select_victims(context if self.num_asked != 10 else PolicyContext(0, context._blocks))

    first, second, other = (check_policy(Late, seed=seed, rounds=1).results for seed in (3, 3, 4))
    assert first == second and "seed 3" in dict((r.rule, r.message) for r in first)["enough"]
    assert "seed 4" in dict((r.rule, r.message) for r in other)["enough"]


def test_the_world_counts_pins_as_the_contract_does():
    faults = []
    world = World(Lru(8), 8, 0, lambda rule, message: faults.append((rule, message)))
    path = [CachedBlock(1, None, 1), CachedBlock(2, 1, 2), CachedBlock(3, 2, 3)]
    world.admit(path)
    world.admit([path[0], CachedBlock(4, 1, 2)])
    assert [world.num_pins(key) for key in (1, 2, 3, 4)] == [
        4,
        2,
        1,
        1,
    ]  # two requests and two children, one and one, ...
    assert world.num_obtainable() == 0 and world.ask(2) == []
    world.release(0)
    assert world.num_obtainable() == 2 and world.ask(5) == [3, 2] and faults == []
    world.remove(3, evicted=True)
    assert world.num_pins(2) == 0
    with pytest.raises(KeyError):
        world.num_pins(3)


def test_a_context_refuses_what_may_not_go():
    world = World(Lru(4), 4, 0, lambda rule, message: None)
    world.admit([CachedBlock(1, None, 1), CachedBlock(2, 1, 2)])
    context = PolicyContext(2, world)
    with pytest.raises(PolicyError, match="victim 2 is held"):
        context.take(2, "mine")
    world.release(0)
    assert PolicyContext(2, world).take(2, "mine") == 1
