"""The load client against `aiperf` and `guidellm`: the same requests to one server, and what each says it measured.

    python -m benchmarks.cross_check --aiperf DIR/bin/aiperf --guidellm DIR/bin/guidellm [--rounds 6] [--out FILE]

All send the same chats in a closed loop with connections kept open, to one running server on SmolLM2 without a prefix cache,
in turn. Output lengths differ from request to request. With equal lengths the users of a closed loop march in step, and the
first milliseconds decide for a whole round whether their prompts meet in one prefill.

The server has the first core to itself and the clients share the others: aiperf is ten processes, which would slow down the
server that they measure. On two cores that are siblings they still do, so the server waits before each engine step. How fast
it was in a round it says itself, from /metrics: its mean TTFT and time per gap, and the tokens/s of users who lose no time
between two requests. `ratio to server` sets each client's figure against that of the same round; the exit code goes by the
plain ratio.

Definitions. TTFT: from the send (guidellm: from the first header written) to the first event with text; mean over requests.
ITL. Aiperf takes (latency - TTFT) / (tokens - 1) of each request, latency until the last event with text, and the mean over
requests; it is compared with the mean of our `tpot`. Guidellm takes the same quotient of each request and weighs it
with its gaps; it is compared with the mean of our `itl`. Output tokens/s: tokens as the server counted them over first send to
last text (aiperf, ours) or to the end of the last answer (guidellm). A warm-up goes ahead of all clients, unmeasured.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contestants import interleave, paired_ratio, summary
from benchmarks.errors import BenchmarkError, ServerDied
from benchmarks.load.plan import Plan, PlannedRequest
from benchmarks.load.samples import read_samples
from benchmarks.metrics import compute
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, with_output
from benchmarks.server import Server
from sagellm.core.config import PluginSpec, SageConfig
from sagellm.core.hooks import Plugin, ScheduleDecision, StepView

VERSIONS = {"aiperf": "0.13.0", "guidellm": "0.8.1"}
OURS, MODEL = "ours", "smollm2"
CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 128, (32, 64)
TOLERANCE, LIMIT_S, TRIES = 0.05, 600.0, 3
METRICS = {"ttft_s": ("TTFT", "ms", 1e3), "itl_s": ("ITL", "ms", 1e3), "output_tokens_per_s": ("output", "tok/s", 1.0)}
Figures = dict[str, float]


@dataclass
class Paced(Plugin):
    """Waits before each engine step; decides nothing. The engine's process loads it by name."""

    wait_s: float

    def schedule(self, view: StepView) -> ScheduleDecision:
        time.sleep(self.wait_s)
        return ScheduleDecision()  # for one step only, so that the next one is asked for as well


class Workload:
    """The chats, in one file for each client: `text`, and the output length under the name that the client reads."""

    def __init__(self, model: Path, count: int, folder: Path) -> None:
        source = random.Random(0)
        self.model, self.folder = model, folder
        self.texts = _texts(model, count, source)
        self.lengths = [source.randint(*OUTPUT_TOKENS) for _ in range(count)]

    def write(self, length_name: str) -> Path:
        file = self.folder / f"{length_name}.jsonl"
        rows = zip(self.texts, self.lengths, strict=True)
        file.write_text("".join(json.dumps({"text": text, length_name: length}) + "\n" for text, length in rows))
        return file


@dataclass(frozen=True)
class Client:
    """A contestant: `measure(workload, url)` sends the whole workload and returns what the client says it saw."""

    name: str
    measure: Callable[[Workload, str], Figures]
    workload: Workload
    server: Server

    def ask(self, tries: int) -> Figures:
        """Its figures, and `server_*`: what the server counted and measured meanwhile. A round with a loss is made again."""
        before = self.server.metrics()
        try:
            figures = self.measure(self.workload, self.server.url)
        except (OSError, ValueError, LookupError) as error:
            raise BenchmarkError(f"{self.name} left no report that can be read: {error!r}") from None
        figures |= _server_figures(before, self.server.metrics())
        count = len(self.workload.texts)
        seen = [int(figures[key]) for key in ("requests", "server_prompt_tokens", "server_output_tokens")]
        if seen != (wanted := [count, PROMPT_TOKENS * count, sum(self.workload.lengths)]):
            void = f"{self.name}: whole answers, prompt and output tokens at the server are {seen} instead of {wanted}"
            if tries <= 1:
                raise BenchmarkError(f"{void}; it is not the same load, so nothing can be compared")
            click.echo(f"{void}; void, once more", err=True)
            return self.ask(tries - 1)
        values = "".join(f"{label} {figures[key] * scale:6.2f} {unit}   " for key, (label, unit, scale) in METRICS.items())
        own = [figures[f"server_{key}"] * 1e3 for key in ("ttft_s", "itl_s")]
        click.echo(f"{self.name:9}{values}server: {own[0]:.2f} ms, {own[1]:.2f} ms, {seen[1]} + {seen[2]} tokens")
        return figures


def ours(workload: Workload, url: str, count: int | None = None) -> Figures:
    rows = list(zip(workload.texts, workload.lengths, strict=True))[:count]
    requests = [PlannedRequest(text=text, max_tokens=length) for text, length in rows]
    file, out = workload.folder / "plan.json", workload.folder / "samples.npz"
    Plan(url=url, endpoint="chat", model=MODEL, requests=requests, concurrency=CONCURRENCY).write(file)
    _run(OURS, [sys.executable, "-m", "benchmarks.load.client", str(file), "--out", str(out)])
    samples = read_samples(out)
    seconds = compute.latencies(samples)
    return {
        "requests": int(samples.ok.sum()), "ttft_s": float(seconds["ttft"].mean()),
        "itl_s": float(seconds["itl"].mean()), "itl_by_request_s": float(seconds["tpot"].mean()),
        "output_tokens_per_s": compute.output_tokens(samples) / compute.wall_s(samples),
    }  # fmt: skip


def aiperf(binary: Path, workload: Workload, url: str) -> Figures:
    out = workload.folder / "aiperf"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        str(binary), "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(workload.model), "--use-server-token-count",
        "--input-file", str(workload.write("output_length")), "--custom-dataset-type", "single-turn",
        "--dataset-sampling-strategy", "sequential", "--extra-inputs", "ignore_eos:true", "temperature:0",
        "--concurrency", str(CONCURRENCY), "--request-count", str(len(workload.texts)),
        "--ui", "none", "--no-server-metrics", "--no-gpu-telemetry", "--output-artifact-dir", str(out),
    ]  # fmt: skip
    _run("aiperf", command)
    report = json.loads((out / "profile_export_aiperf.json").read_bytes())
    return {
        "requests": report["request_count"]["avg"], "ttft_s": report["time_to_first_token"]["avg"] / 1e3,
        "itl_s": report["inter_token_latency"]["avg"] / 1e3,
        "output_tokens_per_s": report["output_token_throughput"]["avg"],
    }  # fmt: skip


def guidellm(binary: Path, workload: Workload, url: str) -> Figures:
    out, data = workload.folder / "guidellm.json", workload.write("output_tokens_count")
    command = [
        str(binary), "run", "--backend", f"kind=openai_http,target={url},model={MODEL},extras.body.temperature=0",
        "--profile", f"kind=concurrent,streams={CONCURRENCY}",
        "--constraint", f"kind=max_requests,count={len(workload.texts)}",
        "--tokenizer", f"kind=huggingface_auto,model={workload.model}", "--data", f"kind=json_file,path={data}",
        "--output", f"kind=json,path={out}", "--disable-console",
    ]  # fmt: skip
    out.unlink(missing_ok=True)
    _run("guidellm", command)
    report = json.loads(out.read_bytes())["benchmarks"][0]
    metrics, requests = report["metrics"], report["requests"]
    for lost in (*requests["errored"], *requests["incomplete"]):
        click.echo(f"guidellm says of a lost answer: {lost['info']}", err=True)
    return {
        "requests": metrics["request_totals"]["successful"],
        "ttft_s": metrics["time_to_first_token_ms"]["successful"]["mean"] / 1e3,
        "itl_s": metrics["inter_token_latency_ms"]["successful"]["mean"] / 1e3,
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


PEERS = {"aiperf": aiperf, "guidellm": guidellm}


@click.command()
@click.option("--aiperf", type=click.Path(path_type=Path), help=f"The program of aiperf {VERSIONS['aiperf']}.")
@click.option("--guidellm", type=click.Path(path_type=Path), help=f"The program of guidellm {VERSIONS['guidellm']}.")
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(min=1), help="Rounds of each contestant.")
@click.option("--requests", default=80, show_default=True, type=click.IntRange(min=4), help="Requests in each round.")
@click.option(
    "--wait-ms", default=15.0, show_default=True, type=click.FloatRange(0, 500),
    help="Milliseconds that the server waits before each engine step.",
)
@with_output
def main(aiperf: Path | None, guidellm: Path | None, rounds: int, requests: int, wait_ms: float, output: Output) -> None:
    """Measure, print, and write the result. Exit code 1 if a peer disagrees by more than 5%."""
    binaries = {name: path for name, path in {"aiperf": aiperf, "guidellm": guidellm}.items() if path is not None}
    if not binaries:
        raise click.UsageError("there is nothing to compare with; give --aiperf or --guidellm")
    try:
        versions = {name: _version(name, path) for name, path in binaries.items()}
        answers = compete(binaries, rounds, requests, wait_ms / 1e3)
    except (BenchmarkError, ServerDied) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    comparisons = {name: compare(name, answers[OURS], answers[name]) for name in binaries}
    result = {
        "versions": versions, "concurrency": CONCURRENCY, "requests": requests, "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS, "wait_s": wait_ms / 1e3, "tolerance": TOLERANCE,
        "comparisons": comparisons, "rounds": answers,
    }  # fmt: skip
    output.say(table(result))
    output.finish(result)
    sys.exit(any(abs(row["ratio"]["median"] - 1) > TOLERANCE for rows in comparisons.values() for row in rows.values()))


def compete(binaries: dict[str, Path], rounds: int, count: int, wait_s: float) -> dict[str, list[Figures]]:
    """Name -> figures of each round."""
    paced = PluginSpec(name="benchmarks.cross_check:Paced", options={"wait_s": wait_s})
    config = SageConfig(
        model=MODEL, device="cpu", threads=1, block_size=16, kv_blocks=1024, prefix_caching=False,
        plugins=(paced,) if wait_s else (),
    )
    with tempfile.TemporaryDirectory(prefix="sagellm-cross-check-") as scratch:
        workload = Workload(model_folder(MODEL), count, Path(scratch))
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})  # what is started inherits it
        server = Server(config)
        os.sched_setaffinity(0, cores - {min(cores)} or cores)
        try:
            server.ready()
            ours(workload, server.url, 4)  # the warm-up
            measures = {OURS: ours} | {name: partial(PEERS[name], path) for name, path in binaries.items()}
            clients = [Client(name, measure, workload, server) for name, measure in measures.items()]
            return interleave(clients, TRIES, rounds)
        finally:
            server.close()
            os.sched_setaffinity(0, cores)


def compare(name: str, mine: Sequence[Figures], theirs: Sequence[Figures]) -> dict[str, Any]:
    """Metric -> ours and theirs (medians, quartiles), their ratio by round, and the ratio of both to the server's own."""
    rows = {}
    for metric in METRICS:
        same = "itl_by_request_s" if (name, metric) == ("aiperf", "itl_s") else metric
        a, b = [row[same] for row in mine], [row[metric] for row in theirs]
        rows[metric] = {"ours": summary(a), name: summary(b), "rounds": [x / y for x, y in zip(a, b, strict=True)]}
        rows[metric]["ratio"] = paired_ratio(a, b)
        own = [[row[f"server_{metric}"] for row in side] for side in (mine, theirs)]
        rows[metric]["ratio_to_server"] = paired_ratio(np.divide(a, own[0]), np.divide(b, own[1]))
    return rows


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| peer | metric | ours / theirs | ratio by round | median | ratio to server |", "|---" * 6 + "|"]
    for name, rows in result["comparisons"].items():
        for metric, row in rows.items():
            label, unit, scale = METRICS[metric]
            rounds, peer = " ".join(f"{ratio:.3f}" for ratio in row["rounds"]), f"{name} {result['versions'][name]}"
            ours, theirs, plain, own = (row[key]["median"] for key in ("ours", name, "ratio", "ratio_to_server"))
            values = f"{ours * scale:.2f} / {theirs * scale:.2f}"
            lines.append(f"| {peer} | {label}, {unit} | {values} | {rounds} | {plain:.3f} | {own:.3f} |")
    return "\n".join(lines)


def _texts(model: Path, count: int, source: random.Random) -> list[str]:
    """Chats of `PROMPT_TOKENS` tokens, the template's among them: words that are one token each, whatever stands beside."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = sorted(name[1:] for name in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Za-z]{3,}", name))
    frame = len(tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False))
    return ["".join(f" {source.choice(words)}" for _ in range(PROMPT_TOKENS - frame)) for _ in range(count)]


def _server_figures(before: Figures, after: Figures) -> Figures:
    def delta(name: str) -> float:
        return sum(after[key] - before.get(key, 0.0) for key in after if key.startswith(f"lmdeploy:{name}{{"))

    requests, tokens = delta("time_to_first_token_seconds_count"), delta("generation_tokens_total")
    return {
        "server_prompt_tokens": delta("prompt_tokens_total"), "server_output_tokens": tokens,
        "server_ttft_s": delta("time_to_first_token_seconds_sum") / max(requests, 1),
        # Not its time_per_output_token: that holds the way from the engine to the front as well.
        "server_itl_s": delta("request_decode_time_seconds_sum") / max(tokens - requests, 1),
        "server_output_tokens_per_s": CONCURRENCY * tokens / (delta("e2e_request_latency_seconds_sum") or 1.0),
    }  # fmt: skip


def _run(name: str, command: list[str]) -> str:
    """Return its output. Raises BenchmarkError when it fails."""
    # aiperf takes a local tokenizer for a name of the hub when told to stay offline.
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{name} was not done within {LIMIT_S:g} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise BenchmarkError(f"{name} ended with code {done.returncode}: {' | '.join(words)}")
    return done.stdout


def _version(name: str, binary: Path) -> str:
    if shutil.which(binary) is None:
        install = f"python -m venv DIR && DIR/bin/pip install {name}=={VERSIONS[name]}"
        raise click.UsageError(f"--{name}: there is no program {binary}; install it apart with `{install}`")
    return _run(name, [str(binary), "--version"]).split()[-1]


if __name__ == "__main__":
    main()
