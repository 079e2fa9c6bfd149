"""The least time of a model's steps on a machine: each operator at the speed of the memory or of the products.

A step cannot be quicker than the sum over its operators of the larger of bytes / bandwidth and operations / rate. Both
limits are measured in turn with the contestants of a benchmark, since other guests of a machine share its memory.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import read_bandwidth_gb_s

__all__ = ["Shape", "Speed", "build_limits"]

BUFFER_BYTES = 512 << 20
PRODUCT = (512, 2048, 2048)  # rows, outputs, inputs
BYTES = 2  # of a weight and of a number in the KV cache: bfloat16


@dataclass(frozen=True)
class Speed:
    """Limits of a machine. `bandwidth`: bytes a second that it reads; `rate`: operations a second of its products."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with gated feed-forward layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> "Shape":
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"], config["num_hidden_layers"], heads, config.get("num_key_value_heads", heads),
            config.get("head_dim") or config["hidden_size"] // heads, config["intermediate_size"], config["vocab_size"],
        )  # fmt: skip

    def decode_s(self, batch: int, length: int, speed: Speed, common: int = 0) -> float:
        """Least seconds of a decode step of `batch` sequences of `length` tokens, which have the first `common` in common."""
        token = 2 * self.kv_heads * self.head_size * BYTES
        keys = token * (batch * (length - common) + common)
        attention = _larger(keys, 4 * batch * length * self.heads * self.head_size, speed)
        return self._products_s(batch, speed) + self.layers * attention + self._head_s(batch, speed)

    def prompt_s(self, batch: int, length: int, speed: Speed) -> float:
        """Least seconds until the first tokens of `batch` prompts of `length` tokens."""
        pairs = length * (length + 1) / 2  # each token sees the ones before it
        attention = 4 * batch * pairs * self.heads * self.head_size / speed.rate
        return self._products_s(batch * length, speed) + self.layers * attention + self._head_s(batch, speed)

    def _products_s(self, rows: int, speed: Speed) -> float:
        attended, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        matrices = [
            (attended + 2 * keys, self.hidden), (self.hidden, attended), (2 * self.feed_forward, self.hidden),
            (self.hidden, self.feed_forward),
        ]  # fmt: skip
        return self.layers * sum(_product_s(rows, *matrix, speed) for matrix in matrices)

    def _head_s(self, rows: int, speed: Speed) -> float:
        return _product_s(rows, self.vocabulary, self.hidden, speed)


def _product_s(rows: int, outputs: int, inputs: int, speed: Speed) -> float:
    return _larger(outputs * inputs * BYTES, 2 * rows * outputs * inputs, speed)


def _larger(num_bytes: float, operations: float, speed: Speed) -> float:
    return max(num_bytes / speed.bandwidth, operations / speed.rate)


def build_limits(threads: int, repeats: int = 5) -> Callable[[Any], Speed]:
    """Build a contestant that measures this machine: the best of some passes over a buffer, and of some products in bfloat16 by
    torch and by this project's kernels."""
    import torch

    from sagellm.engines.lmdeploy.cpu.packed import PackedWeight

    rows, outputs, inputs = PRODUCT
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()

    def best(work: Callable[[], Any]) -> float:
        found = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            found = min(found, time.perf_counter() - start)
        return found

    def measure(request: Any) -> Speed:
        bandwidth = 1e9 * read_bandwidth_gb_s(threads, BUFFER_BYTES, repeats)
        product = best(lambda: torch.nn.functional.linear(x, weight))
        product = min(product, best(lambda: packed.multiply(x)))
        return Speed(bandwidth, 2 * rows * outputs * inputs / product)

    packed = PackedWeight(weight)
    return measure
