"""Checks of the options of a plug-in, for every kind, and of names of rows."""

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import TypeVar

from sagellm.core.errors import ConfigError, SageError

__all__ = ["find_row", "option_checks"]
Row = TypeVar("Row")


def find_row(rows: Iterable[Row], name: str, what: str, error: type[SageError] = ConfigError) -> Row:
    """Return the row of a table that has this `name`.

    Args:
        what: kind of row, for the message.

    Raises:
        SageError: of class `error`; the name is unknown.
    """
    found = {row.name: row for row in rows}
    if name not in found:
        raise error(f"unknown {what} {name!r}; known are: {', '.join(found)}.")
    return found[name]


def option_checks(what: str, error: type[SageError]) -> tuple[Callable[..., float], Callable[..., int]]:
    """Return (check_number, check_count) for one kind of plug-in.

    Both take the name of the plug-in, the name of the option, the value, and its inclusive bounds `low` and `high`, by default
    0 and infinity. They return the value as a float or as an int, and raise `error` if it is invalid.
    """

    def check_number(owner: str, option: str, value: object, low: float = 0, high: float = math.inf) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and low <= value <= high):
            bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise error(f"{what} {owner}: option {option}={value!r}; give a number {bounds}.")
        return float(value)

    def check_count(owner: str, option: str, value: object, low: float = 0, high: float = math.inf) -> int:
        number = check_number(owner, option, value, low, high)
        if number != int(number):
            raise error(f"{what} {owner}: option {option}={value!r}; give a whole number.")
        return int(number)

    return check_number, check_count
