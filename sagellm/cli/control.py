"""`sagellm up`, `sagellm engine` and `sagellm infer`: a manager, its engines, and a question to them."""

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sagellm.cli.tables import show_rows
from sagellm.cli.values import JSON_FLAG, read_options
from sagellm.core.config import KV_SCHEMAS, read_model
from sagellm.core.current_folder import look_in_current_folder
from sagellm.core.devices import device_names
from sagellm.core.early import STOP_SIGNALS
from sagellm.core.errors import ConfigError, SageError

__all__ = ["engine", "infer", "run_manager", "up"]

SHIPPED = Path(__file__).parents[1] / "config" / "engines" / "sagellm.yaml"
URL_FLAG = click.option("--url", help="URL of the manager. Default: $SAGELLM_URL, or the manager of this user.")
KEY_FLAG = click.option("--api-key", help="API key of the gateway. Default: $SAGELLM_API_KEY.")


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=int, help="Port of the gateway. Default: 23300; 0 is any free one.")
@click.option("--api-key", multiple=True, help="Key that clients must send; may be given several times.")
@click.option("--max-running-per-key", type=int, help="Requests that a key may have at once. Default: no limit.")
@click.option("--router", help="Router: a name of `sagellm list router`, or module:Class. Default: least-load.")
@click.option("--record", type=click.Path(path_type=Path), help="File for routing decisions, as JSON lines.")
@click.option("--ray-address", help="Ray cluster whose nodes run the engines: host:port of its head, or auto.")
@click.option("--empty", is_flag=True, help="Start without engines; add them with `sagellm engine start`.")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), help="Log level. Default: WARNING.")
@click.option("--json", "as_json", is_flag=True, help="Print the readiness line as JSON.")
def up(config: Path | None, empty: bool, as_json: bool, **flags: Any) -> None:
    """Start a manager with the engines of the YAML file CONFIG, and their gateway. Flags replace values of the file.

    Without CONFIG it starts the default model. Exit code 0: ended by a signal; 2: misuse, or an engine could not start.
    """
    from sagellm.control_plane.config import ManagerConfig

    given = {name: value for name, value in flags.items() if value not in (None, ())}

    def settings() -> Any:
        if empty and config is not None:
            raise ConfigError("--empty and a CONFIG contradict each other; give one of them.")
        return read_model(ManagerConfig, None if empty else config or SHIPPED, given)

    run_manager(settings, lambda manager: _announce(manager, as_json))


def run_manager(
    settings: Callable[[], Any], announce: Callable[[Any], None], fault: Callable[[Any], str] = lambda manager: ""
) -> None:
    """Run a manager until a signal, and end the process: exit code 1 after a fault, 2 where it could not start.

    Args:
        settings: returns its `ManagerConfig`. Raises SageError: invalid ones.
        announce: called with the manager when its engines serve.
        fault: called with the manager again and again; returns why it must end, or nothing.
    """
    from sagellm.control_plane.manager import ControlPlaneManager
    from sagellm.serve.logs import log_to_stderr

    look_in_current_folder()
    stop, is_ready = threading.Event(), threading.Event()

    def on_signal(*_: Any) -> None:
        """Ends the wait, or the start. A second signal ends the process at once, and the engines with it."""
        if stop.is_set():
            os._exit(1)
        stop.set()
        if not is_ready.is_set():
            raise KeyboardInterrupt

    why = ""
    try:
        config = settings()
        log_to_stderr(config.log_level)
        for number in STOP_SIGNALS:
            signal.signal(number, on_signal)
        manager, out = ControlPlaneManager(config), sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints there what happens to nodes
            try:
                manager.start()
                is_ready.set()
                gc.collect()
                gc.freeze()  # later searches for garbage leave out the libraries, or each would hold up all streams
                with contextlib.redirect_stdout(out):
                    announce(manager)
                while not (stop.wait(0.5) or (why := fault(manager))):  # in turns, or a signal to another thread is not seen
                    pass
            except KeyboardInterrupt:  # while engines start
                pass
            finally:
                stop.set()
                manager.stop()
    except SageError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if why:
        click.echo(f"error: {why}", err=True)
        sys.exit(1)


def _announce(manager: Any, as_json: bool) -> None:
    models = sorted(manager.status()["models"])
    if as_json:
        engines = [{name: one.get(name) for name in ("name", "url", "pid", "node")} for one in manager.engines()]
        line = {"ready": True, "url": f"{manager.url}/v1", "models": models, "pid": os.getpid(), "engines": engines}
        click.echo(json.dumps(line))
        return
    click.echo(f"Ready: {', '.join(models) or 'no engine yet'} at {manager.url}/v1; page: {manager.url}/ui")
    click.echo("Try:\n  sagellm infer 'What is the capital of France?'\n  sagellm engine list")


@click.group()
def engine() -> None:
    """Start, list, drain and stop the engines of a running manager."""


def _asking(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that ask a manager, and print its errors."""

    def asked(url: str | None, api_key: str | None, as_json: bool, **rest: Any) -> None:
        from sagellm.control_plane.found import ask, find_manager

        try:
            manager = find_manager(url)
            if manager is None:
                raise ConfigError("no manager runs; start one with `sagellm up`, or give its --url.")
            command(lambda *words, **more: ask(manager, *words, api_key=api_key, **more), as_json=as_json, **rest)
        except SageError as error:
            click.echo(json.dumps({"error": str(error)}) if as_json else f"error: {error}", err=not as_json)
            sys.exit(1)

    asked.__doc__ = command.__doc__
    for option in (JSON_FLAG, KEY_FLAG, URL_FLAG):
        asked = option(asked)
    asked.__click_params__ += getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    return asked


@engine.command("start")
@_asking
@click.argument("model", required=False)
@click.option("--name", help="Name of the engine. Default: the last part of MODEL.")
@click.option("--engine-kind", default="sagellm", show_default=True, help="Kind: a name of `sagellm list engine-kind`.")
@click.option("--device", type=click.Choice(device_names()), help="Device of the engine. Default: auto.")
@click.option("--kv-schema", type=click.Choice(KV_SCHEMAS), help="Type of keys and values, of the kind sagellm.")
@click.option("--speculative-strategy", help="Strategy that guesses tokens, of the kind sagellm.")
@click.option("--engine-url", help="URL of the server, for the kind openai.")
@click.option("--options", default="{}", metavar="JSON", help="Further options of the kind, as a JSON object.")
def start(
    ask: Any, model: str | None, name: str | None, engine_kind: str, device: str | None, kv_schema: str | None,
    speculative_strategy: str | None, engine_url: str | None, options: str, as_json: bool,
) -> None:  # fmt: skip
    """Start an engine for MODEL, and wait until it serves.

    Exit code 0: it serves; 1: it does not, or there is no manager.
    """
    given = {"model": model, "device": device, "kv_schema": kv_schema, "speculative": speculative_strategy, "url": engine_url}
    given = {key: value for key, value in given.items() if value is not None} | read_options(
        "--options", options, {"kv_blocks": 256}
    )  # fmt: skip
    if model is not None and Path(model).exists():  # the manager may run in another folder
        given["model"] = str(Path(model).resolve())
    name = name or (Path(model).name if model else engine_kind)
    found = ask("POST", "/control/engines", {"name": name, "kind": engine_kind, "options": given})
    click.echo(json.dumps(found) if as_json else f"{name} serves {', '.join(found['models'])} after {found['register_s']} s")


@engine.command("list")
@_asking
def list_engines(ask: Any, as_json: bool) -> None:
    """List the engines of the manager."""
    rows = ask("GET", "/control/engines")["engines"]
    shown = rows if as_json else [_shown(row) for row in rows]
    columns = ["name", "group", "role", "kind", "state", "models", "device", "load", "node", "url"]
    if not any(row["group"] for row in rows):
        columns.remove("role")
    if not as_json:
        columns = [name for name in columns if any(row[name] for row in shown) or name in ("name", "kind", "state")]
    show_rows(shown, {name: name for name in columns}, as_json)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of an engine in a table."""
    load = [f"{row['running']} running"]
    load += [f"{row['load']['waiting']:.0f} waiting"] if "waiting" in row["load"] else []
    load += [f"KV {row['load']['kv_use']:.0%}"] if "kv_use" in row["load"] else []
    return row | {"models": ", ".join(row["models"]), "load": ", ".join(load)}


@engine.command("status")
@_asking
@click.argument("name", required=False)
def status(ask: Any, name: str | None, as_json: bool) -> None:
    """Show all that the manager knows of an engine, or of all engines and its last decisions.

    Exit code 0: fine; 1: there is no such engine, or one is not ready.
    """
    found = ask("GET", "/control/engines")
    engines = [one for one in found["engines"] if name in (None, one["name"])]
    if name is not None and not engines:
        raise ConfigError(f"there is no engine {name!r}; registered are {', '.join(one['name'] for one in found['engines'])}.")
    if as_json or name is not None:
        click.echo(json.dumps(engines[0] if name is not None else found, indent=1))
    else:
        from rich.console import Console

        for one in engines:
            why = f" ({one['why']})" if one["why"] else ""
            node = f" on node {one['node']}" if one["node"] else ""
            role = f", {one['role']} engine of {one['group']}" if one["group"] else ""
            Console().print(
                f"{one['name']}{role}: {one['state']}{node}{why}; {one['running']} running, {one['served']} served, "
                f"{one['starts']} starts",
                markup=False, highlight=False,
            )  # fmt: skip
        for name, pool in found["scaling"].items():
            last = pool["decisions"][0] if pool["decisions"] else {"action": "keep", "target": "", "reason": "not yet decided"}
            says = "would " if pool["dry_run"] else ""
            click.echo(f"pool {name}: {len(pool['engines'])} of {pool['min']} to {pool['max']} engines; {pool['policy']}: "
                       f"{says}{last['action']} {last['target']}, {last['reason']}")  # fmt: skip
        click.echo(f"router {found['router']}; {found['health_share']:.1%} of health checks succeeded")
        for one in found["decisions"][:10]:
            click.echo(f"  {one['path']} of {one['model']} to {one['engine']}: {one['reason']}, {one['detail']}")
    sys.exit(0 if all(one["state"] == "ready" for one in engines) else 1)


@engine.command("drain")
@_asking
@click.argument("name")
def drain(ask: Any, name: str, as_json: bool) -> None:
    """Send the engine NAME no further request."""
    found = ask("POST", f"/control/engines/{_quoted(name)}/drain")
    click.echo(json.dumps(found) if as_json else f"{name} is draining")


@engine.command("stop")
@_asking
@click.argument("name")
@click.option("--drain-s", type=click.FloatRange(0, 86400), help="Seconds for its requests. Default: those of the manager.")
def stop(ask: Any, name: str, drain_s: float | None, as_json: bool) -> None:
    """Let the requests of the engine NAME end, then end it."""
    query = "" if drain_s is None else f"?drain_s={drain_s}"
    found = ask("DELETE", f"/control/engines/{_quoted(name)}{query}")
    click.echo(json.dumps(found) if as_json else f"{name} is stopped")


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


@click.command()
@click.argument("prompt")
@click.option("--model", help="Name of the model. Default: the only one that is served.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most tokens of the answer.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as a text, without a chat template.")
@URL_FLAG
@KEY_FLAG
@JSON_FLAG
def infer(
    prompt: str, model: str | None, max_tokens: int, raw: bool, url: str | None, api_key: str | None, as_json: bool
) -> None:
    """Answer PROMPT through the running manager, and print the answer as it comes.

    Exit code 0: answered; 1: there is no manager, or no engine could answer.
    """
    from openai import OpenAIError

    from sagellm.control_plane.client import UnifiedInferenceClient
    from sagellm.control_plane.found import find_manager

    try:
        found = find_manager(url)
        if found is None:
            raise ConfigError("no manager runs; start one with `sagellm up`, or give its --url.")
        with UnifiedInferenceClient(found.url, model, api_key) as client:
            ask = client.generate if raw else client.chat
            pieces = []
            for piece in ask(prompt, stream=True, max_tokens=max_tokens):
                pieces.append(piece)
                if not as_json:
                    click.echo(piece, nl=False)
            click.echo(json.dumps({"model": client.model, "text": "".join(pieces)}) if as_json else "")
    except (SageError, OpenAIError) as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"error: {error}", err=not as_json)
        sys.exit(1)
