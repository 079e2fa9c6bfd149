"""Decode steps of two tensor-parallel workers with a thread each, beside one process with two threads.

    python -m benchmarks.tensor_parallel [--model half-billion] [--rounds 5] [--out FILE]

The workers add up their tensors by LMDeploy's process group (gloo) or by shared memory, there also because a plug-in says so.
With `--starts` servers of both start in turn, and the time until they are ready is measured instead. With `--delay-us` the
sums of two workers take at least so long, as over a slower link. Ways to do them are compared: steps in one piece and in two
halves. With `--model mixture`, whose layers have a shared expert, they are two sums for the experts of a layer, and one.
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.cpu_engine import build_ours, write_half_billion
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output
from benchmarks.processes import ServerProcess, free_port
from sagellm.core.config import PluginSpec
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.lmdeploy.comm import REPORT_INTERVAL_S
from sagellm.engines.lmdeploy.contract.architectures import write_model

PROMPT, NEW = 64, 33
PROMPTS_OF_A_ROUND, WARM_UPS = 8, 4  # the warm-ups are enough for an engine to decide about halves
ALONE, GLOO, SHM = "one process, two threads", "two workers, gloo", "two workers, shm"
DECIDED = "two workers, shm, a plug-in decides"
WHOLE, HALVES, MEASURED = "one piece", "two halves", "as measured"
APART, FUSED = "two sums", "one sum"
DEEP, MIXTURE = "deep", "mixture"  # names of models with random weights: many small layers
DEEP_SHAPE = {"hidden_size": 256, "num_layers": 24, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 768}
WORKERS = {"tensor_parallel": 2, "comm_metrics": True}
SETTINGS: dict[str, dict[str, Any]] = {
    ALONE: {}, GLOO: {**WORKERS, "comm_backend": "group"}, SHM: {**WORKERS, "comm_backend": "shm"},
    DECIDED: {**WORKERS, "comm_backend": "shm", "plugins": (PluginSpec(name="benchmarks.noop_plugin:LastBackend"),)},
}  # fmt: skip


@click.command()
@click.option(
    "--model", default="half-billion", show_default=True,
    help="Name or folder; half-billion, deep and mixture have random weights: the last two 24 layers of width 256.",
)
@click.option("--batches", default="1,8", show_default=True, help="Requests that decode together.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each batch.")
@click.option("--decode-round", default=1, show_default=True, help="Decode steps that the engine schedules together.")
@click.option("--starts", default=0, show_default=True, help="Measure so many starts of servers, and nothing else.")
@click.option("--delay-us", default=0, show_default=True, help="Least time of a sum; compares ways to do sums alone.")
@click.option("--prompts", default="64,128", show_default=True, help="With --delay-us: tokens of prompts.")
@with_output
def main(
    model: str, batches: str, rounds: int, decode_round: int, starts: int, delay_us: int, prompts: str, output: Output
) -> None:
    """Measure, print a table, and write the result."""
    sizes = [int(each) for each in batches.split(",")]
    with ExitStack() as stack:
        folder = _folder(model, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if starts:
            return measure_starts(folder, model, starts, output)
        if delay_us:
            return measure_sums(folder, model, sizes, [int(each) for each in prompts.split(",")], rounds, delay_us, output)
        contestants: list[Contestant] = []
        for name, settings in SETTINGS.items():
            threads = 2 if name == ALONE else 1
            limits = {"context": 2 * (PROMPT + NEW), "batch": max(sizes)}
            more = {"kv_blocks": 4 * max(sizes) + 8, "decode_round": decode_round, **settings}
            contestants.append(Contestant(name, build, str(folder), threads, limits, "auto", more))
            stack.callback(contestants[-1].close)
        rows, cells = [], {}
        for size in sizes:
            request = {"prompts": [[7 + row, *range(100, 99 + PROMPT)] for row in range(size)], "new_tokens": NEW}
            interleave(contestants, request, 1)
            answers = interleave(contestants, request, rounds)
            steps = {name: [_step_s(times) for times, _ in of_rounds] for name, of_rounds in answers.items()}
            cells[str(size)] = {
                name: {
                    "step_s": summary(each), "over_alone": paired_ratio(each, steps[ALONE]),
                    "comm_share": summary([share for _, share in answers[name]]),
                }
                for name, each in steps.items()
            }  # fmt: skip
            cells[str(size)][DECIDED]["over_undecided"] = paired_ratio(steps[DECIDED], steps[SHM])
            rows += [
                (size, name, f"{1e3 * each['step_s']['median']:.1f}", spread(each["over_alone"]), spread(each["comm_share"]))
                for name, each in cells[str(size)].items()
            ]
    output.say(table(["requests", "engine", "step, ms", "over one process", "communication share"], rows))
    output.finish({"model": model, "prompt_tokens": PROMPT, "new_tokens": NEW, "rounds": rounds, "decode_round": decode_round,
                   "cells": cells})  # fmt: skip


def _folder(model: str, scratch: Path) -> Path:
    """Return the folder of a model, after writing one with random weights."""
    if model == "half-billion":
        return write_half_billion(scratch)
    if model == DEEP:
        return write_random_model(scratch / DEEP, architecture="qwen2", vocab_size=2048, dtype="bfloat16", **DEEP_SHAPE)
    if model == MIXTURE:
        shape = {"hidden_size": 256, "num_hidden_layers": 24, "intermediate_size": 256, "moe_intermediate_size": 128}
        write_model("Qwen2Moe", scratch / MIXTURE, **shape, shared_expert_intermediate_size=256)
        return scratch / MIXTURE
    return model_folder(model)


def measure_sums(
    folder: Path, model: str, batches: list[int], prompts: list[int], rounds: int, delay_us: int, output: Output
) -> None:
    """Compare ways to do the sums of two workers: decode steps of some batches, and prompts of some lengths."""
    ways = {APART: {"fused": False}, FUSED: {}} if model == MIXTURE else {WHOLE: {}, HALVES: {"pieces": 2}, MEASURED: None}
    usual = next(iter(ways))
    limits = {"context": 2 * (max(prompts) + NEW), "batch": max(batches)}
    contestants: list[Contestant] = []
    cells: dict[str, dict[str, Any]] = {}
    try:
        for name, options in ways.items():
            more: dict[str, Any] = {"comm_backend": "shm", "comm_options": {"delay_us": delay_us}, "decode_round": 1, **WORKERS}
            more["kv_blocks"] = 4 * max(batches) + 4 * max(prompts) // 64 + 8
            if options is not None:
                more["plugins"] = (PluginSpec(name="benchmarks.noop_plugin:LastBackend", options=options),)
            contestants.append(Contestant(name, build, str(folder), 1, limits, "auto", more))
        for what, size in [*(("decode step", size) for size in batches), *(("prompt", size) for size in prompts)]:
            rows, length = (size, PROMPT) if what == "decode step" else (1, size)
            request = {"prompts": [[7 + row, *range(100, 99 + length)] for row in range(rows)], "new_tokens": NEW}
            if what == "prompt":
                request |= {"new_tokens": 1, "times": PROMPTS_OF_A_ROUND}
            interleave(contestants, request, WARM_UPS)
            found = {
                name: [_step_s(times) if what == "decode step" else statistics.median(times) for times, _ in answers]
                for name, answers in interleave(contestants, request, rounds).items()
            }
            cells[f"{what}, {size}"] = {
                name: {"seconds": summary(each), "over_usual": paired_ratio(each, found[usual])} for name, each in found.items()
            }
        decided = contestants[-1].ask({"report": True})
    finally:
        for each in contestants:
            each.close()
    table_rows = [
        (cell, name, f"{1e3 * each['seconds']['median']:.1f}", spread(each["over_usual"]))
        for cell, every in cells.items() for name, each in every.items()
    ]  # fmt: skip
    output.say(table(["requests or tokens", "sums", "ms", f"over {usual}"], table_rows))
    output.finish({
        "model": model, "delay_us": delay_us, "prompt_tokens": PROMPT, "new_tokens": NEW, "rounds": rounds, "usual": usual,
        "cells": cells, "decided": [each for each in decided if each["halves_over_whole"] is not None],
    })  # fmt: skip


def measure_starts(folder: Path, model: str, starts: int, output: Output) -> None:
    """Start servers of one process and of two workers in turn, and print the times until they are ready."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for number in range(starts):
        for workers in (1, 2) if number % 2 == 0 else (2, 1):
            found[workers].append(_ready_s(folder, workers))
    ratio = paired_ratio(found[2], found[1])
    rows = [(workers, spread(summary(times), ".1f")) for workers, times in found.items()]
    output.say(table(["workers", "ready, s"], rows))
    output.say(f"two workers over one process: {spread(ratio)}")
    output.finish({
        "model": model, "starts": starts, "ready_s": {str(each): summary(times) for each, times in found.items()},
        "over_alone": ratio,
    })  # fmt: skip


def _ready_s(folder: Path, workers: int) -> float:
    port = free_port()
    command: list[Any] = [sys.executable, "-m", "sagellm.serve", "--model", folder, "--port", port]
    command += ["--device", "cpu", "--dtype", "bfloat16"]
    command += ["--tensor-parallel", workers, "--threads", 2 // workers, "--kv-blocks", 64, "--context-length", 256, "--json"]
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        server = ServerProcess(list(map(str, command)), port, Path(scratch) / "server")
        try:
            server.ready()
            return time.perf_counter() - start
        finally:
            server.close()


def build(*args: Any) -> Any:
    """Build an engine whose answers have the times of tokens, and the share of the time that rank 0 spent in collectives.

    Answers to prompts that are asked one after the other have the times of their tokens alone.
    """
    ask = build_ours(*args)

    def waited_s() -> float:
        time.sleep(2 * REPORT_INTERVAL_S)  # workers leave their counts so often
        return sum(row["exposed_ns"] for row in ask.engine.hooks.report()["comm"] if row["rank"] == 0) / 1e9

    def answer(request: dict[str, Any]) -> Any:
        if request.get("report"):
            time.sleep(2 * REPORT_INTERVAL_S)
            return ask.engine.hooks.report()["comm_choice"]["overlap"]
        if times := request.get("times"):  # prompts one after the other
            return [ask(request)[0][0] for _ in range(times)], 0.0
        before = waited_s()
        times = ask(request)
        return times, (waited_s() - before) / max(each[-1] for each in times)

    answer.close = ask.close
    return answer


def _step_s(times: list[list[float]]) -> float:
    """Seconds of a decode step: from the last first token to the end, in steps of all requests."""
    start = max(each[0] for each in times)
    end = statistics.median(each[-1] for each in times)
    return (end - start) / (NEW - 1)


if __name__ == "__main__":
    main()
