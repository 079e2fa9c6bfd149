"""Whether the client can keep a rate of sending: one core for it, another for a server that only streams.

    python -m benchmarks.client_capacity [--rate 200] [--seconds 10] [--chunks 32] [--poisson] [--rounds 3]

The server answers like /generate, a chunk every 10 ms. Target: at 200 requests a second the mean lateness of sends is
under 5% of the mean gap between them. Other work on the client's core adds to its lateness, so every round is shown.
The least disturbed round is the client's own figure.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import click
import numpy as np
from aiohttp import web

from benchmarks.config import Poisson
from benchmarks.errors import BenchmarkError
from benchmarks.load.arrivals import send_times
from benchmarks.load.plan import Plan, PlannedRequest
from benchmarks.load.samples import Samples, read_samples
from benchmarks.output import Output, table, with_output

PACE_S = 0.01
PROMPT_TOKENS = 256
TARGET_SHARE = 0.05
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--rate", default=200.0, show_default=True, type=POSITIVE, help="Requests a second.")
@click.option("--seconds", default=10.0, show_default=True, type=POSITIVE, help="Seconds of sending.")
@click.option("--chunks", default=32, show_default=True, type=click.IntRange(min=1), help="Chunks of each answer.")
@click.option("--poisson", is_flag=True, help="Random gaps between requests instead of even ones.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Rounds of each contestant.")
@with_output
def main(rate: float, seconds: float, chunks: int, poisson: bool, rounds: int, output: Output) -> None:
    """Measure, print, and write the result."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise click.UsageError(f"{len(cores)} core may be used; client and server need one each")
    count = max(2, round(rate * seconds))
    times = send_times(Poisson(rate=rate), count, seed=0) if poisson else np.arange(count) / rate
    requests = [
        PlannedRequest(scheduled_s=time_s, prompt_ids=[400] * PROMPT_TOKENS, max_tokens=chunks) for time_s in times
    ]
    arrivals = "poisson" if poisson else "even"
    output.say(f"{arrivals} arrivals, {rate:g} requests/s, {chunks} chunks each; target: lag < {TARGET_SHARE:.0%}")
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, chunks, cores[0]), daemon=True)
    server.start()
    try:
        plan = Plan(url=f"http://127.0.0.1:{here.recv()}", requests=requests)
        figures = [measure(plan, cores[1]) for _ in range(rounds)]
    finally:
        server.terminate()
        server.join()
    result = {
        "arrivals": arrivals, "rate": rate, "seconds": seconds, "chunks": chunks, "rounds": figures,
        "target_lag_share": TARGET_SHARE,
    }  # fmt: skip
    output.say(table(list(figures[0]), [[f"{value:.4g}" for value in each.values()] for each in figures]))
    output.finish(result)


def measure(plan: Plan, core: int) -> dict[str, float]:
    """One round: what the client says of its lag, the requests answered whole, and the gap between chunks it saw."""
    lag, samples = run_client(plan, core)
    gaps_s = np.diff(samples.chunk_s)[np.diff(samples.chunk_s) > 0]
    return {**lag, "ok": int(samples.ok.sum()), "of": len(plan.requests), "chunk_gap_s": float(np.median(gaps_s))}


def run_client(plan: Plan, core: int) -> tuple[dict[str, float], Samples]:
    """A client process on one core. Raises BenchmarkError when it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        file, samples = Path(scratch) / "plan.json", Path(scratch) / "samples.npz"
        plan.write(file)
        command = [sys.executable, "-m", "benchmarks.load.client", str(file), "--out", str(samples)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )
        if done.returncode != 0:
            raise BenchmarkError(f"the client ended with exit code {done.returncode}")
        return json.loads(done.stdout.splitlines()[-1]), read_samples(samples)


def serve(port: Connection, chunks: int, core: int) -> None:
    """A server that streams `chunks` chunks at a steady pace; sends its port. Runs until its process is ended."""
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(port, [_event(index + 1, chunks) for index in range(chunks)]))


async def _serve(port: Connection, events: list[bytes]) -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await asyncio.sleep(PACE_S)
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    port.send(site._server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


def _event(index: int, chunks: int) -> bytes:
    finish = {"type": "length"} if index == chunks else None
    meta = {
        "prompt_tokens": PROMPT_TOKENS, "completion_tokens": index, "finish_reason": finish,
        "output_token_logprobs": None,
    }  # fmt: skip
    message = {"text": " token", "output_ids": [1000 + index], "meta_info": meta, "routed_experts": None}
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


if __name__ == "__main__":
    main()
