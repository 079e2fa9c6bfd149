"""`sagellm replay --verify`: whether the modules that made a record, its strategy or its pools, decide all of it again."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sagellm.cli.values import options_by_name
from sagellm.core.current_folder import look_in_current_folder

__all__ = ["REPLAYS", "verify", "verify_reads"]

MAX_SHOWN = 20


# Kind of record: what decides all of it again, and how its decisions are counted.
REPLAYS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "kv": (
        "sagellm.replay.verify:verify_log",
        lambda found: f"{found.num_decisions:,} decisions on {found.num_victims:,} victims, {found.num_hits:,} of "
        f"{found.num_asked:,} blocks found",
    ),
    "strategy": (
        "sagellm.replay.schedule.verify:verify_schedule",
        lambda found: f"{found.num_decisions:,} decisions of {', '.join(dict.fromkeys(found.strategies))}, "
        f"{found.num_left:,} left to the engine; {found.num_steps:,} steps and {found.num_ends:,} ends replayed",
    ),
    "scaling": (
        "sagellm.control_plane.scaling_replay:verify_scaling",
        lambda found: f"{found.num_decisions:,} decisions of {', '.join(found.pools)}",
    ),
}


def verify(kind: str, log: Path, as_json: bool, *more: Any) -> int:
    """Verify a record, print what differs, and return the exit code.

    Args:
        kind: of `REPLAYS`.
        more: further arguments of what verifies: for `strategy` its name and options.

    Raises:
        SageError: the log, or the class that decided, cannot be used.
    """
    target, counts = REPLAYS[kind]
    module, _, name = target.partition(":")
    look_in_current_folder()
    found = getattr(import_module(module), name)(log, *more)
    return _show(found, as_json, f"{log}: {counts(found)}")


def verify_reads(log: Path, as_json: bool, names: str | None, options: str | None) -> int:
    """Verify the choices of a sparse policy, print what policies would have read, and return the exit code.

    Raises:
        SageError: the log or a policy cannot be used.
        UsageError: options that do not fit.
    """
    from rich.console import Console

    from sagellm.replay.reads import replay_reads
    from sagellm.replay.report import min_width, reads_table

    look_in_current_folder()
    policies = None
    if names is not None:
        named = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        policies = options_by_name("--sparsity-options", options, named, {"share": 0.25})
    elif options is not None:
        raise click.UsageError("--sparsity-options goes with --sparsity; the log has the options of its own policy.")
    found = replay_reads(log, policies)
    if not as_json:
        console, table = Console(), reads_table(found.rows)
        console.width = max(console.width, min_width(table, console))
        console.print(table)
    what = f"{log}: {found.num_choices:,} choices of {found.policy} made again, {found.num_budgets:,} budgets"
    return _show(found, as_json, what if found.policy else f"{log}: recorded with dense attention")


def _show(found: Any, as_json: bool, what: str) -> int:
    """`found`: a `Checked`."""
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
        return 0 if found.agrees else 1
    for difference in found.differences[:MAX_SHOWN]:
        click.echo(str(difference))
    if len(found.differences) > MAX_SHOWN:
        click.echo(f"and {len(found.differences) - MAX_SHOWN} more; --json lists them, up to 1,000 of a process.")
    for line, expected, got in found.gaps[:MAX_SHOWN]:
        click.echo(f"line {line}: lines are missing, number {expected} was expected and {got} came.")
    cut = "; the last line was cut off and left out" if found.truncated else ""
    if found.num_open:
        cut += (
            "; it ends without a close line"
            if found.num_open == 1
            else f"; {found.num_open} processes end without a close line"
        )
    click.echo(f"{what}; {len(found.differences):,} differences, {len(found.gaps):,} gaps{cut}.")
    return 0 if found.agrees else 1
