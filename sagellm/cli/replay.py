"""`sagellm replay`: replay a trace through policies, verify a recorded log, or replay a log under other strategies."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sagellm.cli.replay_schedule import (
    OWN_OPTIONS,
    SHARED_OPTIONS,
    VERIFY_OPTIONS,
    one_strategy,
    run_schedule,
    schedule_options,
)
from sagellm.cli.replay_verify import verify as verify_record
from sagellm.cli.replay_verify import verify_reads
from sagellm.cli.values import JSON_FLAG, Finite, options_by_name
from sagellm.core.current_folder import look_in_current_folder
from sagellm.core.errors import SageError
from sagellm.replay.base import DEFAULT_BLOCK_SIZE, MAX_BLOCKS, Semantics, num_blocks, shortened

MAX_COUNT = 2**31 - 1
OF_SCHEDULE = Path()  # --verify without a file


class _Misuse(click.ClickException):
    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True)


class _Numbers(click.ParamType):
    """Numbers of blocks, separated by commas."""

    name = "INTEGER,..."

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        for part in parts:
            if num_blocks(part) is None:
                self.fail(
                    f"{shortened(part)} is not a number of blocks: give integers from 1 to {MAX_BLOCKS}, such as 1000,5000.",
                    param,
                    context,
                )
        return tuple(dict.fromkeys(map(int, parts)))


class _Rates(click.ParamType):
    """`tier:number` pairs, separated by commas."""

    name = "TIER:GB/S,..."

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> dict[str, float]:
        if isinstance(value, dict):
            return value
        found = {}
        for part in value.split(","):
            tier, _, rate = part.strip().partition(":")
            try:
                found[tier] = float(rate) * 1e9
            except ValueError:
                found[tier] = 0.0
            if tier not in ("cpu", "nvme") or not 0 < found[tier] < float("inf"):
                self.fail(f"{shortened(part)} is not cpu:GB/s or nvme:GB/s, such as cpu:20,nvme:2.", param, context)
        return found


@click.command()
@click.option(
    "--trace", "trace_name", metavar="FILE|GENERATOR", help="Trace file, or a generator such as zipf:requests=10000."
)
@click.option(
    "--policy", "policies", default="lru", show_default=True, metavar="NAME,...",
    help="Eviction policies: names, or module:Class.",
)
@click.option("--capacity", "capacities", type=_Numbers(), help="Capacities in blocks; the report has a row for each.")
@click.option(
    "--semantics",
    type=click.Choice([each.value for each in Semantics]),
    default=Semantics.PREFIX.value,
    show_default=True,
    help="Whether the cache holds prefixes of requests, or independent objects.",
)
@click.option(
    "--running", type=click.IntRange(1, MAX_COUNT), default=1, show_default=True,
    help="Number of requests that run at a time.",
)
@click.option("--outputs", is_flag=True, help="Count blocks of answers while they are generated.")
@click.option(
    "--soon", type=click.IntRange(0, MAX_COUNT),
    help="Accesses within which an evicted block that returns counts as a false eviction [capacity].",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, MAX_COUNT),
    help=f"Tokens in a block [the trace's, else {DEFAULT_BLOCK_SIZE}].",
)
@click.option("--tiers", metavar="gpu:N,cpu:N,nvme:N", help="Blocks on each of several tiers, in place of --capacity.")
@click.option(
    "--migration", default="always", show_default=True, help="Migration policy between tiers: a name, or module:Class."
)
@click.option(
    "--kv-bytes-per-token",
    "token_bytes",
    type=click.IntRange(1, MAX_COUNT),
    help="KV bytes of a token, to count moved bytes [those of Qwen2.5-0.5B].",
)
@click.option(
    "--load-gb-per-s", "load_rates", type=_Rates(),
    help="Load speed of slower tiers, to estimate TTFT [loads take no time].",
)
@click.option(
    "--prefill-tokens-per-s", "prefill", type=Finite(),
    help="Prefill speed in tokens a second, to estimate TTFT [10000].",
)
@click.option(
    "--policy-options", metavar="JSON", help='Options of the policy, a JSON object; or of several: {"arc": {...}}.'
)
@click.option("--reference", is_flag=True, help="Run plain Python policies in place of native ones.")
@click.option("--no-belady", is_flag=True, help="Skip Belady's bound, and the regret that it gives.")
@click.option("--skip-bad", is_flag=True, help="Skip malformed lines and count them.")
@click.option(
    "--plot", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write plots into this folder."
)
@click.option(
    "--verify", type=click.Path(path_type=Path), is_flag=False, flag_value=OF_SCHEDULE, metavar="[LOG]",
    help="Verify the decisions in a recorded log. With --schedule LOG: those of its strategy.",
)
@click.option(
    "--reads", type=click.Path(path_type=Path), metavar="LOG",
    help="Recorded log: verify which KV blocks its sparse policy chose, and say what policies would have read.",
)
@click.option(
    "--scaling", type=click.Path(path_type=Path), metavar="LOG",
    help="Record of a manager: verify its decisions on numbers of engines.",
)
@click.option("--sparsity", metavar="NAME,...", help="Sparse policies for --reads: names, or module:Class [the log's].")
@click.option(
    "--sparsity-options", metavar="JSON", help='Options of --sparsity, a JSON object; or of several: {"quest": {...}}.'
)
@schedule_options
@JSON_FLAG
def replay(
    trace_name: str | None, verify: Path | None, schedule: Path | None, reads: Path | None, scaling: Path | None,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Replay a trace through policies, verify a recorded log, or replay a log under other strategies or sparse policies.

    FILE is Mooncake's JSON lines, an event log of the engine, or a CSV of lengths; plain or gzip. Generators are zipf,
    conversation, agentic and scan, with parameters as in zipf:requests=10000,alpha=0.8,seed=1. Policies and strategies
    in the current folder are found too.

    Exit code 0: done, or every decision was reproduced; 1: the log differs; 2: invalid options, trace or policy.
    """
    is_checked = schedule is not None and verify == OF_SCHEDULE
    ways = [trace_name, None if is_checked else verify, schedule, reads, scaling]
    if ways.count(None) != 4 or (verify == OF_SCHEDULE and not is_checked):
        raise click.UsageError(
            "give either --trace and --capacity, or --verify LOG, or --schedule LOG, or --schedule LOG --verify, or --reads "
            "LOG, or --scaling LOG."
        )
    if is_checked:
        _refuse_others("--schedule --verify", ("schedule", "verify", "as_json", *VERIFY_OPTIONS))
    elif reads is not None:
        _refuse_others("--reads", ("reads", "sparsity", "sparsity_options", "as_json"))
    elif scaling is not None:
        _refuse_others("--scaling", ("scaling", "as_json"))
    elif verify is not None:
        _refuse_others("--verify", ("verify", "as_json"))
    elif schedule is not None:
        _refuse_others("--schedule", ("schedule", *OWN_OPTIONS, *SHARED_OPTIONS))
    else:
        _refuse("--trace", (*OWN_OPTIONS, "sparsity", "sparsity_options"))
    try:
        if is_checked:
            sys.exit(verify_record("strategy", schedule, as_json, *one_strategy(given)))
        if reads is not None:
            sys.exit(verify_reads(reads, as_json, given["sparsity"], given["sparsity_options"]))
        if scaling is not None:
            sys.exit(verify_record("scaling", scaling, as_json))
        if schedule is not None:
            run_schedule(schedule, as_json, given)
            return
        if verify is not None:
            sys.exit(verify_record("kv", verify, as_json))
        _run(trace_name, as_json, **given)
    except SageError as error:
        raise _Misuse(str(error)) from None
    except MemoryError:
        raise _Misuse(
            "there is not enough memory for this; give a smaller capacity, or a trace with fewer blocks."
        ) from None


def _refuse_others(what: str, taken: tuple[str, ...]) -> None:
    """Raise UsageError if an option was given that this way of replaying does not take."""
    _refuse(what, [option.name for option in click.get_current_context().command.params if option.name not in taken])


def _refuse(what: str, names: Sequence[str]) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} has no meaning with {what}; leave it out.")


def _run(trace_name: str, as_json: bool, **given: Any) -> None:
    from sagellm.replay import report

    _check_together(given)
    trace = _read(trace_name, given)
    with nullcontext() if as_json else report.progress_bar() as told:
        rows = _rows(trace, given, told)
    files = []
    if given["plot"] is not None:
        from sagellm.replay.plots import write_plots

        files = [str(file) for file in write_plots(rows, trace.name, given["plot"])]
    if as_json:
        more = {"plots": files} if files else {}
        click.echo(json.dumps(report.document(trace, rows, **more), indent=1))
        return
    from rich.console import Console

    console, table = Console(), report.table(rows)
    console.print(report.caption(trace, rows), soft_wrap=True, highlight=False, markup=False)
    console.width = max(console.width, report.min_width(table, console))  # a long line is better than a cut number
    console.print(table)
    for line in report.errors(rows):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)


def _check_together(given: dict[str, Any]) -> None:
    if (given["capacities"] is None) == (given["tiers"] is None):
        raise click.UsageError("give --capacity, or --tiers for several tiers.")
    is_object = given["semantics"] == Semantics.OBJECT.value
    for name, alone in (("running", 1), ("outputs", False), ("tiers", None)):
        if is_object and given[name] != alone:
            raise click.UsageError(f"--{name} needs prefix semantics; objects have no running requests.")
    context = click.get_current_context()
    for name, option in (("migration", "--migration"), ("load_rates", "--load-gb-per-s")):
        if given["tiers"] is None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} needs --tiers.")
    if given["tiers"] is not None and given["outputs"]:
        raise click.UsageError("--outputs works with one tier; leave it out with --tiers.")


def _read(name: str, given: dict[str, Any]) -> Any:
    from sagellm.replay.generate import generate, is_generator
    from sagellm.replay.traces import read_trace

    if is_generator(name):
        if ":" not in name and Path(name).exists():
            raise click.UsageError(f"--trace {name} is a generator and a file here; give {name}: or ./{name}.")
        return generate(name, block_size=given["block_size"])
    is_prefix = given["semantics"] == Semantics.PREFIX.value
    return read_trace(Path(name), block_size=given["block_size"], skip_bad=given["skip_bad"], unique_parents=is_prefix)


def _rows(trace: Any, given: dict[str, Any], told: Any) -> list[Any]:
    from sagellm.replay.policies import find_contestant, policy_name
    from sagellm.replay.run import ReplayOptions
    from sagellm.replay.session import replay as replay_all
    from sagellm.replay.session import replay_tiers
    from sagellm.replay.tiered import parse_tiers

    look_in_current_folder()
    names = [policy_name(name.strip()) for name in given["policies"].split(",") if name.strip()]
    if not names:
        raise click.UsageError("--policy names no policy.")
    wanted = options_by_name("--policy-options", given["policy_options"], names, {"small_ratio": 0.2}, policy_name)
    contestants = [find_contestant(name, wanted[name], reference=given["reference"]) for name in dict.fromkeys(names)]
    optional = {
        "prefill_tokens_per_s": given["prefill"], "token_bytes": given["token_bytes"], "load_bytes_per_s": given["load_rates"],
    }  # fmt: skip
    options = ReplayOptions(
        semantics=given["semantics"], running=given["running"], outputs=given["outputs"], soon=given["soon"],
        reference=given["reference"], migration=given["migration"],
        **{name: value for name, value in optional.items() if value is not None},
    )  # fmt: skip
    if given["tiers"] is not None:
        return replay_tiers(trace, contestants, parse_tiers(given["tiers"]), options, report=told)
    for contestant in contestants:  # options that a policy does not take fail before anything runs
        if contestant.build is not None:
            contestant.build(given["capacities"][0])
    bound = not given["no_belady"]
    return replay_all(trace, contestants, given["capacities"], options, with_bound=bound, report=told)
