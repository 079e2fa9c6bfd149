"""Decode steps of two tensor-parallel workers with a thread each, beside one process with two threads.

    python -m benchmarks.tensor_parallel [--model half-billion] [--rounds 5] [--out FILE]

The workers add up their tensors by LMDeploy's process group (gloo) or by shared memory, there also because a plug-in says so.
With `--starts` servers of both start in turn, and the time until they are ready is measured instead.
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
from sagellm.engines.lmdeploy.comm import REPORT_INTERVAL_S

PROMPT, NEW = 64, 33
ALONE, GLOO, SHM = "one process, two threads", "two workers, gloo", "two workers, shm"
DECIDED = "two workers, shm, a plug-in decides"
WORKERS = {"tensor_parallel": 2, "comm_metrics": True}
SETTINGS: dict[str, dict[str, Any]] = {
    ALONE: {}, GLOO: {**WORKERS, "comm_backend": "group"}, SHM: {**WORKERS, "comm_backend": "shm"},
    DECIDED: {**WORKERS, "comm_backend": "shm", "plugins": (PluginSpec(name="benchmarks.noop_plugin:LastBackend"),)},
}  # fmt: skip


@click.command()
@click.option("--model", default="half-billion", show_default=True, help="Name or folder; half-billion: random weights.")
@click.option("--batches", default="1,8", show_default=True, help="Requests that decode together.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each batch.")
@click.option("--decode-round", default=1, show_default=True, help="Decode steps that the engine schedules together.")
@click.option("--starts", default=0, show_default=True, help="Measure so many starts of servers, and nothing else.")
@with_output
def main(model: str, batches: str, rounds: int, decode_round: int, starts: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    sizes = [int(each) for each in batches.split(",")]
    with ExitStack() as stack:
        if model == "half-billion":
            folder = write_half_billion(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            folder = model_folder(model)
        if starts:
            return measure_starts(folder, model, starts, output)
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
    """Build an engine whose answers have the times of tokens, and the share of the time that rank 0 spent in collectives."""
    ask = build_ours(*args)

    def waited_s() -> float:
        time.sleep(2 * REPORT_INTERVAL_S)  # workers leave their counts so often
        return sum(row["exposed_ns"] for row in ask.engine.hooks.report()["comm"] if row["rank"] == 0) / 1e9

    def answer(request: dict[str, Any]) -> tuple[list[list[float]], float]:
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
