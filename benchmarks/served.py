"""The layer itself, served: LMDeploy's own server with the CPU device alone, against ours with all patches and no plug-in.

    python -m benchmarks.served [--model smollm2] [--rounds 8] [--out FILE]

Both are up together and answer the same work in turn: requests at once that share prefixes in groups, with prompts that no
earlier round had. LMDeploy's tree is the installed one less every patched line but those of 0006. Without these it has no CPU
device.
"""

import random
import statistics
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import click

from benchmarks.contestants import paired_ratio, summary
from benchmarks.errors import BenchmarkError
from benchmarks.hook_overhead import write_bare_tree
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output
from benchmarks.pd.client import Reply, Request, ask_all
from benchmarks.pd.group import single_server
from benchmarks.pd.prompts import prompt
from benchmarks.processes import READY_S, ServerProcess, free_port, wait_until

REQUESTS, GROUPS, SHARED, OWN, NEW, AT_ONCE = 16, 4, 256, 64, 48, 4
CONTEXT, BLOCK, PREFILL, STARTS = 2048, 64, 512, 10
OURS, THEIRS = "all patches, no plug-in", "LMDeploy, CPU device alone"


class LMDeployServer(ServerProcess):
    """LMDeploy's server from a tree, ready within its `with`."""

    def __init__(self, tree: Path, folder: Path, name: str, threads: int) -> None:
        port = free_port()
        command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", folder, "--backend", "pytorch", "--device", "cpu"]
        command += ["--server-name", "127.0.0.1", "--server-port", port, "--model-name", name, "--dtype", "bfloat16"]
        command += ["--session-len", CONTEXT, "--max-batch-size", AT_ONCE, "--cache-block-seq-len", BLOCK]
        command += ["--max-prefill-token-num", PREFILL, "--cache-max-entry-count", 0.05, "--enable-prefix-caching"]
        super().__init__(command, port, env={"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads)})

    def __enter__(self) -> "LMDeployServer":
        for _ in range(STARTS):
            if wait_until("LMDeploy's server is ready", self._state, READY_S) == "ready":
                return self
            self.kill()
            self.start()
        raise BenchmarkError(f"LMDeploy's engine process died at each of {STARTS} starts")

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
@click.option("--rounds", default=8, show_default=True, help="Measured rounds of each server.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of a server.")
@with_output
def main(model: str, rounds: int, threads: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    flags = ["--context-length", CONTEXT, "--max-batch-size", AT_ONCE, "--block-size", BLOCK, "--threads", threads]
    flags += ["--decode-round", 16, "--max-prefill-tokens", PREFILL, "--dtype", "bfloat16"]  # LMDeploy's round
    with tempfile.TemporaryDirectory() as scratch:
        tree = write_bare_tree(Path(scratch))
        with (
            LMDeployServer(tree, model_folder(model), model, threads) as theirs,
            single_server(tuple(map(str, flags)), model=model) as ours,
        ):
            servers = {THEIRS: theirs.url, OURS: ours.url}
            found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for number in range(rounds + 1):
                for name in servers if number % 2 else reversed(servers):
                    figures = _figures(ask_all(servers[name], _work(model, number), AT_ONCE))
                    if number:
                        found[name].append(figures)
    keys = list(found[OURS][0])
    result = {
        "model": model, "rounds": rounds, "threads": threads,
        "seconds": {name: {key: summary([each[key] for each in every]) for key in keys} for name, every in found.items()},
        "ratio": {key: paired_ratio(*([each[key] for each in found[name]] for name in (OURS, THEIRS))) for key in keys},
    }  # fmt: skip
    rows = [
        (key, *(spread(result["seconds"][name][key], ".4f") for name in (THEIRS, OURS)), spread(result["ratio"][key], ".3f"))
        for key in keys
    ]
    output.say(table(["figure", THEIRS, OURS, "ratio"], rows))
    output.finish(result)


def _work(model: str, number: int) -> list[Request]:
    source = random.Random(number)
    shared = [prompt(SHARED, source, model) for _ in range(GROUPS)]
    return [
        Request(shared[each % GROUPS] + prompt(OWN, source, model), NEW, model=model, ignore_eos=True)
        for each in range(REQUESTS)
    ]


def _figures(replies: list[Reply]) -> dict[str, float]:
    """Medians over the requests, and tokens a second of all."""
    if wrong := [reply.error for reply in replies if reply.error]:
        raise click.ClickException(f"{len(wrong)} requests failed; the first: {wrong[0]}")
    begin_s, end_s = min(each.sent_s for each in replies), max(each.end_s for each in replies)
    return {
        "ttft_s": statistics.median([each.pieces_s[0] - each.sent_s for each in replies]),
        "tpot_s": statistics.median([(each.pieces_s[-1] - each.pieces_s[0]) / (NEW - 1) for each in replies]),
        "s_per_token": (end_s - begin_s) / (len(replies) * NEW),
    }


if __name__ == "__main__":
    main()
