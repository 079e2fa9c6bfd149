"""Time that the gateway adds to streamed requests, and the throughput that it costs a real engine.

    python -m benchmarks.gateway [--requests 2000] [--concurrency 64] [--out FILE]
    python -m benchmarks.gateway --engine sagellm [--place manager] --requests 640 --concurrency 8 [--out FILE]
    python -m benchmarks.gateway --engine vllm --executable PYTHON --requests 640 --concurrency 8 [--out FILE]

The engine, the manager and the client are a process each. Without --engine an endpoint sends tokens at a fixed pace; with it
the manager starts the engine. Requests go directly to the engine and through the gateway in turns, so that drift of the machine
hits both alike. An added time is the difference of two quantiles. Tokens/s: through the gateway over directly, of each pair of
turns. Prompts differ, so that no prefix is cached. Greedy answers to the same prompts, one at a time, are compared. They
were asked for once before: vLLM computes a prompt with a cached prefix in other pieces, which rounds otherwise.

With `--place manager` both ways go through a gateway: of a manager whose engine is a process, and of one in whose process the
engine runs. Processor time is that of the second manager, here with its engine.
"""

import asyncio
import contextlib
import json
import operator
import os
import shlex
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import click
import numpy as np
import psutil
from openai import OpenAI

from benchmarks.contestants import paired_ratio
from benchmarks.models.real_text import model_folder
from benchmarks.output import Output, spread, table, with_output
from benchmarks.processes import ServerProcess, free_port, manager_process

PATH = "/v1/chat/completions"
MODEL = "measured"  # its name in the API
COMPARED = 16  # greedy answers
READY_S = 600.0


@click.command()
@click.option("--engine", type=click.Choice(["paced", "sagellm", "vllm"]), default="paced", show_default=True,
              help="Engine behind the gateway.")  # fmt: skip
@click.option("--model", default="smollm2", show_default=True, help="Model of a real engine.")
@click.option("--executable", help="vLLM's command, or the Python interpreter that has it.")
@click.option("--vllm-flags", default="", help="Further flags of vLLM's server, such as '--dtype float32'.")
@click.option("--place", type=click.Choice(["process", "manager"]), default="process", show_default=True,
              help="Process of the engine sagellm.")  # fmt: skip
@click.option("--requests", "num_requests", type=click.IntRange(10), default=2000, show_default=True, help="Requests each way.")
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True, help="Requests at once.")
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens of an answer.")
@click.option("--pace-ms", type=float, default=50.0, show_default=True, help="Milliseconds between two tokens.")
@click.option("--turns", type=click.IntRange(1), default=10, show_default=True, help="Turns of each way.")
@click.option("--router", default="least-load", show_default=True, help="Router of the gateway.")
@with_output
def main(
    engine: str, model: str, executable: str | None, vllm_flags: str, place: str, num_requests: int, concurrency: int,
    tokens: int, pace_ms: float, turns: int, router: str, output: Output,
) -> None:  # fmt: skip
    """Measure, print, and write the result."""
    if place == "manager" and engine != "sagellm":
        raise click.UsageError(f"--place manager needs --engine sagellm, got {engine}.")
    first, second = ("process", "manager") if place == "manager" else ("direct", "gateway")
    found: dict[str, list[list[float]]] = {first: [], second: []}
    rates: dict[str, list[float]] = {name: [] for name in found}
    same = None
    with contextlib.ExitStack() as stack:
        if engine == "paced":
            endpoint = _endpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())), pace_ms)
            stack.callback(endpoint.close)
            endpoint.ready()
            spec: dict[str, Any] = {"kind": "openai", "url": endpoint.url}
        else:
            spec = {"kind": engine, "model": str(model_folder(model)), "model_name": MODEL}
            spec |= {"executable": executable, "flags": shlex.split(vllm_flags)} if engine == "vllm" else {}
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; by itself vLLM takes nearly all memory
        manager = _manager(stack, spec | {"place": place}, router)
        other = _manager(stack, spec, router).url if place == "manager" else _engine_url(manager.url)
        ways = {first: other, second: manager.url}
        for name, url in ways.items():  # connections, caches and code that runs once
            asyncio.run(_load(url, concurrency * 2, concurrency, tokens, f"first {name}"))
        spent_s = 0.0
        for turn in range(turns):
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                before_s, begun = _cpu_s(manager), time.perf_counter()
                rows = asyncio.run(_load(ways[name], num_requests // turns, concurrency, tokens, f"{turn} {name}"))
                rates[name].append(len(rows) * tokens / (time.perf_counter() - begun))
                found[name] += rows
                spent_s += _cpu_s(manager) - before_s if name == second else 0.0
        if engine != "paced":
            same = _same_answers(ways, tokens)
    values = {name: np.array(rows) * 1000 for name, rows in found.items()}
    figures = {}
    for column, what in enumerate(("first_token", "last_token")):
        for quantile in (50, 99):
            ms = {name: float(np.percentile(rows[:, column], quantile)) for name, rows in values.items()}
            figures[f"{what}_p{quantile}_ms"] = ms | {"added": ms[second] - ms[first]}
    num = len(values[second])
    cost = {"cpu_us_a_request": 1e6 * spent_s / num, "cpu_us_a_token": 1e6 * spent_s / num / tokens}
    rows = [(name, *(f"{each:.2f}" for each in row.values())) for name, row in figures.items()]
    output.say(table(["figure", first, second, "added"], rows))
    output.say(f"processor time of the manager: {cost['cpu_us_a_request']:.0f} us a request of {tokens} tokens")
    rate = paired_ratio(rates[second], rates[first])
    output.say(f"tokens/s, {second} over {first}: {spread(rate)}; greedy answers that are the same: {same}")
    options = {
        "engine": engine, "vllm_flags": vllm_flags, "place": place, "model": model, "requests": num_requests,
        "concurrency": concurrency, "tokens": tokens, "pace_ms": pace_ms, "turns": turns, "router": router,
    }  # fmt: skip
    result = {"options": options, "figures": figures, "cost": cost, "tokens_s": rates, "tokens_s_ratio": rate}
    output.finish(result | {"same_answers": same})


def _manager(stack: contextlib.ExitStack, spec: dict[str, Any], router: str) -> ServerProcess:
    """Return a manager that has started with this engine, and ends with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    manager = manager_process(folder, {"one": spec}, router=router)
    stack.callback(manager.close)
    manager.ready(READY_S)
    return manager


def _endpoint(folder: Path, pace_ms: float) -> ServerProcess:
    port = free_port()
    words = [sys.executable, "-m", "benchmarks.paced", "--port", port, "--pace-ms", pace_ms, "--model", MODEL]
    return ServerProcess(words, port, folder / "endpoint")


def _engine_url(url: str) -> str:
    """Return where the manager's engine serves."""
    with urllib.request.urlopen(f"{url}/control/engines") as answer:
        return json.load(answer)["engines"][0]["url"]


def _same_answers(ways: dict[str, str], tokens: int) -> float:
    """Return the share of prompts whose greedy answers are the same both ways."""
    answers: list[list[str | None]] = []
    one, other = ways.values()
    for url in (one, one, other):  # the first answers are not compared
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answers.append([
                client.chat.completions.create(
                    model=MODEL, messages=_messages(f"same {number}"), max_tokens=tokens, temperature=0
                ).choices[0].message.content
                for number in range(COMPARED)
            ])  # fmt: skip
    return sum(map(operator.eq, *answers[1:])) / COMPARED


def _messages(mark: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{mark}: count the apples. " + "An apple is red. " * 24}]


def _cpu_s(server: ServerProcess) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return times.user + times.system


async def _load(url: str, num: int, concurrency: int, tokens: int, mark: str) -> list[list[float]]:
    """Return seconds to the first and to the last token of each request. No other has the same `mark`."""
    left = iter(range(num))
    found: list[list[float]] = []
    wanted = {"model": MODEL, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    headers = {"content-type": "application/json"}

    async def user(http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(0.3 * number / concurrency)  # requests of all users at one moment would wait for each other
        for each in left:
            body = json.dumps(wanted | {"messages": _messages(f"{mark} {each}")}).encode()
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
