"""What the commands have in common that hold a class against a contract."""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from sagellm.cli.plug_ins import show_report
from sagellm.cli.values import LONGEST_LIMIT_S, Finite
from sagellm.core.contract import ContractReport

__all__ = ["check_options", "conclude"]


def check_options(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument NAME, and `--options`, `--seed`, `--rounds`, `--limit-s` and `--json`. `what` is checked, for the help."""
    decorators = (
        click.argument("name"),
        click.option("--options", default="{}", metavar="JSON", help=f"The {what}'s options, a JSON object."),
        click.option(
            "--seed", type=click.IntRange(0), default=0, show_default=True, help="The first seed of the random scenarios."
        ),
        click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Seeds to try."),
        click.option(
            "--limit-s", type=Finite(LONGEST_LIMIT_S), default=60.0, show_default=True,
            help=f"Seconds for a scenario; a {what} that takes longer has failed.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    )  # fmt: skip

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def conclude(what: str, name: str, report: ContractReport, seed: int, as_json: bool) -> NoReturn:
    """Show the report, and end with 0 where all rules are kept, else 1."""
    show_report(what, name, report, seed, as_json)
    sys.exit(0 if report.passed else 1)
