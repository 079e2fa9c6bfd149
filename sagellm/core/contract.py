"""Contract suites: rules and scenarios that hold for every class of a kind, and the runner that plays them."""

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from sagellm.core.registry import Registry

__all__ = ["Broke", "ContractReport", "Flag", "Played", "RuleResult", "Scenario", "Suite", "play", "run_scenarios"]

Report = Callable[[str, str], None]


class Broke(Exception):
    """The checked object raised. The fault is reported, and the scenario ends."""


class RuleResult(NamedTuple):
    """One rule. `message` is empty if it is kept. `seen`: whether anything happened that could break it."""

    rule: str
    says: str
    message: str
    seen: bool = True

    @property
    def passed(self) -> bool:
        return not self.message


class ContractReport(NamedTuple):
    """Result for one class. `event_us`: microseconds for an event or question, for information."""

    results: tuple[RuleResult, ...]
    event_us: float
    num_events: int

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


class Played(NamedTuple):
    """Number of events and questions, and the rules that could have been broken."""

    num_events: int
    seen: frozenset[str] | set[str]


class Scenario(NamedTuple):
    """`run` takes the builder of the class, a seed and a report. `is_random`: repeat it with other seeds."""

    run: Callable[[Any, int, Report], Played]
    is_random: bool = False


def _given_options(*arguments: Any, **options: Any) -> bool:
    return bool(options)


class Flag(NamedTuple):
    """An option of a suite on the command line. An integer lies from `low` to `high`; a text is one of `choices`."""

    name: str
    default: Any
    help: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()


def play(subject: Any, scenario: Scenario, seed: int, report: Report) -> Played:
    """Run a scenario on a subject. A fault that ends it is in the report already."""
    try:
        return scenario.run(subject, seed, report)
    except Broke:
        return Played(0, frozenset())


@dataclass(frozen=True)
class Suite:
    """The contract of one kind, for classes that are built in this process.

    Attributes:
        what: name of the kind, for messages.
        rules: name of each rule -> what it demands.
        scenarios: what is played, by name.
        example: options to show in error messages.
        trial: positional arguments for the first attempt to build one.
        may_refuse: whether building with these arguments may raise; by default if an option is tried. Elsewhere it breaks the
            rule `builds` and ends the scenario.
        flags: further options of `sagellm check`, handed to `prepare`.
    """

    what: str
    rules: Mapping[str, str]
    scenarios: Mapping[str, Scenario]
    example: Mapping[str, Any] = field(default_factory=dict)
    trial: tuple[Any, ...] = ()
    may_refuse: Callable[..., bool] = _given_options
    flags: tuple[Flag, ...] = ()

    def prepare(self, registry: Registry, name: str, options: dict[str, Any], **flags: Any) -> Callable[..., ContractReport]:
        """Find the class and try its options.

        Args:
            flags: values of `flags`, which choose among classes of the registry.

        Returns:
            `check` for this class: takes `seed`, `rounds`, `progress` and `limit_s`.

        Raises:
            SageError: unknown name, or invalid options. A class of others that cannot be built without options breaks a rule.
        """
        kind = registry.find(name, **flags)
        if options or kind.__module__.startswith("sagellm."):
            registry.make(kind, name, *self.trial, **options)
        return partial(self.check, lambda *arguments, **tried: kind(*arguments, **{**options, **tried}))

    def check(
        self, make: Callable[..., Any], *, seed: int = 0, rounds: int = 3, progress: Callable[[str], None] | None = None,
        limit_s: float | None = None, only: Collection[str] | None = None,
    ) -> ContractReport:  # fmt: skip
        """Check a class against every rule. A rule that was never put to the test is not passed.

        Args:
            make: builds one, with keyword arguments if options are tried; called often.
            seed: the first of `rounds` seeds.
            rounds: repetitions of each random scenario.
            progress: called with the name of each scenario before it begins.
            limit_s: seconds for one run of a scenario, see `run_scenarios`.
            only: names of the scenarios to play; by default all.
        """

        def play_built(scenario: Scenario, number: int, report: Report) -> Played:
            def build(*arguments: Any, **tried: Any) -> Any:
                try:
                    return make(*arguments, **tried)
                except (Exception, SystemExit) as error:
                    if self.may_refuse(*arguments, **tried):
                        raise
                    wanted = "".join(f" for {argument}" for argument in arguments)
                    report("builds", f"it raised {type(error).__name__}: {error}; build it{wanted}.")
                    raise Broke from error

            return play(build, scenario, number, report)

        return run_scenarios(
            self.rules, self.scenarios, play_built, seed=seed, rounds=rounds, progress=progress, limit_s=limit_s, only=only,
            what=self.what,
        )  # fmt: skip


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
        limit_s: seconds for one run of a scenario. A longer run is stopped, if it is in Python, and nothing else is tried. Only
            in a process's main thread, on systems that have signals.
        only: names of the scenarios to play; by default all.
        what: name of the kind, for messages.
        built_rule: the rule that is broken if nothing can be built.
        raise_rule: the rule that is broken if a scenario does not end.
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
    """Keep the first message of each rule, with the scenario and seed that show it again."""

    def report(rule: str, message: str) -> None:
        assert rule in rules, rule
        messages.setdefault(rule, f"{message} [scenario {scenario}, seed {seed}]")

    return report


class _TimedOut(BaseException):
    """Not an Exception, so that neither the checked object nor a scenario catches it."""


@contextmanager
def _limit(limit_s: float | None) -> Iterator[None]:
    """Raise _TimedOut in a block that runs longer."""
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
