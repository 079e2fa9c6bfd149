"""Quantized weights beside those of 16 bits: speed, memory and loss, with llama.cpp's types made from the same weights.

    python -m benchmarks.quantization [--model smollm2] [--llama PYTHON] [--cells 1x64,8x64,1x512] [--rounds 5] [--out FILE]
    python -m benchmarks.quantization --kv [--cells 8x7000,1x64] [--rounds 5] [--out FILE]

All contestants get the same prompts and threads, and are asked in turn. `head 16` leaves the output layer in 16 bits; the
others hold it in 8. `rtn` rounds to the nearest level, with AWQ's layout and groups: AWQ and GPTQ are compared with it. Step
and first token: relative to bfloat16, medians of paired rounds. Limit: own bytes over the bandwidth of the same rounds.
Weights: bytes of all packed matrices. The loss is that of `sagellm evaluate`; its reference is transformers in float32.
With --llama its Q8_0 and Q4_0 are quantized from the file of the model, and have one request at a time.
With --kv the contestants are the KV schemas instead, alone and with weights of `int8`.
"""

import contextlib
import json
import random
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
from torch import nn

from benchmarks.contestants import Contestant, interleave, paired_ratio, summary
from benchmarks.cpu_engine import build_ours, gguf_file, parse_cells, write_half_billion
from benchmarks.limits import build_limits
from benchmarks.models.real_text import RealText, model_folder
from benchmarks.output import Output, spread, table, with_output
from benchmarks.peers.process import ContestantProcess
from sagellm.accel.quantization import QuantizationProfile, Quantized
from sagellm.accel.quantization.cache import quantized_copy
from sagellm.accel.quantization.groups import awq_tensors, choose_grid
from sagellm.accel.quantization.methods.awq import BITS, Awq
from sagellm.accel.quantization.registry import make_quantizer
from sagellm.core.config import SageConfig
from sagellm.core.errors import SageError
from sagellm.evaluate.models import EngineModel, LlamaCppModel, ScoredModel, TransformersModel
from sagellm.evaluate.run import Options, evaluate
from sagellm.models import find_model

BASE, LIMITS = "bfloat16", "limits"
METHODS = ("int8", "smoothquant", "fp8", "awq", "gptq")
WIDE_HEADS = ("int8", "awq")  # measured with an output layer of 16 bits too
BLOCK_SIZE = SageConfig().block_size
KV_SCHEMAS = ("int8", "fp8", "int4")
LLAMA_TYPES = {"llama.cpp Q8_0": 7, "llama.cpp Q4_0": 2}  # numbers of its file types
NEW_TOKENS = 33
MAKE_GGUF = """
import ctypes, sys
import llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(options)))
"""


class RoundToNearest(Awq):
    """AWQ's levels without its scales and its clipping."""

    name = "rtn"
    needs_calibration = False

    def profile(self) -> QuantizationProfile:
        return super().profile().model_copy(update={"method": self.name, "rounding": "nearest"})

    def quantize_layer(self, layer: nn.Module, sites: list[Any]) -> dict[str, Quantized]:
        found = {}
        for site in sites:
            for name, linear in site.linears.items():
                grid = choose_grid(linear.weight, BITS, self.group_size)
                levels = grid.levels(linear.weight)
                found[name] = Quantized(awq_tensors(levels, grid), grid.values(levels))
        return found


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name or folder; half-billion: random weights.")
@click.option("--llama", help="Python interpreter with llama-cpp-python; needs a model from a .gguf file.")
@click.option("--kv", "of_cache", is_flag=True, help="Measure KV schemas instead of methods.")
@click.option("--cells", default="1x64,8x64,1x512", show_default=True, help="Batches and lengths of prompts.")
@click.option("--rounds", default=5, show_default=True, help="Measured rounds of each cell.")
@click.option("--threads", default=2, show_default=True, help="Compute threads of an engine.")
@click.option("--loss-dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True,
              help="Type in which this engine computes the loss.")  # fmt: skip
@click.option("--tokens", default=20_000, show_default=True, help="Tokens of text to score; 0 measures no loss.")
@click.option("--answers", default=40, show_default=True, help="Greedy answers to compare.")
@with_output
def main(
    model: str, llama: str | None, of_cache: bool, cells: str, rounds: int, threads: int, loss_dtype: str, tokens: int,
    answers: int, output: Output,
) -> None:
    """Measure, print tables, and write the result."""
    wanted = parse_cells(cells)
    sizes = {
        "context": max(2048, *(length + 2 * NEW_TOKENS for _, length in wanted)),
        "batch": max(8, *(batch for batch, _ in wanted)),
    }
    try:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            is_random = model == "half-billion"
            folder = write_half_billion(scratch) if is_random else model_folder(model)
            contestants = _of_cache(folder) if of_cache else _of_weights(folder, scratch)
            files = _llama_files(llama, gguf_file(model), scratch) if llama else {}
            result: dict[str, Any] = {"model": model, "threads": threads, "rounds": rounds}
            text = None if is_random else RealText(folder)
            result |= _speeds(folder, contestants, files, llama, wanted, rounds, threads, sizes, text)
            if tokens:
                if not of_cache:
                    contestants["rtn"] = {"model": quantized_copy(folder, RoundToNearest())}
                result["loss_dtype"] = loss_dtype
                result["loss"] = _losses(folder, contestants, loss_dtype, files, llama, Options(tokens, answers=answers))
    except SageError as error:
        raise click.ClickException(str(error)) from None
    result = output.save(result)
    output.say(tables(result))
    output.finish(result)


def _of_weights(folder: Path, scratch: Path) -> dict[str, dict[str, Any]]:
    """Settings of each contestant."""
    folders = {name: quantized_copy(folder, make_quantizer(name)) for name in METHODS}
    folders |= {f"{name}, head 16": _with_wide_head(folders[name], scratch) for name in WIDE_HEADS}
    return {BASE: {"model": folder}} | {name: {"model": place} for name, place in folders.items()}


def _of_cache(folder: Path) -> dict[str, dict[str, Any]]:
    found = {BASE: {"model": folder}} | {f"kv {name}": {"model": folder, "kv_schema": name} for name in KV_SCHEMAS}
    return found | {"int8, kv int8": {"model": quantized_copy(folder, make_quantizer("int8")), "kv_schema": "int8"}}


def _with_wide_head(folder: Path, scratch: Path) -> Path:
    copy = scratch / f"{folder.name}-head16"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["head_bits"] = 16
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _llama_files(python: str, source: str, scratch: Path) -> dict[str, Path]:
    found = {}
    for name, number in LLAMA_TYPES.items():
        found[name] = scratch / f"{number}.gguf"
        done = subprocess.run([python, "-c", MAKE_GGUF, source, str(found[name]), str(number)], capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"llama.cpp cannot quantize {source}: {done.stderr.strip()[-300:]}")
    return found


def _speeds(
    folder: Path, settings: dict[str, dict[str, Any]], files: dict[str, Path], llama: str | None, wanted: list[tuple[int, int]],
    rounds: int, threads: int, sizes: dict[str, int], text: RealText | None,
) -> dict[str, Any]:  # fmt: skip
    with contextlib.ExitStack() as stack:
        contestants: list[Any] = [Contestant(LIMITS, build_limits, threads)]
        for name, own in settings.items():
            schema = own.get("kv_schema", "auto")
            contestants.append(Contestant(name, build_with_memory, str(own["model"]), threads, sizes, schema))
        for contestant in contestants:
            stack.callback(contestant.close)
        for name, file in files.items():
            arguments = {"engine": "llama", "model": str(file), "threads": threads} | sizes
            process = ContestantProcess(name, str(llama), "benchmarks.models.decode_worker", arguments, lambda: None)
            contestants.append(stack.enter_context(process))
            process.about()
        ours = [each for each in contestants if each.name in settings]
        weights = {each.name: each.ask({"do": "bytes"}) for each in ours}
        resident = {each.name: each.ask({"do": "resident"}) for each in ours}
        blocks = {each.name: each.ask({"do": "block bytes"}) for each in ours}
        cells = []
        for batch, length in wanted:
            if text is not None:
                prompts = [text.prose(length, batch * 1000 + length, number) for number in range(batch)]
            else:
                chance = random.Random(batch * 1000 + length)
                prompts = [[chance.randrange(1000, 100_000) for _ in range(length)] for _ in range(batch)]
            request = {"do": "times", "prompts": prompts, "new_tokens": NEW_TOKENS}
            asked = [each for each in contestants if batch == 1 or each.name not in files]
            interleave(asked, request, 1)
            answers = interleave(asked, request, rounds)
            speeds = answers.pop(LIMITS)
            firsts = {name: [max(row[0] for row in times) for times in every] for name, every in answers.items()}
            steps = {
                name: [(max(row[-1] for row in times) - max(row[0] for row in times)) / (NEW_TOKENS - 1) for times in every]
                for name, every in answers.items()
            }
            limits = {
                name: [(weights[name] + blocks[name] / BLOCK_SIZE * batch * (length + NEW_TOKENS // 2)) / speed.bandwidth
                       for speed in speeds]
                for name in weights if batch == 1 or length > 2048
            }  # fmt: skip
            cells.append({
                "batch": batch, "length": length,
                "step_s": {name: summary(values) for name, values in steps.items()},
                "first_s": {name: summary(values) for name, values in firsts.items()},
                "step": {name: paired_ratio(values, steps[BASE]) for name, values in steps.items() if name != BASE},
                "first": {name: paired_ratio(values, firsts[BASE]) for name, values in firsts.items() if name != BASE},
                "over_limit": {name: paired_ratio(steps[name], values) for name, values in limits.items()},
                "bandwidth_gb_s": statistics.median(speed.bandwidth for speed in speeds) / 1e9,
            })  # fmt: skip
        return {"weight_bytes": weights, "resident_bytes": resident, "block_bytes": blocks, "cells": cells}


def build_with_memory(model: str, threads: int, sizes: dict[str, int], kv_schema: str) -> Any:
    """`cpu_engine`'s contestant, which also answers with the bytes of its packed weights, its resident memory and the bytes of
    a KV block."""
    answer = build_ours(model, threads, sizes, settings={"kv_schema": kv_schema})

    def answer_or_count(request: dict[str, Any]) -> Any:
        if request["do"] == "bytes":
            return packed_bytes(answer.engine)
        if request["do"] == "block bytes":
            return answer.engine.info.kv_schema.block_bytes
        if request["do"] == "resident":
            status = Path("/proc/self/status").read_text()
            return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
        return answer(request)

    answer_or_count.close = answer.close  # type: ignore[attr-defined]
    return answer_or_count


def packed_bytes(engine: Any) -> int:
    """Bytes of the packed matrices of an engine, each counted once."""
    runner = engine.engine.executor.model_agent.patched_model
    found = {}
    for module in runner.model.modules():
        packed = getattr(module, "packed", None) or getattr(getattr(module, "impl", None), "packed", None)
        if packed is not None:
            found[packed.data.data_ptr()] = packed.data.nbytes
    return sum(found.values())


def _losses(
    folder: Path, settings: dict[str, dict[str, Any]], dtype: str, files: dict[str, Path], llama: str | None, options: Options
) -> dict[str, Any]:
    with contextlib.ExitStack() as loaded:
        models: list[ScoredModel] = [loaded.enter_context(TransformersModel("reference", folder, "float32"))]
        for name, own in settings.items():
            models.append(loaded.enter_context(EngineModel(name, SageConfig(device="cpu", dtype=dtype, **own))))
        for name, file in files.items():
            models.append(loaded.enter_context(LlamaCppModel(name, str(llama), file)))
        report = evaluate(find_model(folder).name, folder, models, options)
    return {
        model.name: {
            "kl_mean": model.kl_mean, "kl_p999": model.kl_p999, "same_top": model.same_top, "same_answers": model.same_answers,
            "perplexity": model.perplexity,
        }
        for model in report.models
    }  # fmt: skip


def tables(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = []
    base, block = result["weight_bytes"][BASE], result["block_bytes"][BASE]
    for name in result["cells"][0]["step_s"]:
        row: list[Any] = [name, "", ""]
        if name in result["weight_bytes"]:
            row = [name, f"{result['weight_bytes'][name] / base:.3f}", f"{block / result['block_bytes'][name]:.2f}"]
        for cell in result["cells"]:
            row.append(f"{1e3 * cell['step_s'][name]['median']:.2f}" if name in cell["step_s"] else "")
            row.append(spread(cell["step"][name]) if name in cell["step"] else "")
            row.append(spread(cell["first"][name]) if name in cell["first"] else "")
            row.append(spread(cell["over_limit"][name]) if name in cell["over_limit"] else "")
        rows.append(row)
    heads = ["weights", "of 16 bits", "blocks x"]
    for cell in result["cells"]:
        place = f"{cell['batch']}x{cell['length']}"
        heads += [f"{place} step ms", "x", "first token x", "over limit"]
    text = table(heads, rows)
    if "loss" in result:
        reference = result["loss"]["reference"]["perplexity"]
        losses = []
        for name, row in result["loss"].items():
            if name == "reference":
                continue
            answers = "" if row["same_answers"] is None else f"{row['same_answers']:.3f}"
            figures = [f"{row['kl_mean']:.5f}", f"{row['kl_p999']:.3f}", f"{row['same_top']:.4f}", answers]
            more = [f"{100 * (row['perplexity'][part] / reference[part] - 1):+.2f}%" for part in reference]
            losses.append([name, *figures, *more])
        text += "\n" + table(["weights", "mean KL", "99.9% KL", "same top", "same answers", "prose", "code"], losses)
    return text


if __name__ == "__main__":
    main()
