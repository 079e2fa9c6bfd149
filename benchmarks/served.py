"""The layer itself, served: LMDeploy's own server with the CPU device alone, against ours with all patches and no plug-in.

    python -m benchmarks.served [--model smollm2] [--tensor-parallel 2] [--starts 4] [--rounds 4] [--out FILE]

Both are up together and answer the same work in turn: requests at once that share prefixes in groups, with prompts that no
earlier round had. They are started several times, since the ratio of one start differs from that of the next by up to 5%.
LMDeploy's tree is the installed one less every patched line but those of 0006. Without these it has no CPU
device. Prefix hits, and the share of a step in which workers wait for each other, are counted inside both servers by the same
code (`served_probe.py`). So is the time of the native steps, which no patch changes: the rest is what a server itself takes.
MFU: operations of the tokens that were computed, by the machine's best rate of torch's products.
"""

import random
import statistics
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import numpy as np

from benchmarks import served_probe
from benchmarks.contestants import paired_ratio, summary
from benchmarks.errors import BenchmarkError
from benchmarks.hook_overhead import write_bare_tree
from benchmarks.metrics.compute import mfu
from benchmarks.metrics.flops import Shape, peak_flops, read_shape, request_flops
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output
from benchmarks.pd.client import Reply, Request, ask_all
from benchmarks.pd.group import Group
from benchmarks.pd.prompts import prompt
from benchmarks.processes import READY_S, ServerProcess, free_port, wait_until
from sagellm.models import find_model

REQUESTS, GROUPS, SHARED, OWN, NEW, AT_ONCE = 16, 4, 256, 64, 48, 4
CONTEXT, BLOCK, PREFILL, TRIES = 2048, 64, 512, 10
OURS, THEIRS = "all patches, no plug-in", "LMDeploy, CPU device alone"


class LMDeployServer(ServerProcess):
    """LMDeploy's server, ready within its `with`. `env`: variables that let it find its tree."""

    def __init__(self, folder: Path, name: str, threads: int, workers: int, env: dict[str, str]) -> None:
        port = free_port()
        command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", folder, "--backend", "pytorch", "--device", "cpu"]
        command += ["--server-name", "127.0.0.1", "--server-port", port, "--model-name", name, "--dtype", "bfloat16"]
        command += ["--session-len", CONTEXT, "--max-batch-size", AT_ONCE, "--cache-block-seq-len", BLOCK, "--tp", workers]
        command += ["--max-prefill-token-num", PREFILL, "--cache-max-entry-count", 0.05, "--enable-prefix-caching"]
        # Processes of the machine as workers, as ours are; its default is a Ray cluster.
        workers_env = {"LMDEPLOY_EXECUTOR_BACKEND": "mp"} if workers > 1 else {}
        super().__init__(command, port, env={"OMP_NUM_THREADS": str(threads)} | workers_env | env)

    def __enter__(self) -> "LMDeployServer":
        for _ in range(TRIES):
            if wait_until("LMDeploy's server is ready", self._state, READY_S) == "ready":
                return self
            self.kill()
            self.start()
        raise BenchmarkError(f"LMDeploy's engine process died at each of {TRIES} starts")

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _state(self) -> str:
        """Return "ready", "dead", or "" while it starts.

        The server may end the manager of its engine process before that one has let go of it, which kills the engine alone.
        """
        self.check()
        if "EOFError" in self.stderr:
            return "dead"
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return "ready" if answer.status == 200 else ""
        except (urllib.error.URLError, OSError):
            return ""


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name of a model.")
@click.option("--starts", default=4, show_default=True, help="Starts of each server.")
@click.option("--rounds", default=4, show_default=True, help="Measured rounds of each start.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of a server.")
@click.option("--tensor-parallel", default=1, show_default=True, help="Workers of a server, which share its threads.")
@with_output
def main(model: str, starts: int, rounds: int, threads: int, tensor_parallel: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    shape = read_shape(model_folder(model))
    peak = max(peak_flops("cpu", dtype, threads)[0] for dtype in ("bfloat16", "float32"))
    found: dict[str, list[dict[str, float]]] = {THEIRS: [], OURS: []}
    for start in range(starts):
        with _servers(model, max(1, threads // tensor_parallel), tensor_parallel, ours_first=start % 2 == 1) as servers:
            for number in range(rounds + 1):
                work = _work(model, start * (rounds + 1) + number)
                for name in found if number % 2 else reversed(found):
                    url, counts = servers[name]
                    before = served_probe.read(counts)
                    replies = ask_all(url, work, AT_ONCE)
                    counted = _since(before, served_probe.read(counts))
                    if number:
                        found[name].append(_figures(replies, counted, shape, peak))
    keys = list(found[OURS][0])
    result = {
        "model": model, "starts": starts, "rounds": rounds, "threads": threads, "tensor_parallel": tensor_parallel,
        "peak_gflop_s": peak / 1e9,
        "figures": {name: {key: summary([each[key] for each in every]) for key in keys} for name, every in found.items()},
        "ratio": {
            key: paired_ratio(*([each[key] for each in found[name]] for name in (OURS, THEIRS)))
            for key in keys if all(each[key] for each in found[THEIRS])
        },
    }  # fmt: skip
    rows = [
        (
            key, *(spread(result["figures"][name][key], ".4f") for name in (THEIRS, OURS)),
            spread(result["ratio"][key], ".3f") if key in result["ratio"] else "",
        )
        for key in keys
    ]  # fmt: skip
    output.say(table(["figure", THEIRS, OURS, "ratio"], rows))
    output.finish(result)


@contextmanager
def _servers(model: str, threads: int, workers: int, ours_first: bool) -> Iterator[dict[str, tuple[str, Path]]]:
    """Yield the URL of each server, and the folder in which its processes count. `threads`: of each worker."""
    flags = ["--context-length", CONTEXT, "--max-batch-size", AT_ONCE, "--block-size", BLOCK, "--threads", threads]
    flags += ["--decode-round", 16, "--max-prefill-tokens", PREFILL, "--dtype", "bfloat16"]  # LMDeploy's round
    flags += ["--tensor-parallel", workers]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        tree, counts = write_bare_tree(Path(scratch) / "bare"), {name: Path(scratch) / name for name in (THEIRS, OURS)}
        env = {THEIRS: served_probe.environment(counts[THEIRS], tree), OURS: served_probe.environment(counts[OURS])}
        folder, name, port = model_folder(model), find_model(model).name, free_port()
        command = [sys.executable, "-m", "sagellm.serve", "--model", model, "--port", port, "--json", *flags]
        start: dict[str, Callable[[], ServerProcess]] = {
            THEIRS: lambda: LMDeployServer(folder, name, threads, workers, env[THEIRS]),
            OURS: lambda: Group(command, port, env=env[OURS]),
        }
        order = (OURS, THEIRS) if ours_first else (THEIRS, OURS)
        yield {name: (stack.enter_context(start[name]()).url, counts[name]) for name in order}


def _since(before: dict[str, served_probe.Counts], after: dict[str, served_probe.Counts]) -> list[served_probe.Counts]:
    return [counts - before.get(process, served_probe.Counts()) for process, counts in after.items()]


def _work(model: str, number: int) -> list[Request]:
    source = random.Random(number)
    shared = [prompt(SHARED, source, model) for _ in range(GROUPS)]
    return [
        Request(shared[each % GROUPS] + prompt(OWN, source, model), NEW, model=model, ignore_eos=True)
        for each in range(REQUESTS)
    ]


def _figures(replies: list[Reply], counted: list[served_probe.Counts], shape: Shape, peak: float) -> dict[str, float]:
    """Medians over the requests, and figures of the whole round."""
    if wrong := [reply.error for reply in replies if reply.error]:
        raise click.ClickException(f"{len(wrong)} requests failed; the first: {wrong[0]}")
    wall_s = max(each.end_s for each in replies) - min(each.sent_s for each in replies)
    asked, cached = sum(each.asked for each in counted), sum(each.found for each in counted)
    worker = max(counted, key=lambda each: (each.exchange_s, each.step_s))
    each_request = [np.array([number / len(replies)]) for number in (asked, cached, NEW * len(replies))]
    flops = len(replies) * float(request_flops(shape, *each_request)[0])
    return {
        "ttft_s": statistics.median([each.pieces_s[0] - each.sent_s for each in replies]),
        "tpot_s": statistics.median([(each.pieces_s[-1] - each.pieces_s[0]) / (NEW - 1) for each in replies]),
        "s_per_token": wall_s / (len(replies) * NEW),
        "outside_steps_s_per_token": (wall_s - worker.step_s) / (len(replies) * NEW),
        "mfu": mfu(flops, wall_s, peak),
        "kv_hit_rate": cached / asked,
        "comm_share": worker.exchange_s / worker.step_s if worker.exchange_s else 0.0,
    }


if __name__ == "__main__":
    main()
