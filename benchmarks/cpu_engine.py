"""The CPU engine against `transformers`' generate: first token, decode speed, and requests that arrive staggered.

    python -m benchmarks.cpu_engine [--model DIR] [--rounds 5] [--out FILE]

Without --model: random weights of Qwen2.5-0.5B's shape in bfloat16. Both contestants get the same prompts and threads.
First token: seconds from the call to the first new token, mean and last over the batch. Decode: new tokens a second from
the last first token to the end. Floor: the time to read every weight once at this machine's measured bandwidth.
"""

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.machine import read_bandwidth_gb_s
from benchmarks.output import Output, spread, with_output

CELLS = ((1, 64), (1, 512), (8, 64), (8, 512))
NEW_TOKENS = 33
STAGGER_S, STAGGERED_REQUESTS, STAGGERED_TOKENS = 0.25, 16, 32
OURS, PEER = "sagellm", "transformers"


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True),
    help="Folder of a Hugging Face model; default: random weights of a 0.5B shape.",
)
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each cell.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@with_output
def main(model: Path | None, rounds: int, threads: int, output: Output) -> None:
    """Measure, print a table, and write the result."""
    with tempfile.TemporaryDirectory() as scratch:
        model = model or write_half_billion(Path(scratch))
        contestants = [
            Contestant(OURS, build_ours, str(model), threads),
            Contestant(PEER, build_transformers, str(model), threads),
        ]
        try:
            result = measure(contestants, rounds)
        finally:
            for contestant in contestants:
                contestant.close()
        weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    bandwidth = read_bandwidth_gb_s(threads)
    result["floor"] = {"bandwidth_gb_s": bandwidth, "weight_bytes": weight_bytes, "step_s": weight_bytes / bandwidth / 1e9}
    result = output.save(result)
    output.say(table(result))
    output.finish(result)


def write_half_billion(folder: Path) -> Path:
    """Random weights of Qwen2.5-0.5B's shape."""
    from sagellm.demo_model.random_model import write_random_model

    return write_random_model(
        folder / "qwen2-0.5b", architecture="qwen2", hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_embeddings=True, dtype="bfloat16", max_position_embeddings=32768,
    )  # fmt: skip


def measure(contestants: list[Contestant], rounds: int) -> dict[str, Any]:
    """One warm-up of each cell, then `rounds` interleaved ones."""
    cells = []
    for batch, length in CELLS:
        request = {"kind": "batch", "batch": batch, "length": length, "seed": batch * 1000 + length}
        interleave(contestants, request, 1)
        cells.append({"batch": batch, "length": length, **_compare(interleave(contestants, request, rounds))})
    request = {"kind": "staggered", "seed": 1}
    interleave(contestants, request, 1)
    staggered = interleave(contestants, request, rounds)
    speeds = {name: [answer["tokens_s"] for answer in answers] for name, answers in staggered.items()}
    return {
        "cells": cells,
        "staggered": {
            "tokens_s": {name: summary(values) for name, values in speeds.items()},
            "ratio": paired_ratio(speeds[OURS], speeds[PEER]),
        },
    }


def _compare(answers: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for metric in ("first_mean_s", "first_last_s", "tokens_s"):
        values = {name: [answer[metric] for answer in rows] for name, rows in answers.items()}
        report[metric] = {name: summary(rows) for name, rows in values.items()}
        report[metric]["ratio"] = paired_ratio(values[OURS], values[PEER])
    return report


# ---- contestants, each in its own process


def build_ours(model: str, threads: int) -> Any:
    from sagellm.core.config import SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    # Prompts repeat between rounds; a prefix hit would be measured instead of a prefill.
    config = SageConfig(device="cpu", threads=threads, context_length=2048, max_batch_size=8, prefix_caching=False)
    engine = LMDeployEngine(config, Path(model))

    def answer(request: dict[str, Any]) -> dict[str, float]:
        if request["kind"] == "batch":
            prompts = _prompts(request["batch"], request["length"], request["seed"])
            done = engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
            return _batch_figures([list(generation.token_s) for generation in done])
        prompts, delays = _staggered(request["seed"])
        params = SamplingParams(max_new_tokens=STAGGERED_TOKENS, ignore_eos=True)
        done = engine.generate(prompts, params, delays)
        end = max(delay + generation.token_s[-1] for delay, generation in zip(delays, done, strict=True))
        return {"tokens_s": STAGGERED_REQUESTS * STAGGERED_TOKENS / end}

    answer.close = engine.close
    return answer


def build_transformers(model: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(prompts: list[list[int]], new_tokens: int) -> list[float]:
        """Seconds of each new token; all prompts of a call have one length, so nothing is padded."""
        ids, clock, start = torch.tensor(prompts), Clock(), time.perf_counter()
        with torch.inference_mode():
            network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, eos_token_id=None, pad_token_id=0, streamer=clock,
            )  # fmt: skip
        return [moment - start for moment in clock.times[1:]]  # the first call carries the prompt

    def answer(request: dict[str, Any]) -> dict[str, float]:
        if request["kind"] == "batch":
            prompts = _prompts(request["batch"], request["length"], request["seed"])
            return _batch_figures([generate(prompts, NEW_TOKENS)] * len(prompts))
        prompts, delays = _staggered(request["seed"])
        start, served = time.perf_counter(), 0
        while served < len(prompts):  # static batching: whatever has arrived when the last batch is done, up to 8
            now = time.perf_counter() - start
            arrived = sum(delay <= now for delay in delays)
            if arrived == served:
                time.sleep(delays[served] - now)
                continue
            batch = prompts[served : min(arrived, served + 8)]
            generate(batch, STAGGERED_TOKENS)
            served += len(batch)
        return {"tokens_s": STAGGERED_REQUESTS * STAGGERED_TOKENS / (time.perf_counter() - start)}

    return answer


def _batch_figures(times: list[list[float]]) -> dict[str, float]:
    firsts = [row[0] for row in times]
    decode_s = max(row[-1] for row in times) - max(firsts)
    return {
        "first_mean_s": sum(firsts) / len(firsts),
        "first_last_s": max(firsts),
        "tokens_s": len(times) * (len(times[0]) - 1) / decode_s,
    }


def _prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1000, 100_000) for _ in range(length)] for _ in range(batch)]


def _staggered(seed: int) -> tuple[list[list[int]], list[float]]:
    return _prompts(STAGGERED_REQUESTS, 64, seed), [number * STAGGER_S for number in range(STAGGERED_REQUESTS)]


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| batch x prompt | first token, mean ms | last ms | ratio (mean) | decode tokens/s | ratio | step / floor |",
        "|---|---|---|---|---|---|---|",
    ]
    floor_s = result["floor"]["step_s"]
    for cell in result["cells"]:
        mean, last, speed = cell["first_mean_s"], cell["first_last_s"], cell["tokens_s"]
        step_s = cell["batch"] / speed[OURS]["median"]
        lines.append(
            f"| {cell['batch']} x {cell['length']} | {_pair(mean, 1e3)} | {_pair(last, 1e3)} | {_ratio(mean)} "
            f"| {_pair(speed)} | {_ratio(speed)} | {step_s / floor_s:.2f} |"
        )
    staggered = result["staggered"]
    machine, floor = result["machine"], result["floor"]
    return "\n".join(
        [
            f"{OURS} / {PEER} {machine['versions']['transformers']}, {machine['processor']}, {machine['cores']} cores",
            *lines,
            f"staggered, {STAGGERED_REQUESTS} requests {STAGGER_S} s apart: {_pair(staggered['tokens_s'])} tokens/s, "
            f"ratio {_ratio(staggered)}",
            f"floor {floor['step_s'] * 1e3:.1f} ms a step: {floor['weight_bytes'] / 1e9:.2f} GB at "
            f"{floor['bandwidth_gb_s']:.1f} GB/s",
        ]
    )


def _pair(metric: dict[str, Any], scale: float = 1.0) -> str:
    return f"{metric[OURS]['median'] * scale:.1f} / {metric[PEER]['median'] * scale:.1f}"


def _ratio(metric: dict[str, Any]) -> str:
    return spread(metric["ratio"])


if __name__ == "__main__":
    main()
