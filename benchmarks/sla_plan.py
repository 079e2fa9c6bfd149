"""Predictions of `sagellm plan --profile` against a run of the engine that the plan chose.

    python -m benchmarks.sla_plan [--model smollm2] [--profile FILE] [--out FILE]

The engine is profiled, a plan is made for one device, and loads around the largest one that it should carry are run for
real. Prompts are random tokens that come as a Poisson process. Points that the profile has already are not measured again.
"""

import tempfile
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
from sagellm.control_plane.sla.settings import engine_settings
from sagellm.control_plane.sla.simulate import Outcome
from sagellm.core.config import SageConfig
from sagellm.core.engines import open_engine
from sagellm.models.folder import text_config
from sagellm.replay.schedule.base import RequestTimes
from sagellm.replay.schedule.metrics import Targets

PLANNED = 200  # requests: at its largest rate a short load would be over before a queue has grown
COMPARED = ("share_in_time", "goodput_rps", "tokens_per_s", "ttft_p50_s", "tpot_mean_s")


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder.")
@click.option("--profile", "file", type=click.Path(path_type=Path), help="File of the profile, which is read and written.")
@click.option("--threads", default=1, show_default=True, help="Threads of the engine: one device.")
@click.option("--concurrency", type=Counts(1, 4096), default="1,4,12", show_default=True, help="Of the profile.")
@click.option("--profile-tokens", type=Counts(1, 1 << 20), default="64,256,768", show_default=True, help="Its prompts.")
@click.option("--ttft-ms", default=500.0, show_default=True, help="Target of the first token.")
@click.option("--itl-ms", default=40.0, show_default=True, help="Target of each further token.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Prompt of a request.")
@click.option("--output-tokens", default=32, show_default=True, help="Answer of a request.")
@click.option("--scales", default="0.6,0.9,1.3", show_default=True, help="Loads, as parts of the largest one of the plan.")
@click.option("--seconds", default=20.0, show_default=True, help="Length of a load.")
@with_output
def main(output: Output, file: Path | None, **given: Any) -> None:
    """Measure, print a table, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(given["concurrency"], given["profile_tokens"])
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
    engine = open_engine(SageConfig(**engine_settings(profile, plan.fleet, str(model))))
    loads = {}
    try:
        for scale in map(float, given["scales"].split(",")):
            load = load_of(plan.scale * scale)
            (predicted,) = Planner(profile, [load], Wanted(targets, devices=1)).run(plan.fleet)
            measured = Outcome(_run(engine, load, model), targets, engine.hooks.report()["preempted"], {})
            loads[f"{scale:g}"] = {"requests_per_s": load.rate, "requests": len(load.requests)} | _compared(predicted, measured)
    finally:
        engine.close()
    result = output.save({
        "options": {**given, "concurrency": list(grid.concurrencies), "profile_tokens": list(grid.prompt_tokens)},
        "profile_errors": {name: {kind: error.model_dump() for kind, error in each.items()}
                           for name, each in profile.errors.items()},
        "plan": _told(plan), "loads": loads,
    })  # fmt: skip
    rows = [
        (scale, name, *(f"{found[name][side]:.4g}" for side in ("predicted", "measured")), f"{found[name]['error']:+.1%}")
        for scale, found in loads.items()
        for name in COMPARED
    ]
    output.say(table(("load", "figure", "predicted", "measured", "error"), rows))
    output.finish(result)


def _told(plan: Plan) -> dict[str, Any]:
    whole = plan.to_dict()
    return {name: whole[name] for name in ("fleet", "scale", "limit", "considered")}


def _run(engine: Any, load: Load, model: Path) -> tuple[RequestTimes, ...]:
    """Return the times of the requests of a load on the engine."""
    from sagellm.engines.base import SamplingParams

    random, vocab_size = np.random.default_rng(1), int(text_config(model)["vocab_size"])
    prompts = [random.integers(0, vocab_size, each.prompt_tokens).tolist() for each in load.requests]
    params = [SamplingParams(max_new_tokens=each.num_generated, ignore_eos=True) for each in load.requests]
    engine.generate(prompts[:1], params[:1])  # buffers are made
    prompts[0] = prompts[0][::-1]  # a prompt that is cached would be quicker
    answers = engine.generate(prompts, params, [each.arrival_s for each in load.requests])
    found = []
    for asked, answer in zip(load.requests, answers, strict=True):
        times = tuple(asked.arrival_s + each for each in answer.token_s)
        found.append(RequestTimes(asked.request_id, asked.arrival_s, len(times), times[0], times[-1], times))
    return tuple(found)


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
