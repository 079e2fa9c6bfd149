"""`sagellm replay --schedule`: replay a recorded run under other strategies, on a virtual clock."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sagellm.cli.values import Finite, options_by_name
from sagellm.core.current_folder import look_in_current_folder

__all__ = ["OWN_OPTIONS", "SHARED_OPTIONS", "VERIFY_OPTIONS", "one_strategy", "run_schedule", "schedule_options"]

OWN_OPTIONS = ("strategies", "strategy_options", "ttft_slo_ms", "tpot_slo_ms", "speedup", "decisions")
SHARED_OPTIONS = ("as_json", "skip_bad", "plot")  # with other ways of replaying
EXAMPLE = {"ageing_s": 2.0}  # options of a strategy
VERIFY_OPTIONS = ("strategies", "strategy_options")

_OPTIONS = (
    click.option(
        "--schedule", type=click.Path(path_type=Path), metavar="LOG",
        help="Recorded log to replay under other scheduling strategies.",
    ),
    click.option(
        "--strategy", "strategies", default="engine", show_default=True, metavar="NAME,...",
        help="Scheduling strategies: names, module:Class, or engine for the engine's own choice.",
    ),
    click.option(
        "--strategy-options", metavar="JSON",
        help='Options of the strategy, a JSON object; or of several: {"adaptive": {...}}.',
    ),
    click.option("--ttft-slo-ms", type=Finite(), help="Target for the first token, in ms, of requests without one."),
    click.option(
        "--tpot-slo-ms", type=Finite(), help="Target for each further token on average, in ms, of requests without one."
    ),
    click.option(
        "--speedup", type=Finite(), default=1.0, show_default=True,
        help="Factor by which requests arrive faster than recorded.",
    ),
    click.option(
        "--decisions", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="File for every decision with its inputs and reason; several strategies get a file each.",
    ),
)  # fmt: skip


def schedule_options(command: Callable) -> Callable:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def run_schedule(log_path: Path, as_json: bool, given: dict[str, Any]) -> None:
    """Replay the log and print the report.

    Raises:
        SageError: the log or a strategy cannot be used.
        UsageError: invalid options.
    """
    from sagellm.replay.report import min_width, progress_bar
    from sagellm.replay.schedule import report
    from sagellm.replay.schedule.decisions import write_decisions
    from sagellm.replay.schedule.log import read_log
    from sagellm.replay.schedule.metrics import Targets
    from sagellm.replay.schedule.session import replay_schedule

    look_in_current_folder()
    names = _names(given["strategies"])
    strategies = options_by_name("--strategy-options", given["strategy_options"], names, EXAMPLE)
    targets = Targets(**{
        f"{what}_s": given[f"{what}_slo_ms"] / 1e3 for what in ("ttft", "tpot") if given[f"{what}_slo_ms"] is not None
    })  # fmt: skip
    log = read_log(log_path, skip_bad=given["skip_bad"])
    with nullcontext() if as_json else progress_bar() as told:
        found = replay_schedule(
            log, strategies, targets=targets, speedup=given["speedup"], keep_decisions=given["decisions"] is not None,
            report=told,
        )  # fmt: skip
    files = []
    if given["decisions"] is not None:
        for name, lines in found.decisions.items():
            files.append(_file_of(given["decisions"], name, len(names)))
            write_decisions(files[-1], lines)
    if given["plot"] is not None:
        files += report.write_plot(found, given["plot"])
    if as_json:
        click.echo(json.dumps({**found.to_dict(), "files": [str(file) for file in files]}, indent=1))
        return
    from rich.console import Console

    console, table = Console(), report.table(found)
    for line in report.caption(found):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.width = max(console.width, min_width(table, console))
    console.print(table)
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True, highlight=False, markup=False)


def one_strategy(given: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """Return (name, options) of the strategy to ask again, None for the one that made the log.

    Raises:
        UsageError: several strategies, or options without a strategy.
    """
    if click.get_current_context().get_parameter_source("strategies") is not ParameterSource.COMMANDLINE:
        if given["strategy_options"] is not None:
            raise click.UsageError("--strategy-options goes with --strategy; the log has the options of its own strategy.")
        return None, None
    from sagellm.replay.schedule.base import ENGINE

    names = _names(given["strategies"])
    if len(names) > 1 or names == [ENGINE]:
        raise click.UsageError(f"--strategy is {', '.join(names)}; with --verify name one strategy.")
    return names[0], options_by_name("--strategy-options", given["strategy_options"], names, EXAMPLE)[names[0]]


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise click.UsageError("--strategy names no strategy.")
    return names


def _file_of(file: Path, name: str, num_names: int) -> Path:
    if num_names == 1:
        return file
    safe = "".join(char if char.isalnum() or char in "_-." else "-" for char in name)
    return file.with_name(f"{file.stem}-{safe}{file.suffix}")
