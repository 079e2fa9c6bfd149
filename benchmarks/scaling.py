"""Goodput of a fleet that a scaling policy resizes, against fleets of a fixed size, on the virtual clock; and for real.

    python -m benchmarks.scaling [--profile FILE] [--out FILE]
    python -m benchmarks.scaling --real [--model demo] [--minutes 5] [--out FILE]

The rate of Poisson arrivals doubles and halves in steps of equal length. A fixed fleet has the mean size of the scaled one:
since that is no whole number, its goodput lies between those of the sizes below and above, each in its best split. `--real`
profiles the model, runs the load on a manager of real engines, and compares it with the simulator.
"""

import contextlib
import functools
import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.load.plan import Plan, PlannedRequest
from benchmarks.load.samples import read_samples
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, table, with_output
from sagellm.control_plane.config import ScalingConfig
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.registry import make_scaler
from sagellm.control_plane.scaling import ScalingLoop
from sagellm.control_plane.scaling_replay import verify_scaling
from sagellm.control_plane.sla.elastic import Elastic, ScaledPool, oscillations, simulate_scaling
from sagellm.control_plane.sla.load import Load
from sagellm.control_plane.sla.measure import Grid, measure_profile
from sagellm.control_plane.sla.profile import SetupCosts, SLAProfile, read_profile
from sagellm.control_plane.sla.settings import engine_settings
from sagellm.control_plane.sla.simulate import Fleet, Outcome
from sagellm.models.folder import text_config
from sagellm.replay.schedule.base import RecordedRequest, RequestTimes
from sagellm.replay.schedule.metrics import Targets

RESULTS = Path(__file__).parent / "results"
SPAN_S = 60.0
COMPARED = ("share_in_time", "goodput_rps", "ttft_p50_s", "tpot_mean_s", "engines")


@dataclass(frozen=True)
class Setting:
    """Everything of a run but its load."""

    profile: SLAProfile
    targets: Targets
    scaling: ScalingConfig
    start_s: float
    fleet: Fleet

    @functools.cached_property
    def costs(self) -> SetupCosts:
        return self.profile.costs((1, 0))

    def run(self, load: Load, engines: dict[str, int] | None = None) -> Elastic:
        """Run a load; `engines`: role -> a fixed number of them, or None for the scaled pool."""
        config = self.scaling if engines is None else ScalingConfig(policy="fixed", max=self.scaling.max)
        begin = {"hybrid": self.scaling.min} if engines is None else engines
        pools = {
            role: ScaledPool(ScalingLoop(make_scaler(config.policy, **config.options), config), config, number, self.start_s)
            for role, number in begin.items()
        }
        limits = {"max_prefill_tokens": int(self.profile.facts["max_prefill_tokens"])}
        return simulate_scaling(load, self.fleet, self.costs, self.targets, pools, **limits)


@click.command()
@click.option("--profile", "file", type=click.Path(path_type=Path), help="Profile [that of SmolLM2; with --real a new one].")
@click.option("--steps", default="1,2,4,8,4,2", show_default=True, help="Rates, as multiples of --rate, in steps of a load.")
@click.option("--also", default="1,2,1,2,1,2", show_default=True, help="Steps of a second load, with --also-rate.")
@click.option("--rate", default=1.5, show_default=True, help="Requests a second of step 1.")
@click.option("--also-rate", default=4.0, show_default=True, help="Requests a second of step 1 of the second load.")
@click.option("--minutes", default=30.0, show_default=True, help="Length of a load.")
@click.option("--prompt-tokens", default=256, show_default=True, help="Prompt of a request.")
@click.option("--output-tokens", default=64, show_default=True, help="Answer of a request.")
@click.option("--ttft-ms", default=500.0, show_default=True, help="Target of the first token.")
@click.option("--itl-ms", default=40.0, show_default=True, help="Target of each further token, on average.")
@click.option("--batch", default=8, show_default=True, help="Requests that run at once on an engine.")
@click.option("--engines", default=8, show_default=True, help="Largest number of engines.")
@click.option("--interval-s", default=10.0, show_default=True, help="Seconds from a decision to the next.")
@click.option("--cooldown-s", default=30.0, show_default=True, help="Cool-down after a change.")
@click.option("--down-after", default=6, show_default=True, help="Decisions in a row before an engine is given up.")
@click.option("--start-s", type=float, help="Seconds that an engine starts [as in results/serve_startup.json].")
@click.option("--real", is_flag=True, help="Run the load on real engines behind a manager too.")
@click.option("--model", default="demo", show_default=True, help="Model of --real.")
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@with_output
def main(output: Output, file: Path | None, real: bool, **given: Any) -> None:
    """Run, print a table, and write the result."""
    if real:
        output.finish(_real(output, file, given))
        return
    profile = read_profile(file or RESULTS / "sla_profile_smollm2.json")
    start_s = given["start_s"]
    if start_s is None:
        start_s = json.loads((RESULTS / "serve_startup.json").read_text())["starts"]["later start"]["ready_s"]["median"]
    setting = _setting(profile, given, start_s)
    loads = {steps: load_of(steps, rate, given) for steps, rate in
             ((given["steps"], given["rate"]), (given["also"], given["also_rate"])) if steps}  # fmt: skip
    found = {steps: _against_fixed(output, setting, load) for steps, load in loads.items()}
    output.finish({"options": given | {"start_s": start_s}, "loads": found})


def load_of(steps: str, rate: float, given: dict[str, Any]) -> Load:
    """Return Poisson arrivals whose rate changes in steps of equal length."""
    random, rows = np.random.default_rng(given["seed"]), []
    factors = [float(each) for each in steps.split(",")]
    each_s = 60 * given["minutes"] / len(factors)
    for number, factor in enumerate(factors):
        at_s = 0.0
        while (at_s := at_s + random.exponential(1 / (rate * factor))) < each_s:
            rows.append(number * each_s + at_s)
    lengths = given["prompt_tokens"], given["output_tokens"]
    return Load(steps, tuple(RecordedRequest(number, at_s - rows[0], *lengths) for number, at_s in enumerate(rows)))


def _setting(profile: SLAProfile, given: dict[str, Any], start_s: float) -> Setting:
    options = {"profile": profile.model_dump(mode="json"), "max_batch_size": given["batch"]}
    options |= {name: given[name] for name in ("ttft_ms", "itl_ms")}
    names = ("interval_s", "cooldown_s", "down_after")
    scaling = ScalingConfig(policy="sla", options=options, max=given["engines"], **{name: given[name] for name in names})
    block_size = int(profile.facts["block_size"])
    blocks = given["batch"] * (-(-(given["prompt_tokens"] + given["output_tokens"]) // block_size) + 1)
    fleet = Fleet(1, max_batch_size=given["batch"], kv_blocks=max(16, blocks))
    return Setting(profile, Targets(given["ttft_ms"] / 1e3, given["itl_ms"] / 1e3), scaling, start_s, fleet)


def _against_fixed(output: Output, setting: Setting, load: Load) -> dict[str, Any]:
    """Return the figures of the scaled fleet, and of fixed ones of about its size."""
    scaled = setting.run(load)
    sizes = sorted({math.floor(scaled.engines), math.ceil(scaled.engines)} - {0})
    fixed: dict[str, dict[str, float]] = {}
    best = {}
    for size in sizes:
        ways = {f"{size}": {"hybrid": size}}
        ways |= {f"{part} prefill + {size - part} decode": {"prefill": part, "decode": size - part} for part in range(1, size)}
        for name, engines in ways.items():
            fixed[name] = _figures(setting.run(load, engines))
        best[size] = max(fixed[name]["goodput_rps"] for name in ways)
    low, high = best[sizes[0]], best[sizes[-1]]
    same = low + (high - low) * (scaled.engines - sizes[0]) / max(1, sizes[-1] - sizes[0])
    told = _figures(scaled) | _changes(scaled, setting)
    ratios = {"over_fixed_of_same_size": told["goodput_rps"] / same} | {
        f"over_fixed_{size}": told["goodput_rps"] / value for size, value in best.items()
    }
    rows = [(name, *(f"{row[each]:.3f}" for each in COMPARED)) for name, row in {"scaled": told, **fixed}.items()]
    output.say(f"load {load.name}: {len(load.requests)} requests, {load.rate:.2f} a second")
    output.say(table(("engines", *COMPARED), rows))
    output.say(f"changes: {told['changes']}, back within two cool-downs: {told['oscillations']}; "
               + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))  # fmt: skip
    return {
        "requests": len(load.requests), "requests_per_s": load.rate, "scaled": told, "fixed": fixed,
        "goodput_of_same_size_rps": same, **ratios,
    }  # fmt: skip


def _figures(run: Elastic) -> dict[str, float]:
    told = run.outcome.to_dict() | {"engines": run.engines}
    return {name: told[name] for name in (*COMPARED, "ttft_p95_s", "tpot_p99_s")}


def _changes(run: Elastic, setting: Setting) -> dict[str, Any]:
    changes = run.changes("hybrid")
    return {
        "changes": len(changes), "oscillations": oscillations(changes, 2 * setting.scaling.cooldown_s),
        "at": [[round(at_s), num] for at_s, num in changes],
    }  # fmt: skip


def _real(output: Output, file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Profile the model, run the load for real, and simulate it with the start-up time that was measured."""
    logging.disable(logging.INFO)  # a line for each request
    load = load_of(given["steps"], given["rate"], given)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lengths = sorted({max(16, given["prompt_tokens"] // 4), given["prompt_tokens"], 2 * given["prompt_tokens"]})
        grid = Grid(tuple(sorted({1, max(2, given["batch"] // 2), given["batch"]})), tuple(lengths), engines=given["engines"])
        profile = measure_profile(given["model"], file or folder / "profile.json", grid, {"device": "cpu", "threads": 1})
        setting = _setting(profile, given, 0.0)
        with _manager(setting, given["model"], folder / "record.jsonl") as manager:
            times, num_failed = _send(manager, load, given["model"], folder)
            pool = manager.status()["scaling"]["engine"]
        lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
        replayed = verify_scaling(folder / "record.jsonl")
    steps = [line for line in lines if line["event"] == "scale"]
    changes = [(line["view"]["now_s"], line["target"] - line["present"]) for line in steps if line["action"] != "keep"]
    engine_s = sum((line["present"] + line["view"]["num_draining"]) * line["view"]["interval_s"] for line in steps)
    measured = Outcome(times, setting.targets, 0, {}).to_dict()
    measured["engines"] = engine_s / sum(line["view"]["interval_s"] for line in steps)
    start_s = pool["start_s"] or 0.0
    predicted = _setting(profile, given, start_s).run(load)
    ours = _figures(predicted)
    compared = {
        name: {"predicted": ours[name], "measured": measured[name], "error": ours[name] / measured[name] - 1 if measured[name]
               else float(ours[name] > 0)} for name in COMPARED
    }  # fmt: skip
    rows = [(name, *(f"{row[side]:.4g}" for side in ("predicted", "measured")), f"{row['error']:+.1%}")
            for name, row in compared.items()]  # fmt: skip
    output.say(table(("figure", "predicted", "measured", "error"), rows))
    output.say(f"an engine starts in {start_s:.1f} s; {len(changes)} changes, predicted {len(predicted.changes('hybrid'))}; "
               f"{num_failed} of {len(load.requests)} requests failed; {replayed.num_decisions} decisions replayed, "
               f"{len(replayed.differences)} differ")  # fmt: skip
    cooldown_s = setting.scaling.cooldown_s
    return {
        "options": given | {"start_s": start_s}, "requests": len(load.requests), "failed": num_failed, "compared": compared,
        "changes": [[round(at_s, 1), num] for at_s, num in changes], "oscillations": oscillations(changes, 2 * cooldown_s),
        "predicted": _changes(predicted, setting), "decisions_replayed": replayed.num_decisions,
        "decisions_that_differ": len(replayed.differences), "fleet": asdict(setting.fleet),
    }  # fmt: skip


@contextlib.contextmanager
def _manager(setting: Setting, model: str, record: Path) -> Iterator[ControlPlaneManager]:
    """Start a manager with the scaled pool `engine`."""
    engine = {"kind": "sagellm"} | engine_settings(setting.profile, setting.fleet, model) | {"model_name": "measured"}
    settings = {"port": 0, "record": record, "engines": {"engine": engine}, "scaling": {"engine": setting.scaling}}
    with ControlPlaneManager(publish=False, **settings) as manager:
        yield manager


def _send(
    manager: ControlPlaneManager, load: Load, model: str, folder: Path
) -> tuple[tuple[RequestTimes, ...], int]:  # fmt: skip
    """Send a load through the gateway; return the times of the requests that were answered, and how many were not."""
    random, vocab_size = np.random.default_rng(1), int(text_config(model_folder(model))["vocab_size"])
    requests = [
        PlannedRequest(
            scheduled_s=each.arrival_s, prompt_ids=random.integers(vocab_size // 2, vocab_size, each.prompt_tokens).tolist(),
            max_tokens=each.num_generated,
        )
        for each in load.requests
    ]  # fmt: skip
    plan, out = folder / "plan.json", folder / "samples.npz"
    Plan(url=manager.url, endpoint="completions", model="measured", requests=requests, grace_s=SPAN_S).write(plan)
    command = [sys.executable, "-m", "benchmarks.load.client", str(plan), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = read_samples(out)
    times = tuple(
        RequestTimes(number, float(found.scheduled_s[number]), int(found.output_tokens[number]), float(found.first_s[number]),
                     float(found.last_s[number]), _token_times(found, number))
        for number in np.flatnonzero(found.ok).tolist()
    )  # fmt: skip
    return times, int((~found.ok).sum())


def _token_times(found: Any, number: int) -> tuple[float, ...]:
    begin, end = found.chunk_offsets[number : number + 2]
    return tuple(np.repeat(found.chunk_s[begin:end], found.chunk_tokens[begin:end]).tolist())


if __name__ == "__main__":
    main()
