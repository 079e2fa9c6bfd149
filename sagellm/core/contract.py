"""What a contract suite reports, and how its scenarios are run: for any kind of class that users write."""

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["Broke", "ContractReport", "Played", "RuleResult", "Scenario", "playing", "run_scenarios"]

Report = Callable[[str, str], None]


class Broke(Exception):
    """What is checked raised, and it has been reported; the scenario cannot go on."""


class RuleResult(NamedTuple):
    """One rule. `message` is empty where it is kept; `seen`: whether anything happened that could break it."""

    rule: str
    says: str
    message: str
    seen: bool = True

    @property
    def passed(self) -> bool:
        return not self.message


class ContractReport(NamedTuple):
    """What came out for one class. `event_us`: microseconds an event or question, for information."""

    results: tuple[RuleResult, ...]
    event_us: float
    num_events: int

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


class Played(NamedTuple):
    """How many events and questions there were, and the rules that could have been broken."""

    num_events: int
    seen: frozenset[str] | set[str]


class Scenario(NamedTuple):
    """`run` is called with what builds the class, a seed and a report; `is_random`: worth repeating with another seed."""

    run: Callable[[Any, int, Report], Played]
    is_random: bool = False


def _given_options(*arguments: Any, **options: Any) -> bool:
    return bool(options)


def playing(
    make: Callable[..., Any], may_refuse: Callable[..., bool] = _given_options
) -> Callable[[Scenario, int, Report], Played]:
    """How `run_scenarios` plays the scenarios of a class that `make` builds.

    Args:
        may_refuse: called with the arguments of `make`, says whether it may raise; by default where an option is tried. What is
            raised elsewhere breaks the rule `builds` and ends the scenario.
    """

    def play(scenario: Scenario, seed: int, report: Report) -> Played:
        def build(*arguments: Any, **options: Any) -> Any:
            try:
                return make(*arguments, **options)
            except (Exception, SystemExit) as error:
                if may_refuse(*arguments, **options):
                    raise
                wanted = "".join(f" for {argument}" for argument in arguments)
                report("builds", f"it raised {type(error).__name__}: {error}; build it{wanted}.")
                raise Broke from error

        try:
            return scenario.run(build, seed, report)
        except Broke:
            return Played(0, frozenset())

    return play


def run_scenarios(
    rules: Mapping[str, str],
    scenarios: Mapping[str, Scenario],
    play: Callable[[Scenario, int, Report], Played],
    *,
    seed: int,
    rounds: int,
    progress: Callable[[str], None] | None,
    limit_s: float | None,
    only: Collection[str] | None = None,
    what: str = "policy",
    built_rule: str = "builds",
    raise_rule: str = "raises_nothing",
) -> ContractReport:
    """Play every scenario with its seeds. A rule that was never put to the test is not passed.

    Args:
        rules: name -> what it says.
        play: runs one scenario with a seed; its report takes the name of a rule and what was got and what is allowed.
        progress: called with the name of each scenario before it begins.
        limit_s: for one run of a scenario; what takes longer, in Python, is stopped and nothing else is tried. Only in a
            process's main thread, on systems that have signals.
        only: names of the scenarios to play; by default all.
        what: is checked, for messages.
        built_rule, raise_rule: the rules that are broken where nothing can be built, and where there is no end.
    """
    if only is not None:
        scenarios = {name: scenarios[name] for name in only}
    messages: dict[str, str] = {}
    seen: set[str] = set()
    num_events, seconds = 0, 0.0
    try:
        for name, scenario in scenarios.items():
            if progress is not None:
                progress(name)
            for number in range(seed, seed + (rounds if scenario.is_random else 1)):
                start = time.perf_counter()
                with _limit(limit_s):
                    played = play(scenario, number, _reporter(rules, messages, name, number))
                seen |= played.seen
                if scenario.is_random:
                    num_events, seconds = num_events + played.num_events, seconds + time.perf_counter() - start
    except _TimedOut:
        messages.setdefault(raise_rule, f"no end within {limit_s:g} s [scenario {name}, seed {number}]")
    is_built = built_rule not in messages or num_events > 0
    others = "other faults came first" if only is None else "no scenario that was played shows it"
    why = f"not seen: {others}." if is_built else f"not checked: the {what} could not be built."
    results = tuple(
        RuleResult(rule, says, messages.get(rule, "" if rule in seen else why), rule in seen or rule in messages)
        for rule, says in rules.items()
    )
    return ContractReport(results, seconds / num_events * 1e6 if num_events else 0.0, num_events)


def _reporter(rules: Mapping[str, str], messages: dict[str, str], scenario: str, seed: int) -> Report:
    """Keeps the first message of each rule, with what shows it again."""

    def report(rule: str, message: str) -> None:
        assert rule in rules, rule
        messages.setdefault(rule, f"{message} [scenario {scenario}, seed {seed}]")

    return report


class _TimedOut(BaseException):
    """No Exception, so that neither what is checked nor a scenario takes it for one of its own."""


@contextmanager
def _limit(limit_s: float | None) -> Iterator[None]:
    """Raises _TimedOut in what runs longer."""
    if limit_s is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, stop)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # again, should the first be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        signal.signal(signal.SIGALRM, before)
