"""What a comparison's command prints and writes, and its bar of progress."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from sagellm.core.errors import SageError


def report(
    name: str, compare: Callable[[], dict[str, Any]], markdown: Callable[[dict[str, Any]], str], *, out: Path | None,
    as_json: bool,
) -> dict[str, Any]:  # fmt: skip
    """The result of `compare`, printed as a table or as JSON, and written to NAME.json and NAME.md in the folder `out`.

    Exits with code 2 where it raises SageError or ValueError.
    """
    try:
        result = compare()
    except (SageError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    text = json.dumps(result, indent=1)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(text + "\n")
        (out / f"{name}.md").write_text(markdown(result))
    click.echo(text if as_json else markdown(result))
    return result


def measured_on(result: dict[str, Any]) -> str:
    """Machine, load, versions and seed of a result, for its Markdown."""
    machine, load = result["machine"], result["load"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, load {load['before']:.2f} before and {load['after']:.2f} after; "
        f"Python {machine['python']}; commit {machine['commit']}; seed {result['options']['seed']}"
    )


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what advances the bar by one. Silent where the error stream is no terminal."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)
