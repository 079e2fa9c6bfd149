"""`sagellm comm`: the communication backends there are, and whether one keeps to the contract."""

from typing import Any

import click

from sagellm.cli.contract_check import check_options, conclude
from sagellm.cli.current_folder import look_in_current_folder
from sagellm.cli.plug_ins import progress, read_options, show_rows
from sagellm.comm_backend.contract.rules import check_backend
from sagellm.comm_backend.registry import backend_names, find_backend
from sagellm.core.errors import CommError


@click.group()
def comm() -> None:
    """List the communication backends, or check one of your own."""


@comm.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_backends(as_json: bool) -> None:
    """Name every communication backend that is known, whether it can work here, and what it does in a sentence."""
    rows = [_describe(name) for name in backend_names()]
    columns = {"backend": "backend", "tensors on": "devices", "here": "here", "what it does": "summary"}
    show_rows(rows, columns, as_json)


@comm.command()
@check_options("backend")
@click.option("--ranks", type=click.IntRange(2, 16), default=3, show_default=True, help="Ranks of the groups.")
def check(name: str, ranks: int, options: str, seed: int, rounds: int, limit_s: float, as_json: bool) -> None:
    """Hold a backend, by name or as module:Class, against every rule of the contract, on this machine.

    Modules are looked for in the current folder too. Exit code 0: it keeps to all of them; 1: it does not, cannot work here,
    or faults kept a rule from being tested; 2: misuse.
    """
    look_in_current_folder()
    given = read_options(options, {"ring_bytes": 1 << 20})
    try:
        kind = find_backend(name)
    except CommError as error:
        raise click.UsageError(str(error)) from None
    report = check_backend(
        kind, world_size=ranks, options=given, seed=seed, rounds=rounds, progress=progress(), limit_s=limit_s
    )
    conclude("backend", name, report, seed, as_json)


def _describe(name: str) -> dict[str, Any]:
    try:
        kind = find_backend(name)
    except CommError as error:  # of a package that cannot be loaded
        return {"backend": name, "devices": "", "here": str(error), "summary": "", "class": ""}
    return {
        "backend": name,
        "devices": ", ".join(kind.device_types),
        "here": kind.missing() or "yes",
        "summary": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
        "class": f"{kind.__module__}:{kind.__qualname__}",
    }
