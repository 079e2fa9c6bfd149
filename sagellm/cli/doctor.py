"""`sagellm doctor`: what this machine can run, what is missing, and the command that mends it."""

import json
import sys
from collections.abc import Callable

import click

from sagellm.cli import checks
from sagellm.cli.checks import MISSING, NOTE, OK, Finding
from sagellm.cli.values import JSON_FLAG
from sagellm.core.config import SageConfig

COLOURS = {OK: "green", NOTE: "yellow", MISSING: "red"}


def examine(port: int) -> list[Finding]:
    """Every check in turn; one that fails unexpectedly becomes a finding, not the end of the examination."""
    steps: tuple[Callable[[], list[Finding]], ...] = (
        checks.python,
        checks.lmdeploy,
        checks.torch,
        checks.accelerators,
        checks.engines,
        checks.capabilities,
        checks.gpu_runs,
        checks.collectives,
        checks.kv_channels,
        checks.processor,
        checks.memory,
        checks.disk_and_models,
        lambda: checks.port(port),
        checks.extensions,
    )
    findings: list[Finding] = []
    for step in steps:
        try:
            findings += step()
        except Exception as error:
            name = getattr(step, "__name__", "check")
            findings.append(Finding(name, NOTE, f"could not be examined: {type(error).__name__}: {error}"))
    return findings


@click.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), default=SageConfig().port, show_default=True, help="Port to look at."
)
@JSON_FLAG
def doctor(port: int, as_json: bool) -> None:
    """Say what this machine can run, and what is missing.

    Exit code 0: the server can run; 1: it cannot; 2: misuse.
    """
    findings = examine(port)
    ready = all(finding.state != MISSING for finding in findings)
    if as_json:
        click.echo(json.dumps({"ready": ready, "checks": [finding._asdict() for finding in findings]}, indent=1))
    else:
        _show(findings, ready)
    sys.exit(0 if ready else 1)


def _show(findings: list[Finding], ready: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("what", "state", "finding"):
        table.add_column(column)
    for finding in findings:
        text = escape(finding.text) + (f"\n[bold]{escape(finding.command)}[/]" if finding.command else "")
        table.add_row(finding.name, f"[{COLOURS[finding.state]}]{finding.state}[/]", text)
    console = Console()
    console.print(table)
    console.print("[green]The server can run: sagellm serve[/]" if ready else "[red]The server cannot run yet.[/]")
