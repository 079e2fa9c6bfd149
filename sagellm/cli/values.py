"""Parts of the command line that several commands share: finite numbers, options as JSON, and those of an engine."""

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import click

from sagellm.core.devices import device_names
from sagellm.core.errors import SageError

__all__ = [
    "JSON_FLAG", "LONGEST_LIMIT_S", "Bytes", "Counts", "Finite", "answering", "engine_options", "options_by_name",
    "read_options",
]  # fmt: skip

LONGEST_LIMIT_S = 1e9  # 30 years; system timers take no more
JSON_FLAG = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
MAX_SHOWN = 100  # characters of a value in a message


class Finite(click.FloatRange):
    """A finite number above 0, of at most `most`."""

    def __init__(self, most: float | None = None) -> None:
        super().__init__(min=0, min_open=True, max=most)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number above 0.", param, context)
        return number


class Counts(click.ParamType):
    """Whole numbers, separated by commas, in ascending order."""

    name = "INTEGER,..."

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            numbers = [self._least - 1]
        if not all(self._least <= number <= self._most for number in numbers):
            self.fail(f"{value!r}: give whole numbers from {self._least} to {self._most}, such as 1,4,16.", param, context)
        return tuple(sorted(set(numbers)))


class Bytes(click.ParamType):
    """A size: a number with KiB, MiB, GiB, KB, MB or GB behind it."""

    name = "size"
    UNITS: ClassVar = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(self.UNITS)})\s*", str(value))
        if found is None or float(found[1]) == 0:
            self.fail(f"{value!r} is not a size above 0; write 2GiB, or 900 MiB.", param, context)
        return int(float(found[1]) * self.UNITS[found[2]])


def read_options(flag: str, text: str, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a JSON object.

    Raises:
        UsageError: not a JSON object. The message names the flag and shows the example.
    """
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
        raise click.UsageError(f"{flag} {shown!r} is not JSON ({error}); for example '{json.dumps(example)}'.") from None
    if not isinstance(options, dict):
        kind = type(options).__name__
        raise click.UsageError(f"{flag} {text!r} is a JSON {kind}; give a JSON object of names and values.")
    return options


def options_by_name(
    flag: str, text: str | None, names: Sequence[str], example: Mapping[str, Any], plain: Callable[[str], str] = str
) -> dict[str, dict[str, Any]]:
    """Return the options of each name: those in a JSON object for a single name, or in one object for each name.

    Args:
        plain: gives the usual spelling of a name.

    Raises:
        UsageError: not a JSON object, options of an unknown name, or of several names in one object.
    """
    if text is None:
        return {name: {} for name in names}
    given = read_options(flag, text, example)
    if given and all(isinstance(value, dict) for value in given.values()):
        given = {plain(name): value for name, value in given.items()}
        if unknown := sorted(set(given) - set(names)):
            raise click.UsageError(f"{flag} names {', '.join(unknown)}; chosen are {', '.join(names)}.")
        return {name: given.get(name, {}) for name in names}
    if len(set(names)) > 1 and given:
        raise click.UsageError(f"{flag} with several names goes by name: {json.dumps({names[0]: dict(example)})}.")
    return {name: given for name in names}


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the engine that answers: model, device, threads."""
    for option in (
        click.option("--threads", type=click.IntRange(1), help="Compute threads of the CPU device [all cores]."),
        click.option(
            "--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of the engine."
        ),
        click.option("--model", help="Model: name, folder, .gguf file or hub id. Default: smollm2."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Keep what LMDeploy logs out of standard output. Print a SageError, and exit with code 1."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SageError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"error: {error}", err=not as_json)
        sys.exit(1)
