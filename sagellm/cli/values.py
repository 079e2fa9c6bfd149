"""Types of values on the command line that several commands take."""

import math
from typing import Any

import click

__all__ = ["Finite"]


class Finite(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number above 0.", param, context)
        return number
