"""`sagellm comm`: the communication backends and KV transfer channels there are, and whether one keeps to its contract."""

from collections.abc import Callable
from typing import Any

import click

from sagellm.cli.contract_check import check_options, conclude
from sagellm.cli.current_folder import look_in_current_folder
from sagellm.cli.plug_ins import progress, read_options, show_rows
from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.contract.rules import check_backend
from sagellm.comm_backend.kv_transfer.base import KVTransferChannel
from sagellm.comm_backend.kv_transfer.contract.rules import check_channel
from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel
from sagellm.comm_backend.registry import backend_names, find_backend
from sagellm.core.errors import CommError, TransferError


@click.group()
def comm() -> None:
    """List the communication backends and KV transfer channels, or check one of your own."""


@comm.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_backends(as_json: bool) -> None:
    """Name every communication backend that is known, whether it can work here, and what it does in a sentence."""
    rows = [_described("backend", find_backend, name) for name in backend_names()]
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
    kind, given = _chosen(find_backend, name, options, {"ring_bytes": 1 << 20})
    report = check_backend(
        kind, world_size=ranks, options=given, seed=seed, rounds=rounds, progress=progress(), limit_s=limit_s
    )
    conclude("backend", name, report, seed, as_json)


@comm.command("channels")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_channels(as_json: bool) -> None:
    """Name every KV transfer channel that is known, whether it can work here, and what it does in a sentence."""
    rows = [_described("channel", find_channel, name) for name in channel_names()]
    columns = {"channel": "channel", "tensors on": "devices", "here": "here", "what it does": "summary"}
    show_rows(rows, columns, as_json)


@comm.command("check-channel")
@check_options("channel")
def check_kv_channel(name: str, options: str, seed: int, rounds: int, limit_s: float, as_json: bool) -> None:
    """Hold a KV transfer channel, by name or as module:Class, against every rule of the contract, on this machine.

    Modules are looked for in the current folder too. Exit code 0: it keeps to all of them; 1: it does not, cannot work here,
    or faults kept a rule from being tested; 2: misuse.
    """
    kind, given = _chosen(find_channel, name, options, {"port": 0})
    report = check_channel(kind, options=given, seed=seed, rounds=rounds, progress=progress(), limit_s=limit_s)
    conclude("channel", name, report, seed, as_json)


def _chosen(find: Callable[[str], Any], name: str, options: str, example: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of this name, and its options; misuse where there is none, or they are none."""
    look_in_current_folder()
    given = read_options(options, example)
    try:
        return find(name), given
    except (CommError, TransferError) as error:
        raise click.UsageError(str(error)) from None


def _described(what: str, find: Callable[[str], Any], name: str) -> dict[str, Any]:
    try:
        return {what: name} | _facts(find(name))
    except (CommError, TransferError) as error:  # of a package that cannot be loaded
        return {what: name, "devices": "", "here": str(error), "summary": "", "class": ""}


def _facts(kind: type[CommBackendProtocol] | type[KVTransferChannel]) -> dict[str, Any]:
    return {
        "devices": ", ".join(kind.device_types),
        "here": kind.missing() or "yes",
        "summary": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
        "class": f"{kind.__module__}:{kind.__qualname__}",
    }
