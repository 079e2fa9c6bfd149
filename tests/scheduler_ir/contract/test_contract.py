"""Every strategy keeps to the contract, and each planted fault is caught by the rule that it breaks."""

import gc
import sys
import time

import pytest

from sagellm.core.hooks import ScheduleDecision
from sagellm.scheduler_ir.contract.rules import RULES, check_strategy
from sagellm.scheduler_ir.contract.scenarios import play
from sagellm.scheduler_ir.contract.watch import watched
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.fifo import Fifo
from sagellm.scheduler_ir.strategies.registry import find_strategy, strategy_names
from tests.contract import check_caught, check_kept, check_unbuilt
from tests.scheduler_ir.contract.bad_strategies import BREAKS, FOLLOWS, SHOWN_IN, Drops, Exits, NoBudget, Starves
from tests.sweeps import slow_but


@pytest.mark.parametrize("name", slow_but(strategy_names(), "fifo", "slo_aware", "fair", "aegaeon"))
def test_every_strategy_keeps_to_it(name):
    report = check_strategy(find_strategy(name), rounds=1, seed=5)
    check_kept(report, RULES)
    assert report.num_events > 1000


def test_options_are_passed_on():
    report = check_strategy(lambda **options: find_strategy("slo_aware")(**{"default_ttft_s": 0.2, **options}), rounds=1)
    assert report.passed


@pytest.mark.parametrize("kind", BREAKS, ids=lambda kind: kind.__name__)
def test_each_fault_breaks_its_rule_alone(kind):
    rule = BREAKS[kind]
    report = check_strategy(kind, rounds=1, only=(SHOWN_IN.get(kind) or SHOWN_IN.get(rule, "extremes"),))
    check_caught(report, rule, FOLLOWS.get(kind, ()))
    assert sys.getprofile() is None


def test_what_cannot_be_built_is_not_said_to_be_fine():
    check_unbuilt(check_strategy(lambda **options: 1 / 0, rounds=1), "strategy")


def test_rules_that_nothing_could_break_are_not_said_to_be_kept():
    states = {result.rule: (result.seen, result.passed) for result in check_strategy(Exits, rounds=1).results}
    assert states["raises_nothing"] == (True, False)
    assert states["names_all"] == states["deterministic"] == states["forgets"] == (False, False)


def test_what_others_do_when_garbage_is_collected_is_not_the_strategys():
    read, before = [], gc.get_threshold()
    gc.callbacks.append(tick := lambda phase, info: time.perf_counter())
    gc.set_threshold(1)
    try:
        with watched(read.append):
            kept = [[number] for number in range(100)]
            time.monotonic()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(tick)
    assert read == ["time.monotonic"] and len(kept) == 100 and gc.isenabled()


class Nothing(SchedulingStrategy):
    name = "nothing"

    def decide(self, view):
        return None


def test_to_leave_it_to_the_engine_is_fine():
    assert check_strategy(Nothing, rounds=1).passed


class Endless(Fifo):
    def decide(self, view):
        while view.requests:
            pass
        return ScheduleDecision()


def test_one_that_never_ends_is_stopped():
    check_caught(check_strategy(Endless, rounds=1, limit_s=0.2), "raises_nothing", (), "no end within 0.2 s [scenario extremes")


def test_a_seed_shows_the_same_again():
    first, second, other = (check_strategy(Drops, seed=seed, rounds=1).results for seed in (3, 3, 4))
    assert first == second and len(first) == len(other) == len(RULES)
    assert [result.rule for result in first if not result.passed] == ["names_all"]  # of all scenarios, no other


@pytest.mark.parametrize("seed", [0, 5])
def test_the_scenarios_run_out_of_memory_and_of_places(seed):
    engines = [play(None, seed, num_blocks, lambda rule, message: None) for num_blocks in (8000, 600, 330)]
    assert not any(engine.unfinished for engine in engines) and engines[0].num_preempted == 0
    assert sum(engine.num_preempted for engine in engines) >= 3
    assert all(each.end_s < float("inf") for engine in engines for each in engine.requests.values())


class Seen(Fifo):
    def __init__(self):
        self.in_flight, self.vanished, self.ended = [], set(), set()

    def decide(self, view):
        self.in_flight.append(view.num_in_flight)

    def on_step_end(self, result):
        self.vanished |= {name for name, _ in result.computed} & self.ended

    def on_request_end(self, request_id):
        self.ended.add(request_id)


def test_the_scenarios_cancel_and_hide_what_is_on_the_device():
    strategy = Seen()
    engine = play(strategy, 0, 400, lambda rule, message: None, cancels=True)
    gone = {each.request_id for each in engine.requests.values() if each.is_cancelled}
    assert len(gone) >= 3 and strategy.ended == set(engine.requests)
    assert gone & strategy.vanished and any(strategy.in_flight)  # one was cancelled on the device


@pytest.mark.parametrize("kind", [NoBudget, Starves])
def test_a_fault_that_nobody_put_right_is_reported_too(kind):
    told = []
    play(kind(), 5, 8000, lambda rule, message: told.append((rule, message)))
    assert told[0][0] == {NoBudget: "answer"}.get(kind, "completes") and "strategy fifo: " in told[0][1]
    assert told[-1][0] == "completes" and "are not complete" in told[-1][1]
