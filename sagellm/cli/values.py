"""Types of values on the command line that several commands take."""

import math
from typing import Any

import click

__all__ = ["LONGEST_LIMIT_S", "Finite"]

LONGEST_LIMIT_S = 1e9  # 30 years; the timers of a system have their bounds


class Finite(click.FloatRange):
    """A finite number above 0, of at most `most`."""

    def __init__(self, most: float | None = None) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number above 0.", param, context)
        return number
