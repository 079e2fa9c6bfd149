"""`sagellm list` and `sagellm check` for every kind of plug-in, and their older spellings, built from `core.kinds`."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import Any

import click

from sagellm.cli.lazy import LazyGroup, at
from sagellm.cli.tables import show_rows
from sagellm.cli.values import JSON_FLAG, LONGEST_LIMIT_S, Finite, read_options
from sagellm.core.contract import ContractReport, Flag
from sagellm.core.current_folder import look_in_current_folder
from sagellm.core.errors import SageError
from sagellm.core.kinds import KINDS, Kind

__all__ = ["check", "comm", "list_kinds", "old_commands", "policy", "strategy"]

COLUMNS = {"native": "native", "options": "options", "tensors on": "devices", "here": "here", "what it does": "summary"}


class _ListGroup(LazyGroup):
    """Without a kind it shows the table of kinds."""

    def __init__(self) -> None:
        commands = {kind.name: (partial(_list_command, kind), f"List every known {kind.what}.") for kind in KINDS}
        super().__init__(commands, name="list", callback=_list_kinds, invoke_without_command=True)
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."))
        self.help = "List the kinds of plug-ins, or the known plug-ins of one KIND."


def _list_kinds(as_json: bool) -> None:
    if click.get_current_context().invoked_subcommand is None:
        rows = [{field: getattr(kind, field) for field in ("name", "what", "base", "example", "docs")} for kind in KINDS]
        show_rows(rows, {"kind": "name", "what": "what", "base class": "base", "page": "docs"}, as_json)


def _list_command(kind: Kind) -> click.Command:
    def command(as_json: bool) -> None:
        registry = kind.load("registry")
        rows = [{"name": name, kind.key: name, **registry.describe(name)} for name in registry.names()]
        shown = {kind.name: "name", **{title: field for title, field in COLUMNS.items() if any(row.get(field) for row in rows)}}
        if all(row["here"] == "yes" for row in rows):
            shown.pop("here", None)
        show_rows(rows, shown, as_json)

    text = f"List every known {kind.what}: its options, and what it does in a sentence."
    return JSON_FLAG(click.command(kind.name, help=text)(command))


def _check_command(kind: Kind) -> click.Command:
    suite = kind.load("suite")

    def command(
        name: str, options: str, seed: int, rounds: int, limit_s: float, as_json: bool, **flags: Any
    ) -> None:
        look_in_current_folder()
        given = read_options("--options", options, suite.example)
        # LMDeploy logs to standard output, where a program reads the document.
        aside = redirect_stdout(sys.stderr) if as_json else nullcontext()
        try:
            with aside:
                run = suite.prepare(kind.load("registry"), name, given, **flags)
        except SageError as error:
            raise click.UsageError(str(error)) from None
        try:
            with aside:
                report = run(seed=seed, rounds=rounds, progress=_progress(), limit_s=limit_s)
        except SageError as error:
            raise click.ClickException(str(error)) from None
        _show_report(kind, name, report, seed, as_json)
        sys.exit(0 if report.passed else 1)

    parameters = (
        click.argument("name"),
        click.option("--options", default="{}", metavar="JSON", help=f"Options of the {kind.what}, a JSON object."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="First seed of random scenarios."),
        click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Number of seeds to try."),
        click.option(
            "--limit-s", type=Finite(LONGEST_LIMIT_S), default=60.0, show_default=True,
            help="Seconds for one scenario; a scenario that takes longer fails.",
        ),
        *(_option(flag) for flag in suite.flags),
        JSON_FLAG,
    )  # fmt: skip
    for parameter in reversed(parameters):
        command = parameter(command)
    text = f"""Check one {kind.what}, NAME or module:Class, against every rule of its contract.

    Modules in the current folder are found too. Exit code 0: every rule is kept; 1: a rule is broken or was not tested;
    2: invalid NAME or options. See {kind.docs}.
    """
    return click.command(kind.name, help=text)(command)


def _option(flag: Flag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    name = f"--{flag.name}"
    if isinstance(flag.default, bool):
        names = f"{name}/--no-{flag.name}" if flag.default else name
        return click.option(names, default=flag.default, is_flag=True, show_default=flag.default, help=flag.help)
    kind = click.Choice(flag.choices) if flag.choices else click.IntRange(flag.low, flag.high)
    return click.option(name, type=kind, default=flag.default, show_default=True, help=flag.help)


def _progress() -> Callable[[str], None] | None:
    """Return a function that shows the name of a scenario on a terminal."""
    if not sys.stderr.isatty():
        return None
    return lambda scenario: click.echo(f"\r\033[Kscenario {scenario} ", nl=False, err=True)


def _show_report(kind: Kind, name: str, report: ContractReport, seed: int, as_json: bool) -> None:
    if as_json:
        rules = [{**result._asdict(), "passed": result.passed} for result in report.results]
        document = {"kind": kind.name, "name": name, kind.key: name, "passed": report.passed, "seed": seed, "rules": rules,
                    "event_us": report.event_us}  # fmt: skip
        click.echo(json.dumps(document, indent=1))
        return
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rule", "", "finding"):
        table.add_column(column)
    for result in report.results:
        mark = "[green]ok[/]" if result.passed else "[red]broken[/]" if result.seen else "[yellow]not seen[/]"
        table.add_row(result.rule, mark, escape(result.says if result.passed else result.message))
    console = Console()
    console.print(table)
    verdict = "[green]keeps to the contract[/]" if report.passed else "[red]does not keep to the contract[/]"
    cost = f"; {report.event_us:.1f} us an event, the check's own work included" if report.event_us else ""
    console.print(f"{escape(name)} {verdict}{cost}.")


def old_commands(group: str) -> dict[str, tuple[Callable[[], click.Command], str]]:
    """Return the commands of an older spelling, such as `policy` with `list` and `check`: name -> (loader, help line)."""
    found = {}
    for kind in KINDS:
        for old, make, verb in ((kind.old_list, _list_command, "list"), (kind.old_check, _check_command, "check")):
            if old is not None and old[0] == group:
                found[old[1]] = partial(make, kind), f"Same as `sagellm {verb} {kind.name}`."
    return found


list_kinds = _ListGroup()
check = LazyGroup(
    {kind.name: (partial(_check_command, kind), f"Check one {kind.what} against its contract.") for kind in KINDS},
    name="check", help="Check a plug-in of one KIND, by name or as module:Class, against every rule of its contract.",
)  # fmt: skip
policy = LazyGroup(old_commands("policy"), name="policy", help="List the eviction policies, or check one of your own.")
strategy = LazyGroup(old_commands("strategy"), name="strategy", help="List the scheduling strategies, or check your own.")
comm = LazyGroup(
    {"measure": (at("sagellm.cli.comm:measure"), "Measure collectives and messages on this machine.")} | old_commands("comm"),
    name="comm", help="Measure communication, list collective backends and KV transfer channels, or check one of your own.",
)  # fmt: skip
