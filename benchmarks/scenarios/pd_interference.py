"""Running streams while long prompts come: one engine that does both, against one for prompts and one for the rest, on the
same cores."""

import os
import random
import statistics
from typing import Any

import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.pd.client import Reply, Request, ask_all
from benchmarks.pd.group import pd_group, single_server
from benchmarks.pd.prompts import prompt
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {
    "streams": 4, "tokens": 1600, "prompts": 16, "prompt_tokens": 1950, "every_s": 0.5, "repeats": 2, "model": "demo",
}  # fmt: skip
DEFINITIONS = {
    "pd_interference_gain": Definition(
        unit="1", better="higher",
        text="99th percentile of the time between tokens of `streams` running streams while `prompts` prompts of "
        "`prompt_tokens` tokens come, one every `every_s`: of one engine on two cores, by that of a prefill and a decode "
        "engine on one core each; median of `repeats`, taken in turns.",
    ),
    "pd_interference_hybrid_p99_ms": Definition(
        unit="ms", better="lower", text="99th percentile of the time between tokens of one engine."
    ),
    "pd_interference_pd_p99_ms": Definition(
        unit="ms", better="lower", text="99th percentile of the time between tokens of two engines."
    ),
    "pd_interference_hybrid_p50_ms": Definition(unit="ms", better="lower", text="Median time between tokens of one engine."),
    "pd_interference_pd_p50_ms": Definition(unit="ms", better="lower", text="Median time between tokens of two engines."),
    "pd_interference_hybrid_ttft_ms": Definition(
        unit="ms", better="lower", text="Long prompts on one engine: time to the first token, median."
    ),
    "pd_interference_pd_ttft_ms": Definition(
        unit="ms", better="lower", text="Long prompts on two engines: time to the first token, median."
    ),
}  # fmt: skip
WARM_TOKENS = 16
POOL = ("--kv-blocks", "512")


def run(
    seed: int, streams: int, tokens: int, prompts: int, prompt_tokens: int, every_s: float, repeats: int, model: str
) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise BenchmarkError("this scenario compares two engines with one on two cores; this process may use one core only")
    found: dict[str, list[dict[str, float]]] = {"hybrid": [], "pd": []}
    for number in range(repeats):
        source = random.Random(seed * 100 + number)
        work = [Request(prompt(32, source, model), tokens, 0.0, model, True) for _ in range(streams)]
        work += [Request(prompt(prompt_tokens, source, model), 4, 1.0 + every_s * each, model) for each in range(prompts)]
        for name in ("hybrid", "pd") if number % 2 == 0 else ("pd", "hybrid"):
            if name == "hybrid":
                server = single_server((*POOL, "--threads", "2"), cores, model)
            else:
                server = pd_group(["--pin"], serve=POOL, model=model)
            with server:
                # Warm, and costs to route by.
                ask_all(server.url, [Request(prompt(200, source, model), 8, model=model) for _ in range(4)], 2)
                replies = ask_all(server.url, work)
            found[name].append(_figures(replies[:streams], replies[streams:]))
    median = {
        name: {key: statistics.median([each[key] for each in every]) for key in every[0]} for name, every in found.items()
    }
    gains = [ours["p99"] / theirs["p99"] for ours, theirs in zip(found["hybrid"], found["pd"], strict=True)]
    return {"pd_interference_gain": statistics.median(gains)} | {
        f"pd_interference_{name}_{key}_ms": value * 1e3 for name, figures in median.items() for key, value in figures.items()
    }


def _figures(streams: list[Reply], others: list[Reply]) -> dict[str, float]:
    if wrong := [each for each in (*streams, *others) if each.error]:
        raise BenchmarkError(f"{len(wrong)} requests failed; the first: {wrong[0].status} {wrong[0].error}")
    begin_s, end_s = min(each.sent_s for each in others), max(each.end_s for each in others)
    gaps = [
        later - earlier
        for each in streams
        for earlier, later in zip(each.pieces_s[WARM_TOKENS:], each.pieces_s[WARM_TOKENS + 1 :], strict=False)
        if later >= begin_s and earlier <= end_s
    ]
    if len(gaps) < 100:
        raise BenchmarkError(f"{len(gaps)} tokens of streams came while prompts did; ask for more tokens or fewer prompts")
    ttft = statistics.median([each.pieces_s[0] - each.sent_s for each in others])
    return {"p99": float(np.percentile(gaps, 99)), "p50": statistics.median(gaps), "ttft": ttft}
