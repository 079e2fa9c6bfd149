"""Runs a benchmark from a configuration and writes one result: JSON, samples, a report and plots.

    python -m benchmarks.runner --config FILE | --preset NAME | --scenario NAME  --out DIR
    python -m benchmarks.runner quality [--llama PYTHON] [--out DIR]       # see benchmarks/quality.py

Contestants are all up at once and asked in turn (A B B A), so that what else the machine does hits all alike. Ctrl-C and a
server that dies leave a valid partial result. Exit codes: 0 complete, 1 partial, failed or nothing valid, 2 misuse.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.config import BenchmarkConfig, Closed, load_config, make_config, preset, preset_names
from benchmarks.environment import environment
from benchmarks.errors import BenchmarkError, ServerDied
from benchmarks.load.samples import read_samples
from benchmarks.metrics.classes import definitions_with
from benchmarks.metrics.comm import operation_definitions
from benchmarks.metrics.flops import peak_flops
from benchmarks.metrics.guesses import place_definitions
from benchmarks.output import ends_in_order, result_stream
from benchmarks.report.markdown import markdown
from benchmarks.result import Definition, Result, Run
from benchmarks.scenarios import component, component_names
from benchmarks.scenarios.serve import ServeScenario, Subject
from benchmarks.server import Server, interpreter
from sagellm.core.cached_folder import write_whole
from sagellm.core.errors import SageError
from sagellm.models import ModelError, find_model, prepare_model

UNITS = 1000  # of the progress bar, a run
T = TypeVar("T")


class BenchmarkRunner:
    """One benchmark. `run(config)` returns the result and leaves it, with everything else, in the folder `out`."""

    def __init__(self, out: Path, show_progress: bool | None = None) -> None:
        self._out = out
        self._show = sys.stderr.isatty() if show_progress is None else show_progress

    def run(self, config: BenchmarkConfig) -> Result:
        """Raises BenchmarkError before anything is measured; afterwards a result of status partial or failed tells."""
        components = {name: component(name, options) for name, options in config.components.items()}
        for side in config.contestants:
            for name, options in side.components.items():
                component(name, options)
        given, config = config, _found_models(config)
        machine = environment({side.name: side.checkout for side in config.contestants})
        self._make_folder()
        result = Result(
            name=config.name,
            status="partial",
            reason="still running",
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            duration_s=0.0,
            config=given.model_dump(mode="json"),  # names of models, not folders of this machine
            environment=machine,
            definitions={},
            runs=[],
        )
        start_s = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                bar = stack.enter_context(_Bar(self._show, self._num_runs(config)))
                runs = stack.enter_context(contextlib.closing(self._runs(config, components, result, bar)))
                for run, definitions in runs:
                    result.runs.append(run)
                    result.definitions |= {name: definitions[name] for name in run.metrics}
                    result.duration_s = time.monotonic() - start_s
                    result.write(self._out / "result.json")
            result.status, result.reason = "complete", ""
        except KeyboardInterrupt:
            result.status, result.reason = "partial", "stopped by its user"
        except ServerDied as error:
            result.status, result.reason = "failed", str(error)
        except SageError as error:
            if not result.runs:  # misuse that only a running server could show; nothing half-written stays
                shutil.rmtree(self._out)
                raise
            result.status, result.reason = "failed", str(error)
        result.duration_s = time.monotonic() - start_s
        self._report(result)
        return result

    def _runs(
        self, config: BenchmarkConfig, components: dict[str, Any], result: Result, bar: "_Bar"
    ) -> Iterator[tuple[Run, dict[str, Definition]]]:
        if config.workload is not None:
            for launch in range(config.launches):
                with contextlib.ExitStack() as servers:
                    subjects = self._subjects(config, result, servers, launch)
                    for run in self._rounds(config, subjects, launch, bar):
                        found = operation_definitions(run.metrics) | place_definitions(run.metrics)
                        yield run, definitions_with(config.workload.classes) | found
        for number in range(_component_runs(config)):
            for name, module in components.items():
                for side in _in_turn(config.contestants, number):
                    options = {**module.OPTIONS, **config.components[name], **side.components.get(name, {})}
                    with bar.one(f"{name} {side.name}, round {number + 1}"):
                        run = Run(
                            contestant=side.name, scenario=name, round=number, launch=number, seed=config.seed * 1000 + number
                        )
                        try:
                            run.metrics = _run_component(side.checkout, name, run.seed, options)
                        except BenchmarkError as error:  # a scenario is anybody's file; the other ones go on
                            run.status, run.reason = "failed", str(error)
                        yield run, module.DEFINITIONS

    def _rounds(self, config: BenchmarkConfig, subjects: list[Subject], launch: int, bar: "_Bar") -> Iterator[Run]:
        scenarios = self._scenarios(config)
        for number in range(launch * config.rounds, (launch + 1) * config.rounds):
            for scenario in scenarios:
                for subject in _in_turn(subjects, number):
                    with bar.one(f"{scenario.name} {subject.contestant.name}, round {number + 1}") as progress:
                        run = scenario.run(subject, number, progress)
                    run.launch = launch
                    yield run

    def _subjects(
        self, config: BenchmarkConfig, result: Result, servers: contextlib.ExitStack, launch: int
    ) -> list[Subject]:
        """Servers that are ready, in the order of the config; none is always the first to start. Raises ServerDied."""
        subjects: dict[str, Subject] = {}
        for side in _in_turn(config.contestants, launch):
            sage = config.sage_config(side)
            if sage.tensor_parallel > 1:
                sage = sage.model_copy(update={"comm_metrics": True})
                sage.__pydantic_fields_set__.add("comm_metrics")
            server = Server(sage, side.checkout)
            servers.callback(server.close)
            facts = server.ready()
            key = (facts.get("device", "cpu"), facts.get("dtype", "auto"))
            threads = min(sage.threads * sage.tensor_parallel, _cores()) if sage.threads else _cores()
            peak, name = _peak(*key, threads, config.peak_tflops)
            result.environment.setdefault("peak", {})[side.name] = {"flops": peak, "name": name}
            devices = 1 if key[0] == "cpu" else sage.tensor_parallel  # a CPU's workers share one machine
            subjects[side.name] = Subject(
                side, server, facts, Path(sage.model), sage.block_size, devices, peak, name
            )
        return [subjects[side.name] for side in config.contestants]

    def _scenarios(self, config: BenchmarkConfig) -> list[ServeScenario]:
        samples = self._out / "samples"
        if not config.sweep:
            return [ServeScenario(config, config.workload, "serve", samples)]
        scenarios = []
        for point, users in enumerate(config.sweep):
            workload = config.workload.model_copy(update={"arrivals": Closed(concurrency=users)})
            scenarios.append(ServeScenario(config, workload, f"serve@{users}", samples, point))
        return scenarios

    def _num_runs(self, config: BenchmarkConfig) -> int:
        served = max(1, len(config.sweep)) * config.rounds * config.launches if config.workload is not None else 0
        return (served + len(config.components) * _component_runs(config)) * len(config.contestants)

    def _make_folder(self) -> None:
        require_empty(self._out)
        try:
            (self._out / "samples").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchmarkError(f"cannot write to {self._out}: {error.strerror}") from None

    def _report(self, result: Result) -> None:
        result.write(self._out / "result.json")

        from benchmarks.report.plots import write_plots  # matplotlib takes a second to load

        def samples_of(run: Run) -> Any:
            return read_samples(self._out / run.samples) if run.samples else None

        (self._out / "plots").mkdir(exist_ok=True)
        plots = write_plots(result, self._out / "plots", samples_of, self._out) if result.runs else []
        write_whole(self._out / "result.csv", result.csv_text())
        (self._out / "report.md").write_text(markdown(result, [plot.relative_to(self._out) for plot in plots]))


class _Bar:
    """A progress bar over the runs, with the time left; nothing where there is no terminal."""

    def __init__(self, show: bool, num_runs: int) -> None:
        columns = (TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not show)
        self._task = self._progress.add_task("starting", total=num_runs * UNITS)
        self._done = 0

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def one(self, text: str) -> Iterator[Any]:
        self._progress.update(self._task, description=text)
        yield lambda done, of: self._progress.update(self._task, completed=self._done + UNITS * done / max(of, 1))
        self._done += UNITS
        self._progress.update(self._task, completed=self._done)


def require_empty(out: Path) -> None:
    """Raises BenchmarkError for a folder that holds something, which nothing is to be written over."""
    if out.is_dir() and any(out.iterdir()):
        raise BenchmarkError(f"{out} is not empty; choose another --out")


def _found_models(config: BenchmarkConfig) -> BenchmarkConfig:
    """The config with the whole paths of its models: other checkouts may know other names, and another default.

    Raises BenchmarkError for one that no server could load, before one is started.
    """

    def found(server: dict[str, Any], whose: str) -> dict[str, Any]:
        if config.workload is None or (whose and server.get("model") is None):
            return server
        try:
            folder = prepare_model(find_model(server.get("model")))
        except ModelError as error:
            raise BenchmarkError(f"{whose}server.model: {error}") from None
        return server | {"model": str(folder.resolve())}

    sides = tuple(
        side.model_copy(update={"server": found(side.server, f"{side.name}: ")}) for side in config.contestants
    )
    return config.model_copy(update={"server": found(config.server, ""), "contestants": sides})


def _in_turn(subjects: Sequence[T], number: int) -> list[T]:
    """A B B A ...; with more than two the row is turned, so that none stands at an end more often than the others."""
    turn = number // 2 % len(subjects)
    row = [*subjects[turn:], *subjects[:turn]]
    return row if number % 2 == 0 else row[::-1]


@lru_cache  # a launch more must not measure it anew, or MFU would change with the divisor
def _peak(device: str, dtype: str, threads: int, given_tflops: float | None) -> tuple[float | None, str]:
    if given_tflops is not None:
        return given_tflops * 1e12, "given in the config"
    try:
        return _apart(peak_flops, device, dtype, threads)
    except BenchmarkError as error:
        return None, str(error)


def _apart(function: Any, *args: Any) -> Any:
    """The function's result, from a process of its own: its threads and memory are gone afterwards."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _run_component(checkout: Path | None, name: str, seed: int, options: dict[str, Any]) -> dict[str, float]:
    """Measure once, with the checkout's code, in a process of its own. Raises BenchmarkError with its last words."""
    command = [interpreter(checkout), "-m", "benchmarks.scenarios", name, "--seed", str(seed), "--options", json.dumps(options)]
    done = subprocess.run(command, cwd=checkout or Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchmarkError(f"{name} ended with code {done.returncode}: {words[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def _component_runs(config: BenchmarkConfig) -> int:
    """Each run of a component is a process of its own, so it counts as a launch."""
    return max(config.rounds, config.launches)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _choose(config: Path | None, name: str | None, scenario: str | None) -> BenchmarkConfig:
    given = [value for value in (config, name, scenario) if value is not None]
    if len(given) != 1:
        raise BenchmarkError("give one of --config, --preset and --scenario")
    if config is not None:
        return load_config(config)
    if name is not None:
        return preset(name)
    if scenario == "serve":
        return preset("ci")
    component(scenario, {})
    return make_config({"name": scenario, "components": {scenario: {}}})


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False),
    help="Config of the benchmark: a YAML file such as those in benchmarks/configs.",
)
@click.option("--preset", "name", help=f"One of {', '.join(preset_names())}.")
@click.option("--scenario", help=f"serve, or one of {', '.join(component_names())}.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of each launch; default: the config's.")
@click.option("--launches", type=click.IntRange(min=1), help="Times that the servers start; default: the config's.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True,
    help="New or empty folder for the result, report, plots and samples.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    config: Path | None, name: str | None, scenario: str | None, rounds: int | None, launches: int | None, out: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Run a benchmark."""
    with ends_in_order(), result_stream(as_json) as stream:  # a job that is called off keeps what it has, too
        result = _run(config, name, scenario, rounds, launches, out)
        click.echo(result.model_dump_json(by_alias=True) if as_json else (out / "report.md").read_text(), file=stream)
    sys.exit(0 if result.status == "complete" and any(run.status == "valid" for run in result.runs) else 1)


def _run(
    config: Path | None, name: str | None, scenario: str | None, rounds: int | None, launches: int | None, out: Path
) -> Result:
    try:
        chosen = _choose(config, name, scenario)
        if rounds is not None:
            chosen = chosen.model_copy(update={"rounds": rounds})
        if launches is not None:
            chosen = chosen.model_copy(update={"launches": launches})
        return BenchmarkRunner(out).run(chosen)
    except SageError as error:
        click.echo("\n".join(f"error: {line}" for line in str(error).splitlines()), err=True)
        sys.exit(2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["quality"]:
        from benchmarks.quality import main as quality

        quality(sys.argv[2:], prog_name="python -m benchmarks.runner quality")
    main()
