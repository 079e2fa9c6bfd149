"""Predictions of `sagellm plan --profile` against a run of the engine that the plan chose.

    python -m benchmarks.sla_plan [--model smollm2] [--profile FILE] [--out FILE]

The engine is profiled, a plan is made for one device, and loads around the largest one that it should carry are run for
real. Prompts are random tokens that come as a Poisson process. Points that the profile has already are not measured again.

A machine that others use too changes its speed from one second to the next. So each load is also predicted with the times of
the profile multiplied by the speed of the run at that moment: the steps' own time over the profile's. The error that is left
is that of the queues and the schedule.
"""

import bisect
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, table, with_output
from sagellm.cli.values import Counts
from sagellm.control_plane.sla.choose import Plan, Planner, Wanted
from sagellm.control_plane.sla.load import Load, read_load
from sagellm.control_plane.sla.measure import Grid, measure_profile
from sagellm.control_plane.sla.profile import SetupCosts, SLAProfile
from sagellm.control_plane.sla.settings import engine_settings
from sagellm.control_plane.sla.simulate import Fleet, Outcome, simulate
from sagellm.core.config import SageConfig
from sagellm.core.engines import open_engine
from sagellm.core.hooks import Phase, Plugin, StepResult
from sagellm.core.step_times import num_pairs
from sagellm.models.folder import text_config
from sagellm.replay.schedule.base import RequestTimes
from sagellm.replay.schedule.metrics import Targets

PLANNED = 200  # requests: at its largest rate a short load would be over before a queue has grown
WATCH = "benchmarks.sla_plan:StepWatch"
WAYS, SIDES = ("figures", "at_its_speed"), ("predicted", "measured")
AVERAGED = 5  # steps of a speed
COMPARED = ("share_in_time", "goodput_rps", "tokens_per_s", "ttft_p50_s", "tpot_mean_s")


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder.")
@click.option("--profile", "file", type=click.Path(path_type=Path), help="File of the profile, which is read and written.")
@click.option("--threads", default=1, show_default=True, help="Threads of the engine: one device.")
@click.option("--concurrency", type=Counts(1, 4096), default="1,4,12", show_default=True,
              help="Numbers of requests at once in the profile.")  # fmt: skip
@click.option("--profile-tokens", type=Counts(1, 1 << 20), default="64,256,768", show_default=True,
              help="Lengths of prompts in the profile.")  # fmt: skip
@click.option("--profile-rounds", default=5, show_default=True, help="Measurements of each point of the profile.")
@click.option("--ttft-ms", default=500.0, show_default=True, help="Target of the first token.")
@click.option("--itl-ms", default=40.0, show_default=True, help="Target of each further token.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Prompt of a request.")
@click.option("--output-tokens", default=32, show_default=True, help="Answer of a request.")
@click.option("--scales", default="0.6,1,1.3", show_default=True, help="Loads, as parts of the largest one of the plan.")
@click.option("--seconds", default=20.0, show_default=True, help="Length of a load.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each load.")
@with_output
def main(output: Output, file: Path | None, **given: Any) -> None:
    """Measure, print a table, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(given["concurrency"], given["profile_tokens"], rounds=given["profile_rounds"])
        settings = {"device": "cpu", "threads": given["threads"]}
        profile = measure_profile(given["model"], file or Path(folder) / "profile.json", grid, settings)
    targets = Targets(given["ttft_ms"] / 1e3, given["itl_ms"] / 1e3)
    lengths = {name: given[name] for name in ("prompt_tokens", "output_tokens")}

    def load_of(rate: float) -> Load:
        return read_load(str(rate), num_requests=max(2, round(rate * given["seconds"])), **lengths)

    long_one = read_load("1", num_requests=PLANNED, **lengths)
    plan = Planner(profile, [long_one], Wanted(targets, devices=1)).choose()
    if not plan.meets:
        raise click.ClickException(f"one request a second misses the targets already: {plan.limit}. Give longer ones.")
    model = model_folder(given["model"])
    engine = open_engine(SageConfig(**engine_settings(profile, plan.fleet, str(model)), plugins=[WATCH]))
    scales = [f"{float(each):g}" for each in given["scales"].split(",")]
    loads = {scale: load_of(plan.scale * float(scale)) for scale in scales}
    runs: dict[str, list[dict[str, Any]]] = {scale: [] for scale in scales}
    try:
        for _ in range(given["rounds"]):
            for scale, load in loads.items():
                (predicted,) = Planner(profile, [load], Wanted(targets, devices=1)).run(plan.fleet)
                times, speed = _run(engine, load, model, profile, seed=sum(map(len, runs.values())))
                measured = Outcome(times, targets, engine.hooks.report()["preempted"], {})
                runs[scale].append({
                    "slowdown": speed.mean, "figures": _compared(predicted, measured),
                    "at_its_speed": _compared(_simulated(load, plan.fleet, profile, speed, targets), measured),
                })  # fmt: skip
    finally:
        engine.close()
    result = output.save({
        "options": {**given, "concurrency": list(grid.concurrencies), "profile_tokens": list(grid.prompt_tokens)},
        "profile_errors": {name: {kind: error.model_dump() for kind, error in each.items()}
                           for name, each in profile.errors.items()},
        "profile_slowdown": profile.slowdown, "plan": _told(plan),
        "loads": {
            scale: {
                "requests_per_s": load.rate, "requests": len(load.requests), "runs": runs[scale],
                "errors": {way: {name: _median_error(runs[scale], way, name) for name in COMPARED} for way in WAYS},
            } for scale, load in loads.items()
        },
    })  # fmt: skip
    rows = [
        (scale, name, *(f"{np.median([run['figures'][name][side] for run in runs[scale]]):.4g}" for side in SIDES),
         *(f"{_median_error(runs[scale], way, name):+.1%}" for way in WAYS))
        for scale in scales for name in COMPARED
    ]  # fmt: skip
    output.say(f"slowdown of the profile {profile.slowdown:.2f}, of the runs "
               + ", ".join(f"{run['slowdown']:.2f}" for scale in scales for run in runs[scale]))  # fmt: skip
    output.say(table(("load", "figure", *SIDES, "error", "error at its speed"), rows))
    output.finish(result)


class StepWatch(Plugin):
    """Keeps the times of the steps of the engine of this process."""

    steps: list[StepResult] = []  # noqa: RUF012

    def on_step_end(self, result: StepResult) -> None:
        self.steps.append(result)


class Speed:
    """Costs of a profile at the speed that a run had.

    Args:
        steps: of the run.
        begun_s: when it began, on their clock.
    """

    def __init__(self, steps: Sequence[StepResult], begun_s: float, profile: SLAProfile) -> None:
        self._costs = SetupCosts(profile.of((1, 0)))
        timed = [each for each in steps if each.duration_s > 0]
        took = np.array([each.duration_s for each in timed])
        wanted = np.array([self._expected_s(each) for each in timed])
        self.mean = float(took.sum() / wanted.sum())
        near = np.ones(AVERAGED)
        self._factors = np.convolve(took, near, "same") / np.convolve(wanted, near, "same")
        self._ends = [each.end_s - begun_s for each in timed]

    def _expected_s(self, step: StepResult) -> float:
        attention: float = step.num_context_tokens
        if step.phase is Phase.PREFILL:
            attention = sum(num_pairs(new, 0) for _, new in step.computed)
        return self._costs.seconds(step.phase, step.num_requests, step.num_tokens, attention)

    def seconds(self, phase: Phase, num_requests: int, num_tokens: int, attention: float, now_s: float = 0.0) -> float:
        """Return the seconds of a step that begins then, as `StepCosts`."""
        at = min(bisect.bisect_left(self._ends, now_s), len(self._ends) - 1)
        return float(self._factors[at]) * self._costs.seconds(phase, num_requests, num_tokens, attention)


def _simulated(load: Load, fleet: Fleet, profile: SLAProfile, speed: Speed, targets: Targets) -> Outcome:
    sizes = {name: int(profile.facts[name]) for name in ("max_prefill_tokens", "block_size")}
    return simulate(load, fleet, speed, targets, **sizes)


def _median_error(runs: Sequence[dict[str, Any]], way: str, name: str) -> float:
    """Return the relative error of the median prediction to the median run."""
    ours, theirs = (float(np.median([run[way][name][side] for run in runs])) for side in SIDES)
    return ours / theirs - 1 if theirs else float(ours > 0)


def _told(plan: Plan) -> dict[str, Any]:
    whole = plan.to_dict()
    return {name: whole[name] for name in ("fleet", "scale", "limit", "considered")}


def _run(engine: Any, load: Load, model: Path, profile: SLAProfile, seed: int) -> tuple[tuple[RequestTimes, ...], Speed]:
    """Return the times of the requests of a load on the engine, and its speed."""
    from benchmarks.sla_plan import StepWatch as Watch  # that of the engine, also where this file is the program
    from sagellm.engines.base import SamplingParams

    random, vocab_size = np.random.default_rng(seed), int(text_config(model)["vocab_size"])
    prompts = [random.integers(0, vocab_size, each.prompt_tokens).tolist() for each in load.requests]
    params = [SamplingParams(max_new_tokens=each.num_generated, ignore_eos=True) for each in load.requests]
    engine.generate([random.integers(0, vocab_size, len(prompts[0])).tolist()], params[:1])  # buffers are made
    Watch.steps.clear()
    begun_s = time.perf_counter()
    answers = engine.generate(prompts, params, [each.arrival_s for each in load.requests])
    speed = Speed(Watch.steps, begun_s, profile)
    found = []
    for asked, answer in zip(load.requests, answers, strict=True):
        times = tuple(asked.arrival_s + each for each in answer.token_s)
        found.append(RequestTimes(asked.request_id, asked.arrival_s, len(times), times[0], times[-1], times))
    return tuple(found), speed


def _compared(predicted: Outcome, measured: Outcome) -> dict[str, Any]:
    """Return each figure as predicted and as measured, and predicted / measured - 1."""
    ours, theirs = predicted.to_dict(), measured.to_dict()
    return {
        name: {
            "predicted": ours[name], "measured": theirs[name],
            "error": ours[name] / theirs[name] - 1 if theirs[name] else float(ours[name] > 0),
        }
        for name in COMPARED
    }  # fmt: skip


if __name__ == "__main__":
    main()
