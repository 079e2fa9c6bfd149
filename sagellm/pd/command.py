"""`sagellm pd`: prefill on one engine and decode on another; a proxy, and a whole group on this host."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from sagellm.core.errors import ConfigError, SageError
from sagellm.core.ports import SagePorts

LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"]
SHARED = (
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
    """Prefill/decode separation: start a group of engines with its proxy, or the proxy alone."""


@pd.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=SagePorts.proxy, show_default=True, help="Port to listen on.")
@click.option(
    "--pd-key-file", "key_file", type=click.Path(path_type=Path), required=True,
    help="File with the secret of the group.",
)
@click.option(
    "--model", type=click.Path(path_type=Path),
    help="Folder of the tokenizer. Without it requests are routed by load alone.",
)
@click.option(
    "--nodes-file", type=click.Path(path_type=Path),
    help="File that keeps the URLs of engines for the next start of the proxy.",
)
@click.option("--listen-fd", type=int, hidden=True, help="Listening socket that `sagellm pd up` hands over.")
@_shared("INFO")
def proxy(as_json: bool, **flags: Any) -> None:
    """Run LMDeploy's DistServe proxy with our routing: engines join it, clients send requests to it.

    Exit code 0: ended by a signal; 2: it could not start.
    """
    from sagellm.core.current_folder import look_in_current_folder
    from sagellm.pd.proxy import ProxyConfig, run_proxy

    look_in_current_folder()
    _exit_with(lambda: run_proxy(_checked(ProxyConfig, flags), as_json))


@pd.command(context_settings={"ignore_unknown_options": False})
@click.option("--prefill", type=click.IntRange(0, 64), default=1, show_default=True, help="Number of prefill engines.")
@click.option("--decode", type=click.IntRange(0, 64), default=1, show_default=True, help="Number of decode engines.")
@click.option(
    "--hybrid", type=click.IntRange(0, 64), default=0, show_default=True, help="Number of engines that do both."
)
@click.option("--port", type=int, default=SagePorts.proxy, show_default=True, help="Port of the proxy.")
@click.option(
    "--model", type=click.Path(path_type=Path), help="Model: name, folder, .gguf file or hub id. Default: smollm2."
)
@click.option("--pin", is_flag=True, help="Give each engine cores of its own.")
@click.option("--no-restart", is_flag=True, help="End the whole group if one process ends.")
@click.option(
    "--ready-timeout-s", type=float, default=600.0, show_default=True,
    help="Seconds within which every process must be ready.",
)
@_shared("WARNING")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
def up(as_json: bool, **flags: Any) -> None:
    """Start a proxy and engines on this host, and end them together. Flags after -- go to sagellm serve.

    Exit code 0: ended by a signal; 1: a process ended by itself; 2: misuse, or one could not start.
    """
    from sagellm.pd.up import UpConfig, run_up

    _exit_with(lambda: run_up(_checked(UpConfig, flags), as_json))


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


def _checked(kind: Any, flags: dict[str, Any]) -> Any:
    """Build a configuration. Raises ConfigError that names the invalid flag."""
    try:
        return kind(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "the flags"
        raise ConfigError(f"{name}: {first['msg']}.") from None


def _exit_with(run: Any) -> None:
    try:
        code = run()
    except SageError as error:
        click.echo(f"error: {error}", err=True)
        code = 2
    sys.exit(code)
