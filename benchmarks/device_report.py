"""A page on a device of LMDeploy's PyTorch engine: what it has, what it computes rightly, and how fast, beside its own limits.

    python -m benchmarks.device_report NAME [--report FILE] [--out FILE]

Correctness is `sagellm check device NAME`. Speed is that of the engine with random weights of a 0.5B shape. A decode step is
compared with the time to read the weights, and a prompt of 512 tokens with torch's best matrix product on the device.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.contestants import summary
from benchmarks.cpu_engine import write_half_billion
from benchmarks.machine import read_bandwidth_gb_s
from benchmarks.output import Output, with_output
from sagellm.core.cached_folder import write_whole
from sagellm.core.config import SageConfig
from sagellm.core.errors import SageError
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.contract import operators
from sagellm.engines.lmdeploy.contract.device import DEVICES, SUITE, operators_of
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.models.folder import num_weights

PROMPT, NEW, ROUNDS = 512, 65, 5
COPY_BYTES, PRODUCT = 1 << 30, 4096


@click.command()
@click.argument("name")
@click.option("--report", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write the page to this Markdown file.")
@with_output
def main(name: str, page: Path | None, output: Output) -> None:
    """Check and measure a device; exit code 1: it broke a rule."""
    try:
        check = SUITE.prepare(DEVICES, name, {})
        ops = operators_of(name)
    except SageError as error:
        raise click.ClickException(str(error)) from None
    found = check(seed=0, rounds=1, progress=None, limit_s=None)
    missing = operators.missing_operators(ops)
    dtype = "bfloat16"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_half_billion(Path(scratch))
        speed = measure(name, folder, dtype, limits(ops.device))
    result = {
        "device": name, "dtypes": [str(kind).removeprefix("torch.") for kind in ops.dtypes],
        "rules": {rule.rule: rule.message or "kept" for rule in found.results if rule.seen}, "missing": missing,
        "dtype": dtype, **speed,
    }  # fmt: skip
    text = markdown(result)
    if page is not None:
        write_whole(page, text)
    output.say(text)
    output.finish(result)
    raise SystemExit(0 if found.passed else 1)


def limits(device: str) -> dict[str, float]:
    """Bandwidth of the memory, 10^9 bytes a second, and the best rate of a product, 10^12 operations a second."""
    left, right = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = _best(lambda: left @ right, device)
    if device == "cpu":
        bandwidth = read_bandwidth_gb_s(torch.get_num_threads(), COPY_BYTES)
    else:
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        bandwidth = 2 * COPY_BYTES / _best(lambda: target.copy_(source), device) / 1e9
    return {"bandwidth_gb_s": bandwidth, "product_tflop_s": 2 * PRODUCT**3 / product_s / 1e12}


def _best(work: Callable[[], Any], device: str) -> float:
    """Seconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(6):
        begin_s = time.perf_counter()
        work()
        if device != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin_s)
    return best


def measure(name: str, folder: Path, dtype: str, limit: dict[str, float]) -> dict[str, Any]:
    """A decode step of one sequence and a prompt, in seconds, and what the limits would take."""
    weights = num_weights(folder)
    config = SageConfig(
        device=name, dtype=dtype, context_length=1024, max_batch_size=4, kv_blocks=64, prefix_caching=False,
        max_prefill_tokens=PROMPT,
    )  # fmt: skip
    prompt, steps, prompts = [(7 * place) % 90_000 + 1000 for place in range(PROMPT)], [], []
    with LMDeployEngine(config, folder) as engine:
        for _ in range(ROUNDS + 1):
            (answer,) = engine.generate([prompt], SamplingParams(NEW, ignore_eos=True))
            prompts.append(answer.token_s[0])
            steps.append((answer.token_s[-1] - answer.token_s[0]) / (NEW - 1))
    return {
        "limits": limit,
        "decode_step_s": summary(steps[1:]), "decode_limit_s": 2 * weights / limit["bandwidth_gb_s"] / 1e9,
        "prompt_s": summary(prompts[1:]), "prompt_limit_s": 2 * weights * PROMPT / limit["product_tflop_s"] / 1e12,
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """Return the page."""
    rows = [
        (what, *(f"{1e3 * value:.2f}" for value in (measured, limit)), f"{measured / limit:.2f}")
        for what, measured, limit in (
            ("decode step, one sequence", result["decode_step_s"]["median"], result["decode_limit_s"]),
            (f"prompt of {PROMPT} tokens", result["prompt_s"]["median"], result["prompt_limit_s"]),
        )
    ]
    speed = result["limits"]
    return "\n\n".join(
        [
            f"# Device {result['device']}",
            f"Types: {', '.join(result['dtypes'])}.",
            _table(["rule", "result"], list(result["rules"].items())),
            _table(["operator that it lacks", "reason"], list(result["missing"].items())),
            f"0.5B shape in {result['dtype']}. Limits measured by torch: {speed['bandwidth_gb_s']:.1f} GB/s, "
            f"{speed['product_tflop_s']:.3f} TFLOP/s.",
            _table(["work", "ms", "limit, ms", "over the limit"], rows),
        ]
    ) + "\n"  # fmt: skip


def _table(heads: list[str], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
