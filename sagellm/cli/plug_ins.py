"""What commands for classes that users write have in common: options, tables and the report of a contract suite."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from sagellm.core.contract import ContractReport

__all__ = ["option_defaults", "progress", "read_options", "show_report", "show_rows", "summary_of"]

MAX_SHOWN = 100  # characters of a value in a message


def option_defaults(kind: type) -> dict[str, Any]:
    """The options of a class, with their defaults: what its constructor takes by keyword alone."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {item.name: item.default for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}


def summary_of(kind: type) -> str:
    """What it does, in a sentence."""
    # One class a file here, and the file's first line says what it is; elsewhere the class speaks for itself.
    own = inspect.getmodule(kind) if kind.__module__.startswith("sagellm.") else kind
    return " ".join((inspect.getdoc(own) or "").split("\n\n")[0].split())


def read_options(text: str, example: Mapping[str, Any]) -> dict[str, Any]:
    """Raises click.UsageError: no JSON object."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
        raise click.UsageError(f"--options {shown!r} is not JSON ({error}); for example '{json.dumps(example)}'.") from None
    if not isinstance(options, dict):
        raise click.UsageError(
            f"--options {text!r} is a JSON {type(options).__name__}; give an object of names and values."
        )
    return options


def progress() -> Callable[[str], None] | None:
    """Shows the name of a scenario, on a terminal."""
    if not sys.stderr.isatty():
        return None
    return lambda scenario: click.echo(f"\r\033[Kscenario {scenario} ", nl=False, err=True)


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], as_json: bool) -> None:
    """A table, or JSON. `columns`: heading -> name in a row."""
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(escape(_cell(row[name])) for name in columns.values()))
    Console().print(table)


def show_report(what: str, name: str, report: ContractReport, seed: int, as_json: bool) -> None:
    """Rule by rule. `what` was checked, for JSON."""
    if as_json:
        rules = [{**result._asdict(), "passed": result.passed} for result in report.results]
        document = {what: name, "passed": report.passed, "seed": seed, "rules": rules, "event_us": report.event_us}
        click.echo(json.dumps(document, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rule", "", "finding"):
        table.add_column(column)
    for result in report.results:
        mark = "[green]ok[/]" if result.passed else "[red]broken[/]" if result.seen else "[yellow]not seen[/]"
        table.add_row(result.rule, mark, escape(result.says if result.passed else result.message))
    console = Console()
    console.print(table)
    verdict = "[green]keeps to the contract[/]" if report.passed else "[red]does not keep to the contract[/]"
    console.print(f"{escape(name)} {verdict}; {report.event_us:.1f} us an event, the check's own work included.")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return str(value)
