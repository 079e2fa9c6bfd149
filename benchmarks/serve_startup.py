"""Time until `python -m sagellm.serve` is ready with a cached demo model, and its memory at rest.

    python -m benchmarks.serve_startup [--rounds 5] [--out FILE]

Memory: proportional set size of the server and all processes below it, three seconds after readiness, one request served.
"""

import json
import time
import urllib.request

import click

from benchmarks.contestants import summary
from benchmarks.output import Output, spread, table, with_output
from benchmarks.pd.group import single_server


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each contestant.")
@with_output
def main(rounds: int, output: Output) -> None:
    """Measure, print, and write the result."""
    from sagellm.demo_model import ensure_demo_model

    ensure_demo_model()
    runs = [_run() for _ in range(rounds)]
    found = {metric: summary([run[metric] for run in runs]) for metric in ("ready_s", "memory_mb")}
    output.say(table(["figure", "median (quartiles)"], [(name, spread(values, ".1f")) for name, values in found.items()]))
    output.finish({"rounds": rounds} | found)


def _run() -> dict[str, float]:
    start = time.perf_counter()
    with single_server() as server:
        ready_s = time.perf_counter() - start
        _one_request(server.url)
        time.sleep(3)
        memory = sum(process.memory_full_info().pss for process in server.family())
    return {"ready_s": ready_s, "memory_mb": memory / 1e6}


def _one_request(url: str) -> None:
    body = json.dumps(
        {"model": "sagellm-demo", "max_tokens": 32, "messages": [{"role": "user", "content": "Write a function `add`."}]}
    ).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    main()
