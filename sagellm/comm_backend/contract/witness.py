"""Shared part of the scenarios of this package's contracts: tested rules, and what broke them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from sagellm.core.contract import Broke
from sagellm.core.errors import SageError

__all__ = ["Witness"]

SomeWitness = TypeVar("SomeWitness", bound="Witness")

SLACK_S = 2.0  # machines are busy; a fault is off by more


class Witness:
    """Observations of one scenario, in one process or thread of it.

    Attributes:
        refusal: what the contract has raised where it says no more.
    """

    refusal: ClassVar[type[SageError]] = SageError

    def __init__(self) -> None:
        self.reports: list[tuple[str, str]] = []
        self.seen: set[str] = set()
        self.num_operations = 0

    def report(self, rule: str, message: str) -> None:
        self.reports.append((rule, message))

    @contextmanager
    def held(self, rule: str) -> Iterator[None]:
        """The block can break the rule, and any exception does."""
        self.seen.add(rule)
        try:
            yield
            self.num_operations += 1
        except Broke:
            raise
        except (Exception, SystemExit) as error:
            self.report(rule, f"raised {type(error).__name__}: {error}")
            raise Broke from error

    def refused(
        self, rule: str, what: str, call: Callable[[], Any], *kinds: type[SageError], within_s: float = 0.0, names: str = ""
    ) -> None:
        """`call` raises one of `kinds`, by default `refusal`, in time, and says `names`."""
        self.seen.add(rule)
        start = time.monotonic()
        error: BaseException | None = None
        try:
            call()
        except (Exception, SystemExit) as raised:
            error = raised
        taken_s = time.monotonic() - start
        kinds = kinds or (self.refusal,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        if error is None:
            self.report(rule, f"{what} raised nothing; raise {wanted}.")
        elif not isinstance(error, kinds):
            self.report(rule, f"{what} raised {type(error).__name__} ({error}); raise {wanted}.")
        elif names not in str(error):
            self.report(rule, f"{what} raised {type(error).__name__} ({error}); name {names!r}.")
        elif taken_s > within_s + SLACK_S:
            self.report(rule, f"{what} took {taken_s:.1f} s to raise {type(error).__name__}; {within_s:g} s are allowed.")
        self.num_operations += 1

    def play(self: SomeWitness, scenario: Callable[[SomeWitness], None]) -> SomeWitness:
        """An exception of a scenario that is not reported yet is the fault of the checked class."""
        try:
            scenario(self)
        except Broke:
            pass
        except (Exception, SystemExit) as error:
            self.report("builds", f"raised {type(error).__name__}: {error}")
        return self
