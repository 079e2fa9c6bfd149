"""Analytic FLOPs of Llama-like decoders, and the dense peak that MFU divides by. A multiply-add is two FLOPs."""

import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.load.samples import Samples

FAMILIES = ("llama", "qwen2", "mistral")

# TFLOP/s without sparsity, by the name that CUDA gives the device: (16-bit tensor cores with float32 accumulation,
# float32 without TF32). A part of a device (MIG) has a name of its own and is not here.
# Source: NVIDIA's data sheets and architecture white papers of H100, H200, A100, L40S and GeForce Ada, tables of peak
# rates; where only a figure "with sparsity" is printed, half of it.
_H100_SXM = (989.4, 66.9)
_A100 = (312.0, 19.5)
GPU_TFLOPS: dict[str, tuple[float, float]] = {
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA L40S": (362.0, 91.6),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
}

GEMM_SIZES = (256, 1024, 2048, 4096)  # a small one first: some dtypes have no fast product and must not hang a run
GEMM_BUDGET_S = 4.0


class Shape(NamedTuple):
    """Sizes that the FLOPs of a decoder depend on."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        """Weights in the matrices of all layers; norms and biases are left out, their FLOPs are no matter."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def read_shape(folder: Path) -> Shape:
    """The shape in `folder/config.json` of a Hugging Face model.

    Raises:
        BenchmarkError: unreadable, a family that is not known here, or attention with a sliding window.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise BenchmarkError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise BenchmarkError(f"{file} is no JSON: {error}") from None
    family = config.get("model_type")
    if family not in FAMILIES:
        raise BenchmarkError(f"FLOPs of model_type {family!r} are not known; known are {', '.join(FAMILIES)}")
    # Qwen2's folders name a window and switch it off.
    if config.get("sliding_window") and config.get("use_sliding_window", family != "qwen2"):
        raise BenchmarkError(f"FLOPs of attention with a sliding window are not known; {file} has one")
    try:
        heads = config["num_attention_heads"]
        return Shape(
            config["hidden_size"], config["num_hidden_layers"], heads, config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads, config["intermediate_size"], config["vocab_size"],
        )  # fmt: skip
    except KeyError as error:
        raise BenchmarkError(f"{file} lacks {error}") from None


def linear_flops(shape: Shape, computed_tokens: np.ndarray, sampled_tokens: np.ndarray) -> np.ndarray:
    """Matrices of the layers for every computed token, the output layer only for tokens that are sampled."""
    output_weights = shape.hidden_size * shape.vocab_size
    return 2.0 * shape.layer_weights * computed_tokens + 2.0 * output_weights * sampled_tokens


def attention_flops(shape: Shape, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Scores and weighted sums of the tokens at positions first..end - 1, each of which sees itself and all before it."""
    context = (end * (end + 1.0) - first * (first + 1.0)) / 2
    return 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context


def request_flops(shape: Shape, prompt: np.ndarray, cached: np.ndarray, output: np.ndarray) -> np.ndarray:
    """FLOPs of each request, float64 [n], given its tokens [n]; 0 where there is no output.

    The prompt's last position gives the first output token, and the last output token is never fed back: with n outputs
    the positions cached..prompt + n - 2 are computed.
    """
    prompt, cached, output = (np.asarray(tokens, dtype=np.float64) for tokens in (prompt, cached, output))
    end = prompt + output - 1
    flops = linear_flops(shape, end - cached, output) + attention_flops(shape, cached, end)
    return np.where(output > 0, flops, 0.0)


def round_flops(shape: Shape, samples: Samples, cached_tokens: float) -> float:
    """FLOPs of one round's whole answers; the cached tokens of all requests are spread in proportion to prompts."""
    prompt = samples.prompt_tokens[samples.ok].astype(np.float64)
    share = min(cached_tokens / max(samples.prompt_tokens.sum(), 1), 1.0)
    cached = np.minimum(prompt * share, np.maximum(prompt - 1, 0))  # an engine computes at least the last token
    return float(request_flops(shape, prompt, cached, samples.output_tokens[samples.ok]).sum())


def peak_flops(device: str, dtype: str, threads: int) -> tuple[float, str]:
    """Dense peak of one device in FLOP/s, and its name for the result. `device`: cpu, cuda or cuda:N.

    On a CPU it is measured, in this process, within 5 seconds.

    Raises:
        BenchmarkError: no peak is known of this device or dtype.
    """
    if device == "cpu":
        from benchmarks.machine import describe

        peak = gemm_flops(dtype, threads, GEMM_SIZES, GEMM_BUDGET_S)
        return peak, f"measured GEMM peak, {dtype}, {threads} threads, {describe()['processor']}"
    if device.split(":")[0] != "cuda":
        raise BenchmarkError(f"no peak is known of device {device!r}; give peak_tflops in the config")
    import torch

    return gpu_peak_flops(torch.cuda.get_device_name(device), dtype)


def gpu_peak_flops(name: str, dtype: str) -> tuple[float, str]:
    """Dense peak in FLOP/s of the GPU that CUDA calls `name`. Raises BenchmarkError for one that is not in the table."""
    column = {"bfloat16": 0, "float16": 0, "float32": 1}.get(dtype)
    if name not in GPU_TFLOPS or column is None:
        raise BenchmarkError(
            f"no peak is known of {name!r} with {dtype}; give its dense peak as peak_tflops in the config"
        )
    return GPU_TFLOPS[name][column] * 1e12, f"data sheet dense peak, {dtype}, {name}"


def gemm_flops(dtype: str, threads: int, sizes: tuple[int, ...], budget_s: float) -> float:
    """Best FLOP/s of square matrix products on the CPU; each size is tried for its share of the budget.

    The number of threads of this process is put back. Sizes that would break the budget, judged by the one before, are
    left out.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    deadline = time.perf_counter() + budget_s
    best, last = 0.0, (0.0, 1)
    try:
        for number, size in enumerate(sorted(sizes)):
            if last[0] and time.perf_counter() + 2 * last[0] * (size / last[1]) ** 3 > deadline:
                break
            share_end = time.perf_counter() + (deadline - time.perf_counter()) / (len(sizes) - number)
            last = (_fastest_product(size, getattr(torch, dtype), share_end), size)
            best = max(best, 2.0 * size**3 / last[0])
    finally:
        torch.set_num_threads(before)
    return best


def _fastest_product(size: int, dtype: object, end: float) -> float:
    """Seconds; one product at least, and as many as are begun before `end`."""
    import torch

    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    out = torch.empty_like(left)
    fastest = float("inf")
    while fastest == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
