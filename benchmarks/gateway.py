"""Time that the gateway adds to streamed requests, against an endpoint that sends tokens at a fixed pace.

    python -m benchmarks.gateway [--requests 2000] [--concurrency 64] [--out FILE]

The endpoint, the manager and the client are a process each. Requests go directly to the endpoint and through the gateway in
turns of some hundred, so that drift of the machine hits both alike. An added time is the difference of two quantiles.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import click
import numpy as np
import psutil

from benchmarks.output import Output, table, with_output
from benchmarks.processes import ServerProcess, free_port

PATH = "/v1/chat/completions"
UP = "from sagellm.cli import main; main()"


@click.command()
@click.option("--requests", "num_requests", type=click.IntRange(10), default=2000, show_default=True, help="Requests each way.")
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True, help="Requests at once.")
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens of an answer.")
@click.option("--pace-ms", type=float, default=50.0, show_default=True, help="Milliseconds between two tokens.")
@click.option("--turns", type=click.IntRange(1), default=10, show_default=True, help="Turns of each way.")
@click.option("--router", default="least-load", show_default=True, help="Router of the gateway.")
@with_output
def main(
    num_requests: int, concurrency: int, tokens: int, pace_ms: float, turns: int, router: str, output: Output
) -> None:  # fmt: skip
    """Measure, print, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = _endpoint(Path(folder), pace_ms)
        manager = None
        try:
            endpoint.ready()
            manager = _manager(Path(folder), endpoint.url, router)
            manager.ready()
            ways = {"direct": endpoint, "gateway": manager}
            for server in ways.values():  # connections, caches and code that runs once
                asyncio.run(_load(server.url, concurrency * 2, concurrency, tokens))
            found: dict[str, list[list[float]]] = {name: [] for name in ways}
            spent_s = 0.0
            for turn in range(turns):
                for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                    before_s = _cpu_s(manager)
                    found[name] += asyncio.run(_load(ways[name].url, num_requests // turns, concurrency, tokens))
                    spent_s += _cpu_s(manager) - before_s if name == "gateway" else 0.0
        finally:
            for server in filter(None, (manager, endpoint)):
                server.close()
    values = {name: np.array(rows) * 1000 for name, rows in found.items()}
    figures = {}
    for place, what in enumerate(("first_token", "last_token")):
        for quantile in (50, 99):
            ms = {name: float(np.percentile(rows[:, place], quantile)) for name, rows in values.items()}
            figures[f"{what}_p{quantile}_ms"] = ms | {"added": ms["gateway"] - ms["direct"]}
    num = len(values["gateway"])
    cost = {"cpu_us_a_request": 1e6 * spent_s / num, "cpu_us_a_token": 1e6 * spent_s / num / tokens}
    rows = [(name, *(f"{each:.2f}" for each in row.values())) for name, row in figures.items()]
    output.say(table(["figure", "direct", "gateway", "added"], rows))
    output.say(f"processor time of the manager: {cost['cpu_us_a_request']:.0f} us a request of {tokens} tokens")
    options = {"requests": num_requests, "concurrency": concurrency, "tokens": tokens, "pace_ms": pace_ms, "turns": turns,
               "router": router}  # fmt: skip
    output.finish({"options": options, "figures": figures, "cost": cost})


def _endpoint(folder: Path, pace_ms: float) -> ServerProcess:
    port = free_port()
    words = [sys.executable, "-m", "benchmarks.paced", "--port", port, "--pace-ms", pace_ms]
    return ServerProcess(words, port, folder / "endpoint")


def _manager(folder: Path, url: str, router: str) -> ServerProcess:
    port = free_port()
    file = folder / "up.yaml"
    engines = {"paced": {"kind": "openai", "url": url}}
    file.write_text(json.dumps({"port": port, "router": router, "engines": engines}))
    words = [sys.executable, "-c", UP, "up", str(file), "--json"]
    return ServerProcess(words, port, folder / "manager", env={"XDG_CACHE_HOME": str(folder / "cache")})


def _cpu_s(server: ServerProcess) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return times.user + times.system


async def _load(url: str, num: int, concurrency: int, tokens: int) -> list[list[float]]:
    """Return seconds to the first and to the last token of each request."""
    left = iter(range(num))
    found: list[list[float]] = []
    body = json.dumps({
        "model": "paced", "messages": [{"role": "user", "content": "x" * 400}], "stream": True, "max_tokens": tokens
    }).encode()  # fmt: skip
    headers = {"content-type": "application/json"}

    async def user(http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(0.3 * number / concurrency)  # requests of all users at one moment would wait for each other
        for _ in left:
            begun, first = time.perf_counter(), 0.0
            async with http.post(url + PATH, data=body, headers=headers) as answer:
                answer.raise_for_status()
                tail = b""
                async for piece in answer.content.iter_any():
                    first = first or time.perf_counter() - begun
                    tail = (tail + piece)[-32:]
            if b"[DONE]" not in tail:
                raise click.ClickException(f"an answer of {url} has no end: {tail!r}")
            found.append([first, time.perf_counter() - begun])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(user(http, number) for number in range(concurrency)))
    return found


if __name__ == "__main__":
    main()
