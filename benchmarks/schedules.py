"""Strategies in the real engine, against LMDeploy's own scheduler and each other, on the same requests.

    python -m benchmarks.schedules [--scene mixed,long,fair,models,burst] [--rounds 3] [--shape small] [--out FILE]

In bfloat16 on the CPU engine, greedy, no prefix caching, so that a request costs the same wherever it runs: random weights and
random tokens, or SmolLM2 and English. The contestants of a scene take turns, round by round, each round on new requests that
all of them get alike. Scenes:

- *mixed*: short chats with a target for the first token, and long documents, at the engine's highest load.
- *long*: streams decode while a long prompt arrives. The figure is their inter-token latency until its first token.
- *fair*: two tenants with requests waiting all the time; one sends ten times as many.
- *models*: chats of two models on a device that has room for the weights of one; a step waits `SWITCH_S` for each model that
  it needs and that is not there. Contestants: arrival order, whole requests of a model at a time, and turns of tokens.
- *burst*: requests of all lengths at once. The recorded contestants show whether `fifo`, through graph, passes and
  lowering, decides each step as LMDeploy's own scheduler. The others show its cost: CPU time of the process, and of the
  threads beside the model's. With `--threads 1`, since several compute threads spin.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contestants import Contestant, paired_ratio, summary
from benchmarks.models.real_text import RealText
from benchmarks.output import Output, json_text, with_output
from benchmarks.scheduling.engine import ENGINE, build, write_shape
from benchmarks.scheduling.measures import figures, gaps_during, shares
from benchmarks.scheduling.workloads import (
    Job,
    Source,
    burst,
    english,
    long_prompt,
    mixed,
    models,
    random_tokens,
    two_tenants,
)

RECORDED = ", recorded"
SCENES = ("mixed", "long", "fair", "models", "burst")
BY_MODEL = "benchmarks.scheduling.by_model:ByModel"
CONTESTANTS = {
    "mixed": ("fifo", "priority", "slo_aware", "hybrid"),
    "long": (ENGINE, "adaptive"),
    "fair": (ENGINE, "fair"),
    "models": ("fifo", BY_MODEL, "aegaeon"),
    "burst": (ENGINE, "fifo", f"{ENGINE}{RECORDED}", f"fifo{RECORDED}"),
}
SECONDS, CHATS_PER_S, DOCUMENTS_PER_S = 40.0, 2.0, 0.8  # the highest load of the small shape on two cores
STREAMS, STREAM_NEW, LONG_TOKENS, LONG_AT_S = 4, 160, 4096, 1.0
LIGHT_JOBS = 60
SWITCH_S, MODEL_CHATS_PER_S = 0.1, 0.5
BURST = 48


@click.command()
@click.option("--scene", "scenes", default=",".join(SCENES), show_default=True, help="Scenes, separated by commas.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of each contestant.")
@click.option(
    "--shape", type=click.Choice(["small", "0.5B", "smollm2"]), default="small", show_default=True,
    help="Shape of the random model, or a real one.",
)
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@click.option("--chats-per-s", default=CHATS_PER_S, show_default=True, help="Short chats a second in the scene mixed.")
@click.option(
    "--documents-per-s", default=DOCUMENTS_PER_S, show_default=True,
    help="Documents a second in the scene mixed.",
)
@click.option("--strategy-options", default="{}", metavar="JSON", help='Options by strategy: {"adaptive": {...}}.')
@with_output
def main(
    scenes: str, rounds: int, shape: str, threads: int, chats_per_s: float, documents_per_s: float, strategy_options: str,
    output: Output,
) -> None:  # fmt: skip
    """Measure, print, and write the result."""
    names = scenes.split(",")
    for scene in names:
        if scene not in SCENES:
            raise click.BadParameter(f"{scene!r} is no scene; known are {', '.join(SCENES)}.")
    options = read_options(strategy_options, names)
    result: dict[str, Any] = {"shape": shape, "threads": threads, "rounds": rounds}
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shape(Path(scratch), shape)
        source = english(RealText(model)) if shape == "smollm2" else random_tokens
        for scene in names:
            settings = {name: _settings(Path(scratch), scene, name) for name in CONTESTANTS[scene]}
            contestants = [
                Contestant(
                    name, build, str(model), threads, name.removesuffix(RECORDED), options.get(name.removesuffix(RECORDED), {}),
                    settings[name],
                )
                for name in CONTESTANTS[scene]
            ]
            try:
                rows = [
                    _round(contestants, _jobs(scene, seed, chats_per_s, documents_per_s, source), seed)
                    for seed in range(rounds)
                ]
            finally:
                for contestant in contestants:
                    contestant.close()
            result[scene] = REPORTS[scene](rows, settings)
            output.say(f"{scene}:\n{json_text(result[scene])}")
            output.save(result)
    output.finish(result)


def read_options(text: str, scenes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By strategy. Raises click.BadParameter: no JSON object of objects, or a strategy that is in none of the scenes."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"--strategy-options is not JSON: {error}.") from None
    if not isinstance(options, dict):
        raise click.BadParameter(
            f'--strategy-options is a JSON {type(options).__name__}; give an object by strategy: {{"adaptive": {{...}}}}.'
        )
    every = (name.removesuffix(RECORDED) for scene in scenes for name in CONTESTANTS[scene])
    known = list(dict.fromkeys(name for name in every if name != ENGINE))
    if unknown := sorted(set(options).difference(known)):
        raise click.BadParameter(f"--strategy-options names {', '.join(unknown)}; known are {', '.join(known)}.")
    for name, given in options.items():
        if not isinstance(given, dict):
            raise click.BadParameter(f"--strategy-options: {name} has {given!r}; give an object of names and values.")
    return options


def _settings(scratch: Path, scene: str, name: str) -> dict[str, Any]:
    if scene == "models":
        return {"switch_s": SWITCH_S}
    return {"record": str(scratch / f"{name}.jsonl")} if name.endswith(RECORDED) else {}


def _jobs(scene: str, seed: int, chats_per_s: float, documents_per_s: float, source: Source) -> list[Job]:
    if scene == "mixed":
        return mixed(seed, SECONDS, chats_per_s, documents_per_s, source=source)
    if scene == "long":
        return long_prompt(seed, STREAMS, STREAM_NEW, LONG_TOKENS, LONG_AT_S, source)
    if scene == "models":
        return models(seed, SECONDS, MODEL_CHATS_PER_S, source=source)
    return two_tenants(seed, LIGHT_JOBS, source=source) if scene == "fair" else burst(seed, BURST, source)


def _round(contestants: Sequence[Contestant], jobs: list[Job], seed: int) -> tuple[list[Job], dict[str, dict[str, Any]]]:
    """Each contestant is the first one now and then."""
    turn = seed % len(contestants)
    order = [*contestants[turn:], *contestants[:turn]]
    answers = {contestant.name: contestant.ask([list(job) for job in jobs]) for contestant in order}
    for name, answer in answers.items():
        if answer["faults"]:
            raise click.ClickException(f"{name} was switched off: {answer['faults']}")
    return jobs, answers


Rows = Sequence[tuple[list[Job], dict[str, dict[str, Any]]]]


def _each(rows: Rows, name: str) -> list[dict[str, Any]]:
    return [figures(jobs, answers[name]["token_s"]) for jobs, answers in rows]


def _ratios(of: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    return paired_ratio(of, to)


def report_mixed(rows: Rows, _: Any) -> dict[str, Any]:
    found = {name: _each(rows, name) for name in CONTESTANTS["mixed"]}
    table = {
        name: {
            group: {key: statistics.median(each[group][key] for each in every) for key in every[0][group]}
            for group in ("chat", "document", "all")
        }
        for name, every in found.items()
    }
    goodput = {name: [each["all"]["goodput_per_s"] for each in every] for name, every in found.items()}
    chat_p95 = {name: [each["chat"]["ttft_p95_s"] for each in every] for name, every in found.items()}
    return {
        "load": {"jobs": [len(jobs) for jobs, _ in rows], "seconds": SECONDS},
        "medians": table,
        "goodput_over_fifo": {name: _ratios(goodput[name], goodput["fifo"]) for name in found},
        "chat_ttft_p95_fifo_over": {name: _ratios(chat_p95["fifo"], chat_p95[name]) for name in found},
        "document_ttft_max_s": {
            name: max(each["document"]["ttft_max_s"] for each in every) for name, every in found.items()
        },
    }


def report_long(rows: Rows, _: Any) -> dict[str, Any]:
    gaps = {
        name: [gaps_during(jobs, answers[name]["token_s"], "stream", "prompt") for jobs, answers in rows]
        for name in CONTESTANTS["long"]
    }
    p99 = {name: [float(np.percentile(each, 99)) for each in every] for name, every in gaps.items()}
    speed = {name: [each["all"]["tokens_per_s"] for each in _each(rows, name)] for name in p99}
    first = {name: [each["prompt"]["ttft_mean_s"] for each in _each(rows, name)] for name in p99}
    return {
        "itl_p99_s": {name: summary(values) for name, values in p99.items()},
        "times_better": _ratios(p99[ENGINE], p99["adaptive"]),
        "throughput_over_engine": _ratios(speed["adaptive"], speed[ENGINE]),
        "prompt_ttft_s": {name: summary(values) for name, values in first.items()},
        "cuts": [answers["adaptive"]["chunks"] for _, answers in rows],
    }


def report_fair(rows: Rows, _: Any) -> dict[str, Any]:
    found = {
        name: [shares(jobs, answers[name]["token_s"], ("heavy", "light")) for jobs, answers in rows]
        for name in CONTESTANTS["fair"]
    }
    return {name: {"light": summary([each["light"] for each in every])} for name, every in found.items()}


def report_models(rows: Rows, _: Any) -> dict[str, Any]:
    found = {name: [each["all"] for each in _each(rows, name)] for name in CONTESTANTS["models"]}
    keys = ("met_share", "goodput_per_s", "ttft_p95_s", "itl_p50_s", "itl_p99_s", "tokens_per_s")
    met = {name: [each["goodput_per_s"] for each in every] for name, every in found.items()}
    return {
        "switch_s": SWITCH_S, "jobs": [len(jobs) for jobs, _ in rows],
        **{name: {key: summary([each[key] for each in every]) for key in keys} for name, every in found.items()},
        "goodput_over": {name: _ratios(met["aegaeon"], met[name]) for name in (BY_MODEL,) if all(met[name])},
    }  # fmt: skip


def report_burst(rows: Rows, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    steps = {name: _steps(Path(values["record"])) for name, values in settings.items() if "record" in values}
    num_steps = [len(each) for each in steps.values()]
    equal = sum(a == b for a, b in zip(*steps.values(), strict=False))
    cpu = {name: [answers[name]["cpu_s"] for _, answers in rows] for name in CONTESTANTS["burst"]}
    return {
        "steps": num_steps, "steps_equal": equal,
        "tokens_equal": all(answers["fifo"]["tokens"] == answers[ENGINE]["tokens"] for _, answers in rows),
        "cpu_over_engine": _ratios(cpu["fifo"], cpu[ENGINE]),
        "host_cpu_added_share": summary([
            (answers["fifo"]["host_cpu_s"] - answers[ENGINE]["host_cpu_s"]) / answers[ENGINE]["cpu_s"] for _, answers in rows
        ]),
    }  # fmt: skip


def _steps(record: Path) -> list[tuple[str, list[Any]]]:
    lines = (json.loads(line) for line in record.read_text().splitlines())
    return [(line["phase"], line["computed"]) for line in lines if line["event"] == "step"]


REPORTS = {"mixed": report_mixed, "long": report_long, "fair": report_fair, "models": report_models, "burst": report_burst}

if __name__ == "__main__":
    main()
