"""Tables of several commands."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["show_rows"]

WIDEST = 10_000


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], as_json: bool) -> None:
    """Print a table, or JSON. Lines are as long as they need to be, unless they go to a terminal.

    Args:
        columns: heading -> name in a row.
    """
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(row[name])) for name in columns.values()))
    console = Console()
    if not console.is_terminal:  # a program, or a file, wants one line a row
        console.width = WIDEST
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return str(value)
