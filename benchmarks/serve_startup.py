"""Time until `python -m sagellm.serve` is ready with a cached demo model, and its memory at rest.

    python -m benchmarks.serve_startup [--rounds 5] [--out FILE]

Memory: proportional set size of the server and all processes below it, three seconds after readiness, one request served.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.contestants import summary
from benchmarks.machine import describe


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, print, and write the result."""
    from sagellm.demo_model import ensure_demo_model

    ensure_demo_model()
    runs = [_run() for _ in range(rounds)]
    result: dict[str, Any] = {"rounds": rounds, "machine": describe()}
    for metric in ("ready_s", "memory_mb"):
        result[metric] = summary([run[metric] for run in runs])
        figures = result[metric]
        click.echo(f"{metric:<10} {figures['median']:7.1f}   ({figures['low']:.1f} to {figures['high']:.1f})")
    if out is not None:
        out.write_text(json.dumps(result, indent=1))


def _run() -> dict[str, float]:
    port = _free_port()
    start = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "sagellm.serve", "--json", "--port", str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        for line in server.stdout:
            if line.startswith('{"ready"'):
                break
        ready_s = time.perf_counter() - start
        _one_request(port)
        time.sleep(3)
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        memory = sum(process.memory_full_info().pss for process in processes)
    finally:
        server.terminate()
        server.wait(30)
    return {"ready_s": ready_s, "memory_mb": memory / 1e6}


def _one_request(port: int) -> None:
    body = json.dumps(
        {"model": "sagellm-demo", "max_tokens": 32, "messages": [{"role": "user", "content": "Write a function `add`."}]}
    ).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
