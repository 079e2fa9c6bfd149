"""`sagellm patches`: the patch tool, with its status as a table."""

import sys
from pathlib import Path

import click

from sagellm.cli.values import JSON_FLAG
from sagellm.core.errors import PatchError
from sagellm.patching import TreeState, default_targets, status
from sagellm.patching.cli import main as patch_tool

VERBS = ("status", "check", "apply", "reverse", "refresh")
COLOURS = {"applied": "green", "not applied": "yellow"}


@click.command()
@click.argument("verb", type=click.Choice(VERBS), default="status")
@click.argument("numbers", nargs=-1, metavar="[NNNN]...")
@click.option(
    "--target", "targets", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="LMDeploy tree to work on; may be given several times.",
)  # fmt: skip
@click.option(
    "--patches", "series", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of another patch series."
)
@click.option("--force", is_flag=True, help="Replace marked lines of another version of the series.")
@JSON_FLAG
def patches(
    verb: str, numbers: tuple[str, ...], targets: tuple[Path, ...], series: Path | None, force: bool, as_json: bool
) -> None:
    """Show (default), check, apply, reverse or refresh the patch series on LMDeploy.

    Default target: the installed LMDeploy, and the submodule if it is checked out. Only refresh takes patch numbers NNNN.
    Exit code 0: applied, or done; 1: not applied, or it does not apply; 2: misuse.
    """
    if numbers and verb != "refresh":
        raise click.UsageError(f"only refresh takes patch numbers; got {' '.join(numbers)} after {verb}.")
    if verb == "status" and not as_json:
        sys.exit(_show(targets, series))
    arguments = [] if verb == "apply" else [f"--{verb}", *numbers]
    for target in targets:
        arguments += ["--target", str(target)]
    if series is not None:
        arguments += ["--patches", str(series)]
    sys.exit(patch_tool([*arguments, *["--force"] * force, *["--json"] * as_json]))


def _show(targets: tuple[Path, ...], series: Path | None) -> int:
    from rich.console import Console

    try:
        states = [status(target, patches=series) for target in targets or default_targets()]
    except PatchError as error:
        click.echo(f"error: {error}", err=True)
        return 1
    console = Console()
    for state in states:
        console.print(f"LMDeploy {state.version} in {state.target}: {state.state}", soft_wrap=True, highlight=False)
        console.print(_table(state))
        if state.command:
            console.print(f"{state.reason}\n" if state.reason else "", end="", soft_wrap=True, highlight=False)
            console.print(f"To apply it: [bold]{state.command}[/]", soft_wrap=True)
    return 0 if all(state.applied for state in states) else 1


def _table(state: TreeState):
    from rich.table import Table

    table = Table()
    table.add_column("patch")
    table.add_column("files", justify="right")
    table.add_column("state")
    for patch in state.patches:
        table.add_row(patch.name, str(patch.files), f"[{COLOURS.get(patch.state, 'red')}]{patch.state}[/]")
    return table
