"""`sagellm plan --profile`: engines that keep to latency targets under a load, from measured times."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagellm.cli.evaluate import show_progress
from sagellm.cli.tables import show_rows
from sagellm.cli.values import Finite
from sagellm.core.errors import ConfigError, SageError

if TYPE_CHECKING:
    from sagellm.control_plane.sla.choose import Plan
    from sagellm.control_plane.sla.load import Load
    from sagellm.control_plane.sla.profile import SLAProfile

__all__ = ["plan_sla", "sla_options"]

SPECULATIVE = "suffix"
def sla_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a plan for latency targets."""
    options = (
        click.option("--profile", type=click.Path(dir_okay=False, path_type=Path), help="File of `sagellm profile sla`."),
        click.option("--ttft-ms", type=Finite(), default=500.0, show_default=True, help="Longest time to the first token."),
        click.option("--itl-ms", type=Finite(), default=50.0, show_default=True,
                     help="Longest time for each further token, the mean over a request."),
        click.option("--load", "loads", multiple=True, metavar="TRACE|RATE",
                     help="Trace file, generator such as conversation:rate=2, or requests/s; may be given again."),
        click.option("--requests", type=click.IntRange(2), default=300, show_default=True, help="Most requests of a load."),
        click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True, help="Prompt of a RATE."),
        click.option("--output-tokens", type=click.IntRange(1), default=64, show_default=True, help="Answer of a RATE."),
        click.option("--devices", type=click.IntRange(1, 64), default=8, show_default=True, help="Most devices."),
        click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True,
                     help="Part of the requests that must be in time."),
        click.option("--acceptance", type=click.FloatRange(0, 1),
                     help="Chance that a guess is right; without it no engine guesses."),
        click.option("--speculative", default=SPECULATIVE, show_default=True, help="Strategy that guesses."),
        click.option("--link-gb-per-s", type=Finite(), default=1.0, show_default=True,
                     help="Speed between a prefill and a decode engine."),
        click.option("--write-config", type=click.Path(dir_okay=False, path_type=Path), help="File for `sagellm up`."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def plan_sla(model: str, memory: int | None, as_json: bool, *, profile: Path, loads: Sequence[str], **given: Any) -> None:
    """Choose, print, and write the settings. Exit code 1: no choice meets the targets; 2: misuse."""
    from sagellm.control_plane.sla.choose import PIPELINE
    from sagellm.control_plane.sla.profile import name_of, read_profile
    from sagellm.control_plane.sla.settings import manager_yaml

    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = read_profile(profile)
            folder = _folder(model, found)
            plan, read = _choose(folder, found, memory, loads, given)
            setup = plan.fleet.tensor_parallel, plan.fleet.lookahead
            text = manager_yaml(found, plan.fleet, str(folder), given["speculative"])
            if given["write_config"] is not None and plan.meets:
                given["write_config"].write_text(text)
    except (SageError, OSError) as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"error: {error}", err=not as_json)
        sys.exit(2)
    errors = found.errors.get(name_of(setup), {})
    if as_json:
        targets = {name: given[name] for name in ("ttft_ms", "itl_ms", "share")}
        told = {"loads": [_about(load) for load in read], "targets": targets}
        click.echo(json.dumps(told | {
            **plan.to_dict(), "profile_errors": {kind: error.model_dump() for kind, error in errors.items()}, "config": text
        }, indent=1))  # fmt: skip
        sys.exit(0 if plan.meets else 1)
    plans = {"plan": plan} if plan.one_more is None else {"plan": plan, "one more device": plan.one_more}
    columns = {"": "figure"} | {name: name for name in plans}
    every = [_figures(each, read) for each in plans.values()]
    show_rows([{"figure": name} | dict(zip(plans, [each[name] for each in every], strict=True)) for name in every[0]],
              columns, False)  # fmt: skip
    click.echo(f"limit: {plan.limit}.")
    click.echo(_more(plan))
    click.echo(f"pipeline parallel {PIPELINE}.")
    for kind, error in errors.items():
        click.echo(f"median error of the profile, {kind}: {error.median:.1%}")
    if not plan.meets:
        click.echo(f"no choice of {given['devices']} devices meets the targets; this is the closest.", err=True)
        sys.exit(1)
    if given["write_config"] is not None:
        click.echo(f"wrote {given['write_config']}; start it: sagellm up {given['write_config']}")


def _folder(model: str, profile: "SLAProfile") -> Path:
    from sagellm.control_plane.sla.measure import model_hashes
    from sagellm.models import find_model, prepare_model

    folder = prepare_model(find_model(model))
    if model_hashes(folder) != profile.facts.get("hashes"):
        theirs = profile.facts.get("model")
        raise ConfigError(f"the profile is of another model, {theirs}, and not of {folder.name}; profile this one.")
    return folder


def _choose(
    folder: Path, profile: "SLAProfile", memory: int | None, loads: Sequence[str], given: dict[str, Any]
) -> "tuple[Plan, list[Load]]":
    from sagellm.control_plane.sla.choose import Planner, Wanted
    from sagellm.control_plane.sla.load import read_load
    from sagellm.engines.lmdeploy.sizing import weight_bytes, weights_dtype
    from sagellm.kv_policy.migration.cost_model import Link
    from sagellm.replay.schedule.metrics import Targets

    if not loads:
        raise ConfigError("a plan needs a load; give --load a trace file, or requests/s such as 2.5.")
    lengths = {name: given[name] for name in ("prompt_tokens", "output_tokens")}
    read = [read_load(text, num_requests=given["requests"], **lengths) for text in loads]
    targets = Targets(given["ttft_ms"] / 1e3, given["itl_ms"] / 1e3)
    link = Link(latency_s=1e-3, bytes_per_s=1e9 * given["link_gb_per_s"])
    dtype = weights_dtype(profile.facts["settings"].get("dtype") or "auto")
    wanted = Wanted(
        targets, given["devices"], given["share"], given["acceptance"], memory, weight_bytes(folder, dtype), link
    )  # fmt: skip
    with show_progress() as tick:
        return Planner(profile, read, wanted, tick).choose(), read


def _about(load: "Load") -> dict[str, Any]:
    num = len(load.requests)
    return {
        "name": load.name, "requests": num, "requests_per_s": load.rate,
        "prompt_tokens": sum(each.prompt_tokens for each in load.requests) / num,
        "output_tokens": sum(each.num_generated for each in load.requests) / num,
    }  # fmt: skip


def _figures(plan: "Plan", loads: "Sequence[Load]") -> dict[str, str]:
    """Return the rows of a plan's column."""
    fleet = plan.fleet
    split = f"{fleet.prefill} prefill, {fleet.decode} decode" if fleet.prefill else f"{fleet.decode}, no split"
    found = {
        "devices": fleet.devices, "engines (data parallel)": split, "tensor parallel": fleet.tensor_parallel,
        "guesses a step": fleet.lookahead, "requests at once": fleet.max_batch_size, "KV blocks of an engine": fleet.kv_blocks,
    }  # fmt: skip
    for load, outcome in zip(loads, plan.outcomes, strict=True):
        figures, name = outcome.figures, f" of {load.name}" if len(loads) > 1 else ""
        next_ms = "-" if figures.tpot_p99_s is None else f"{1e3 * figures.tpot_p99_s:.1f} ms"
        found |= {
            f"in time{name}": f"{outcome.share:.1%}", f"tokens/s{name}": f"{figures.tokens_per_s:.4g}",
            f"first token, p95{name}": f"{1e3 * figures.ttft_p95_s:.0f} ms", f"per token, p99{name}": next_ms,
        }  # fmt: skip
    return {**{name: str(value) for name, value in found.items()}, "largest load": f"{plan.scale:.2f} x" if plan.scale else "-"}


def _more(plan: "Plan") -> str:
    more = plan.one_more
    if more is None:
        return "one more device: no choice of the profile has so many."
    if not more.meets:
        return f"one more device: {more.share:.1%} of the requests in time instead of {plan.share:.1%}."
    if not plan.scale:
        return f"one more device meets the targets, up to {more.scale:.2f} times this load."
    return f"one more device: up to {more.scale:.2f} times this load instead of {plan.scale:.2f}."
