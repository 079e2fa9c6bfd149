"""`sagellm pd`: a manager with one prefill/decode group, whose engines it starts or others have started."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sagellm.cli.control import run_manager
from sagellm.core.config import read_model
from sagellm.core.ports import SagePorts

__all__ = ["pd"]

NAME = "pd"  # of the group in its manager
OF_GROUP = (
    "kind", "prefill", "decode", "hybrid", "model", "policy", "pin", "silent_s", "ready_timeout_s", "flags", "key_file",
    "nodes_file",
)  # fmt: skip
LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"]
SHARED = (
    click.option(
        "--port", type=click.IntRange(1, 65535), default=SagePorts.proxy, show_default=True, help="Port to listen on."
    ),
    click.option("--api-key", multiple=True, help="API key that clients must send; may be given several times."),
    click.option(
        "--policy", default="pd", show_default=True,
        help="Routing policy: pd, always-split, never-split, or module:Class.",
    ),
    click.option(
        "--wait-s", type=float, default=30.0, show_default=True,
        help="Seconds that a request waits for a decode engine.",
    ),
    click.option(
        "--silent-s", type=float, default=60.0, show_default=True,
        help="Seconds of silence after which an engine is hung.",
    ),
    click.option("--record", type=click.Path(path_type=Path), help="File for routing decisions, as JSON lines."),
    click.option(
        "--drain-timeout-s", type=float, default=10.0, show_default=True,
        help="Seconds for running requests at shutdown.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the readiness line as JSON."),
)


def _shared(level: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of `proxy` and `up`. `level`: the default log level."""
    log_level = click.option(
        "--log-level", type=click.Choice(LEVELS), default=level, show_default=True,
        help="Least severity that is logged.",
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed((*SHARED, log_level)):
            command = option(command)
        return command

    return decorate


@click.group()
def pd() -> None:
    """Prefill/decode separation: start a group of engines, or a proxy for engines that are started by hand."""


@pd.command()
@click.option("--prefill", type=click.IntRange(0, 64), default=1, show_default=True, help="Number of prefill engines.")
@click.option("--decode", type=click.IntRange(0, 64), default=1, show_default=True, help="Number of decode engines.")
@click.option(
    "--hybrid", type=click.IntRange(0, 64), default=0, show_default=True, help="Number of engines that do both."
)
@click.option("--model", help="Model: name, folder, .gguf file or hub id. Default: smollm2.")
@click.option("--pin", is_flag=True, help="Give each engine cores of its own.")
@click.option("--no-restart", is_flag=True, help="End the whole group if one process ends.")
@click.option(
    "--ready-timeout-s", type=float, default=600.0, show_default=True,
    help="Seconds within which every process must be ready.",
)
@click.option("--kind", default="group", hidden=True, help="Kind of the group: a name of `sagellm list engine-kind`.")
@_shared("WARNING")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def up(as_json: bool, no_restart: bool, serve_flags: tuple[str, ...], **flags: Any) -> None:
    """Start a manager with one group of engines on this host. Flags after -- go to sagellm serve.

    `sagellm engine list` shows its engines. Exit code 0: ended by a signal; 1: a process ended by itself; 2: misuse, or one
    could not start.
    """

    def fault(manager: Any) -> str:
        """Return which engine has failed, where that is to be the end."""
        failed = [one for one in manager.engines() if one["group"] and one["why"]]
        return f"{failed[0]['name']} has gone: {failed[0]['why']}" if no_restart and failed else ""

    _run(flags | {"flags": list(serve_flags)}, lambda manager: _announce(manager, as_json), fault)


@pd.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--pd-key-file", "key_file", type=click.Path(), required=True, help="File with the secret of the group.",
)  # fmt: skip
@click.option("--model", help="Model, for its tokenizer. Without it requests are routed by load alone.")
@click.option(
    "--nodes-file", type=click.Path(), help="File that keeps the URLs of engines for the next start of the proxy."
)
@_shared("INFO")
def proxy(as_json: bool, **flags: Any) -> None:
    """Start a manager with one group, which engines that are started by hand join by its key.

    `sagellm engine list` shows them. Exit code 0: ended by a signal; 2: it could not start.
    """
    flags |= {"kind": "group", "prefill": 0, "decode": 0}

    def announce(manager: Any) -> None:
        if as_json:
            line = {"ready": True, "url": manager.url, "pid": os.getpid(), "policy": flags["policy"]}
            click.echo(json.dumps(line))
            return
        click.echo(
            f"Ready: proxy at {manager.url}, policy {flags['policy']}. "
            f"Engines join with --proxy-url {manager.url} --pd-key-file {flags['key_file']}"
        )

    _run(flags, announce)


@pd.command()
@click.option("--url", default=f"http://127.0.0.1:{SagePorts.proxy}", show_default=True, help="URL of the proxy.")
@click.option("--api-key", help="API key, if the proxy needs one.")
@click.option("--json", "as_json", is_flag=True, help="Print the proxy's answer as JSON.")
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the engines of a proxy, their links, and what waits.

    Exit code 0: fine; 1: there is no proxy, or a pair is kept apart.
    """
    import urllib.error
    import urllib.request

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    request = urllib.request.Request(f"{url.rstrip('/')}/pd/status")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.load(answer)
    except (OSError, ValueError) as error:
        click.echo(f"error: {url} does not answer as a sagellm proxy: {error}. Start one with sagellm pd up.", err=True)
        sys.exit(1)
    engines = found["engines"]
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        columns = {"engine": "engine_id", "role": "role", "model": "model", "tokens waiting": "waiting_tokens",
                   "streams": "num_streams", "blocks cached": "cached_blocks"}  # fmt: skip
        table = Table(*columns, "loads from", "kept apart", box=None, padding=(0, 2, 0, 0))
        for one in engines:
            cells = [*(one[name] for name in columns.values()), ", ".join(one["connected"]), "; ".join(one["refused"].values())]
            table.add_row(*(escape(str(cell)) for cell in cells))
        Console().print(table)
        click.echo(f"policy {found['policy']}, by {found['routes_by']}")
    sys.exit(1 if any(one["refused"] for one in engines) else 0)


def _run(flags: dict[str, Any], announce: Callable[[Any], None], fault: Callable[[Any], str] = lambda manager: "") -> None:
    """Run a manager with one group until a signal, as `run_manager` does."""
    from sagellm.control_plane.config import ManagerConfig

    given = {name: value for name, value in flags.items() if value is not None}
    group = {name: given.pop(name) for name in OF_GROUP if name in given}
    settings = given | {"engines": {NAME: group}, "api_key": list(given["api_key"])}
    run_manager(lambda: read_model(ManagerConfig, None, settings), announce, fault)


def _announce(manager: Any, as_json: bool) -> None:
    engines = [
        {"name": one["name"], "pid": one["pid"], "url": f"{one['url']}/v1"} for one in manager.engines() if one["group"]
    ]
    model, url = min(manager.status()["models"]), f"{manager.url}/v1"
    if as_json:
        click.echo(json.dumps({"ready": True, "url": url, "model": model, "pid": os.getpid(), "engines": engines}))
        return
    key = " -H 'Authorization: Bearer KEY'" if manager.config.api_key else ""
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "Write a function `add`."}]})
    click.echo(f"\nReady: {model} at {url}, {len(engines)} engines; page: {manager.url}/ui")
    click.echo(f"Try:\n  curl -N {url}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n")
