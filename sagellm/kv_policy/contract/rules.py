"""The contract of an eviction policy as checks that anybody can run on theirs: `sagellm policy check module:Class`.

Each rule is held against random sequences of events; a rule that is broken says what was got, what is allowed and which seed
shows it again.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.contract.scenarios import SCENARIOS, Played, Scenario
from sagellm.kv_policy.contract.world import PolicyBroke

__all__ = ["RULES", "ContractReport", "RuleResult", "check_policy"]

RULES = {
    "builds": "has a name, can be built for 1 block and for many, and refuses room for none",
    "raises_nothing": "raises in no event and at no question that keeps to the contract",
    "answer": "answers with an EvictionDecision",
    "no_more": "gives no more victims than wanted",
    "on_tier": "gives victims that are on the tier",
    "distinct": "gives no victim twice",
    "unpinned": "gives no victim that a request holds, or that comes before a block which continues it",
    "enough": "gives as many victims as wanted if there are that many",
    "reasons": "gives a reason for each victim",
    "asking": "can be asked again when nothing was removed: choosing a victim does not remove it",
    "bad_events": "refuses, with PolicyError, to insert what is there, and to hit or remove what is not",
    "deterministic": "gives the same victims for the same events",
    "bounded": "holds no more and no more memory however many blocks have come and gone",
}


class RuleResult(NamedTuple):
    """One rule. `message` is empty where the policy keeps to it; `seen`: whether anything happened that could break it."""

    rule: str
    says: str
    message: str
    seen: bool = True

    @property
    def passed(self) -> bool:
        return not self.message


class ContractReport(NamedTuple):
    """What came out for one policy. `event_us`: microseconds an event or question, for information."""

    results: tuple[RuleResult, ...]
    event_us: float
    num_events: int

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def check_policy(
    make: Callable[[int], EvictionPolicy],
    *,
    seed: int = 0,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
    limit_s: float | None = None,
) -> ContractReport:
    """Hold a policy against every rule. One that was never put to the test, because the policy broke others before, is not
    passed.

    Args:
        make: builds a policy for a capacity, with whatever options it needs; called often.
        seed: the first of `rounds` seeds.
        rounds: repetitions of each random scenario.
        progress: called with the name of each scenario before it begins.
        limit_s: for one run of a scenario; a policy that takes longer, in Python, is stopped and nothing else is tried. Only
            in a process's main thread, on systems that have signals.
    """
    messages: dict[str, str] = {}
    seen: set[str] = set()
    num_events, seconds = 0, 0.0
    try:
        for name, scenario in SCENARIOS.items():
            if progress is not None:
                progress(name)
            for number in range(seed, seed + (rounds if scenario.is_random else 1)):
                start = time.perf_counter()
                with _limit(limit_s):
                    played = _run(scenario, name, make, number, messages)
                seen |= played.seen
                if scenario.is_random:
                    num_events, seconds = num_events + played.num_events, seconds + time.perf_counter() - start
    except _TimedOut:
        messages.setdefault("raises_nothing", f"no end within {limit_s:g} s [scenario {name}, seed {number}]")
    is_built = "builds" not in messages or num_events > 0
    why = "not seen: other faults came first." if is_built else "not checked: the policy could not be built."
    results = tuple(
        RuleResult(rule, says, messages.get(rule, "" if rule in seen else why), rule in seen or rule in messages)
        for rule, says in RULES.items()
    )
    return ContractReport(results, seconds / num_events * 1e6 if num_events else 0.0, num_events)


class _TimedOut(BaseException):
    """No Exception, so that neither the policy nor a scenario takes it for one of the policy's."""


@contextmanager
def _limit(limit_s: float | None) -> Iterator[None]:
    """Raises _TimedOut in what runs longer."""
    if limit_s is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, stop)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # again, should the policy swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        signal.signal(signal.SIGALRM, before)


def _run(
    scenario: Scenario, name: str, make: Callable[[int], EvictionPolicy], seed: int, messages: dict[str, str]
) -> Played:
    def report(rule: str, message: str) -> None:
        assert rule in RULES, rule
        messages.setdefault(rule, f"{message} [scenario {name}, seed {seed}]")

    def build(capacity: int) -> EvictionPolicy:
        try:
            return make(capacity)
        except (Exception, SystemExit) as error:
            if capacity > 0:
                report("builds", f"capacity {capacity} raised {type(error).__name__}: {error}; build it.")
                raise PolicyBroke from error
            raise

    try:
        return scenario.run(build, seed, report)
    except PolicyBroke:
        return Played(0, frozenset())
