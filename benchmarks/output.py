"""Output of a benchmark's command: a table, a JSON document, the same figures as CSV."""

import contextlib
import csv
import functools
import io
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.progress import Progress

from benchmarks.machine import describe
from sagellm.core.cached_folder import write_whole
from sagellm.core.errors import SageError

WIDTH = 120


class Output:
    """Where the figures of one run of a command go.

    Args:
        out: JSON file of the result, written with a CSV file beside it; None writes nothing.
        as_json: print the result as JSON instead of tables.
        stream: where it is printed; None: stdout.
    """

    def __init__(self, out: Path | None, as_json: bool, stream: TextIO | None = None) -> None:
        self._out, self._as_json, self._stream = out, as_json, stream
        self._machine = describe()

    def say(self, text: str) -> None:
        """Print a line or a table, unless the result is printed as JSON."""
        if not self._as_json:
            click.echo(text)

    def save(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write what is there so far and return it, with the machine."""
        whole = {"machine": self._machine} | result
        if self._out is not None:
            write_json(self._out, whole)
            write_whole(self._out.with_suffix(".csv"), csv_text(whole))
        return whole

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the whole result, and print it if JSON is asked for."""
        whole = self.save(result)
        if self._as_json:
            click.echo(json_text(whole), nl=False, file=self._stream)


@contextlib.contextmanager
def result_stream(as_json: bool) -> Iterator[TextIO]:
    """Yield the stream that the result is printed to.

    A result in JSON has stdout to itself: what others write there meanwhile, other processes included, goes to stderr. LMDeploy
    writes its log to stdout.
    """
    try:
        number = sys.stdout.fileno() if as_json else None
    except OSError:  # not a file
        number = None
    if number is None:
        yield sys.stdout
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(number), "w") as own:
        os.dup2(sys.stderr.fileno(), number)
        try:
            yield own
        finally:
            sys.stdout.flush()
            os.dup2(own.fileno(), number)


@contextlib.contextmanager
def ends_in_order() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that the servers that it has started end with it."""
    if threading.current_thread() is not threading.main_thread():  # others may set no handler
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def with_output(main: Callable[..., Any]) -> Callable[..., Any]:
    """Add --out and --json to a command, which gets them as `output`."""

    @click.option(
        "--out", type=click.Path(path_type=Path, dir_okay=False),
        help="Write the result as JSON to this file, with a CSV file beside it.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    @functools.wraps(main)
    def command(*args: Any, out: Path | None, as_json: bool, **options: Any) -> Any:
        with ends_in_order(), result_stream(as_json) as stream:
            return main(*args, output=Output(out, as_json, stream), **options)

    return command


def report(
    name: str, compare: Callable[[], dict[str, Any]], markdown: Callable[[dict[str, Any]], str], *, out: Path | None,
    as_json: bool,
) -> dict[str, Any]:  # fmt: skip
    """Print the result of `compare` as Markdown or JSON, and write NAME.json, NAME.csv and NAME.md in the folder `out`.

    Exits with code 2 if it raises SageError or ValueError.
    """
    try:
        result = compare()
    except (SageError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        Output(out / f"{name}.json", as_json=True).save(result)
        (out / f"{name}.md").write_text(markdown(result))
    click.echo(json_text(result) if as_json else markdown(result))
    return result


def measured_on(result: dict[str, Any]) -> str:
    """Return machine, load, versions and seed of a result, for its Markdown."""
    machine, load = result["machine"], result["load"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, load {load['before']:.2f} before and {load['after']:.2f} after; "
        f"Python {machine['python']}; commit {machine['commit']}; seed {result['options']['seed']}"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return aligned columns: the first one to the left, numbers to the right."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = []
    for first, *others in cells:
        padded = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def spread(values: Mapping[str, float], form: str = ".2f") -> str:
    """Return a summary as "median (low-high)"."""
    return f"{values['median']:{form}} ({values['low']:{form}}-{values['high']:{form}})"


def json_text(value: Any) -> str:
    """Return indented JSON of few lines: a list of plain values takes one, and members share a line where they fit."""
    return _json(value, 0) + "\n"


def _json(value: Any, depth: int) -> str:
    is_plain = isinstance(value, list) and not any(isinstance(each, dict | list) for each in value)
    if not value or not isinstance(value, dict | list) or is_plain:
        return json.dumps(value)
    if isinstance(value, dict):
        members = [f"{json.dumps(str(key))}: {_json(each, depth + 1)}" for key, each in value.items()]
    else:
        members = [_json(each, depth + 1) for each in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    if "\n" not in (flat := ", ".join(members)) and len(flat) + depth < WIDTH - 20:
        return left + flat + right
    pad, lines = " " * (depth + 1), [members[0]]
    for last, member in itertools.pairwise(members):
        line = f"{lines[-1]}, {member}"
        if "{" in last + member or "\n" in line or len(line) + depth >= WIDTH:
            lines.append(member)
        else:
            lines[-1] = line
    return f"{left}\n{pad}" + f",\n{pad}".join(lines) + f"\n{' ' * depth}{right}"


def csv_text(result: Mapping[str, Any]) -> str:
    """Return `figure,value` lines, one for each number of a result; a figure is the path to it, joined by dots."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("figure", "value"))
    writer.writerows((path, value) for path, value in _figures("", result) if not path.startswith("machine."))
    return text.getvalue()


def _figures(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _figures(f"{path}.{key}" if path else str(key), each)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _figures(f"{path}.{place}", each)
    elif isinstance(value, int | float):
        yield path, value


def write_json(file: Path, value: Any) -> None:
    write_whole(file, json_text(value))


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield what advances the bar by one. Silent where the error stream is no terminal."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def compact(files: Sequence[Path]) -> None:
    """Rewrite JSON files with the same values in few lines."""
    for file in files:
        write_json(file, json.loads(file.read_text()))


if __name__ == "__main__":  # python -m benchmarks.output FILE...
    compact([Path(name) for name in sys.argv[1:]])
