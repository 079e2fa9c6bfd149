"""`sagellm policy`: the eviction policies there are, and whether one keeps to the contract."""

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import click

from sagellm.cli.current_folder import look_in_current_folder
from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.contract.rules import ContractReport, check_policy
from sagellm.kv_policy.registry import find_policy, make_policy, policy_names


@click.group()
def policy() -> None:
    """List the eviction policies, or check one of your own."""


@policy.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_policies(as_json: bool) -> None:
    """Name every eviction policy that is known, its options, and what it does in a sentence."""
    rows = [_describe(name) for name in policy_names()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("policy", "native", "options", "what it does"):
        table.add_column(column)
    for row in rows:
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        table.add_row(row["policy"], "yes" if row["native"] else "no", escape(options), escape(row["summary"]))
    Console().print(table)


@policy.command()
@click.argument("name")
@click.option("--options", default="{}", metavar="JSON", help="The policy's options, a JSON object.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The first seed of the random scenarios."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Seeds to try.")
@click.option("--reference", is_flag=True, help="Check the twin in plain Python, not the native one.")
@click.option(
    "--limit-s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
    help="Seconds for a scenario; a policy that takes longer has failed.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(name: str, options: str, seed: int, rounds: int, reference: bool, limit_s: float, as_json: bool) -> None:
    """Hold a policy, by name or as module:Class, against every rule of the contract.

    Modules are looked for in the current folder too. Exit code 0: it keeps to all of them; 1: it does not, or faults kept a
    rule from being tested; 2: misuse.
    """
    look_in_current_folder()
    make = _maker(name, _options(options), reference)
    report = check_policy(make, seed=seed, rounds=rounds, progress=_progress(), limit_s=limit_s)
    if as_json:
        rules = [{**result._asdict(), "passed": result.passed} for result in report.results]
        document = {"policy": name, "passed": report.passed, "seed": seed, "rules": rules, "event_us": report.event_us}
        click.echo(json.dumps(document, indent=1))
    else:
        _show(name, report)
    sys.exit(0 if report.passed else 1)


def _describe(name: str) -> dict[str, Any]:
    reference = find_policy(name, reference=True)
    parameters = inspect.signature(reference.__init__).parameters.values()
    options = {item.name: item.default for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
    # One policy a file here, and the file's first line says what it is; elsewhere the class speaks for itself.
    own = inspect.getmodule(reference) if reference.__module__.startswith("sagellm.") else reference
    summary = " ".join((inspect.getdoc(own) or "").split("\n\n")[0].split())
    return {
        "policy": name,
        "native": find_policy(name) is not reference,
        "options": options,
        "summary": summary,
        "class": f"{reference.__module__}:{reference.__qualname__}",
    }


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise click.UsageError(
            f"--options {text!r} is not JSON ({error}); for example '{{\"small_ratio\": 0.2}}'."
        ) from None
    if not isinstance(options, dict):
        raise click.UsageError(
            f"--options {text!r} is a JSON {type(options).__name__}; give an object of names and values."
        )
    return options


def _maker(name: str, options: dict[str, Any], reference: bool) -> Callable[[int], EvictionPolicy]:
    """A policy that cannot be found or does not know an option is misuse; one that fails otherwise breaks a rule."""
    try:
        kind = find_policy(name, reference)
        if options or kind.__module__.startswith("sagellm."):
            make_policy(name, 16, reference, **options)
    except PolicyError as error:
        raise click.UsageError(str(error)) from None
    return lambda capacity: kind(capacity, **options)


def _progress() -> Callable[[str], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda scenario: click.echo(f"\r\033[Kscenario {scenario} ", nl=False, err=True)


def _show(name: str, report: ContractReport) -> None:
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
