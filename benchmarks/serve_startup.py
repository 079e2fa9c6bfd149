"""Time from the start of `python -m sagellm.serve` to its first answer, memory and load at rest, and the model's conversion.

    python -m benchmarks.serve_startup [--rounds 5] [--out FILE]

Three starts take turns: the default model with an empty cache, which converts it; the default model; the demo model. Memory:
proportional set size of the server and all processes below it, three seconds after an answer. Load at rest: their CPU time in
the ten seconds that follow, as a share of one core. The conversion alone runs in a
process of its own, in an empty cache; its memory is the peak of that process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import click

from benchmarks.contestants import summary
from benchmarks.output import Output, spread, table, with_output
from benchmarks.processes import ServerProcess, free_port

MODELS = {"first start": ("smollm2", True), "later start": ("smollm2", False), "demo model": ("demo", False)}
CONTENT = "What is the capital of France?"
FIGURES = {"ready_s": ".1f", "answer_s": ".1f", "memory_mb": ".1f", "idle_core_percent": ".2f"}  # and how they are shown
IDLE_S = 10.0
# The peak is of this program alone; getrusage would count the process that started it too.
CONVERT_CODE = """
import json, time
from sagellm.models import find_model
start = time.perf_counter()
find_model("smollm2").prepare(quiet=True)
seconds = time.perf_counter() - start
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(json.dumps({"convert_s": seconds, "peak_mb": int(peak) * 1024 / 1e6}))
"""


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each contestant.")
@with_output
def main(rounds: int, output: Output) -> None:
    """Measure, print, and write the result."""
    from sagellm.models import find_model

    for model in ("smollm2", "demo"):
        find_model(model).prepare()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in MODELS}
    conversions = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            conversions.append(convert(Path(cache)))
        for name in list(MODELS)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(_run(*MODELS[name]))
    found = {name: {figure: summary([run[figure] for run in runs[name]]) for figure in FIGURES} for name in MODELS}
    rows = [(name, *(spread(values[figure], digits) for figure, digits in FIGURES.items())) for name, values in found.items()]
    output.say(table(["start", "ready, s", "first answer, s", "memory, MB", "at rest, % of a core"], rows))
    conversion = {figure: summary([run[figure] for run in conversions]) for figure in conversions[0]}
    row = [spread(values, ".1f") for values in conversion.values()]
    output.say(table(["conversion, s", "peak memory, MB"], [row]))
    output.finish({"rounds": rounds, "starts": found, "conversion": conversion})


def convert(cache: Path) -> dict[str, float]:
    """Convert the default model into an empty cache, in a process of its own.

    Returns:
        `convert_s` without the start of Python, and `peak_mb` of the process.
    """
    command = [sys.executable, "-c", CONVERT_CODE]
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)


def _run(model: str, with_empty_cache: bool) -> dict[str, float]:
    port = free_port()
    command = [sys.executable, "-m", "sagellm.serve", "--model", model, "--port", port, "--json"]
    with tempfile.TemporaryDirectory() as scratch:
        env = {"XDG_CACHE_HOME": str(Path(scratch) / "cache")} if with_empty_cache else None
        start = time.perf_counter()
        server = ServerProcess(command, port, Path(scratch) / "server", env=env)
        try:
            name = server.ready()["model"]
            ready_s = time.perf_counter() - start
            _one_request(server.url, name)
            answer_s = time.perf_counter() - start
            time.sleep(3)
            memory = sum(process.memory_full_info().pss for process in server.family())
            before = _cpu_s(server)
            time.sleep(IDLE_S)
            idle = (_cpu_s(server) - before) / IDLE_S
        finally:
            server.close()
    return {"ready_s": ready_s, "answer_s": answer_s, "memory_mb": memory / 1e6, "idle_core_percent": 100 * idle}


def _cpu_s(server: ServerProcess) -> float:
    times = [process.cpu_times() for process in server.family()]
    return sum(each.user + each.system for each in times)


def _one_request(url: str, model: str) -> None:
    body = {"model": model, "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": CONTENT}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    main()
