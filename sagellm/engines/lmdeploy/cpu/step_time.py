"""Time and size of decode steps of a model's shape on this machine, without its weights.

A decoder of that shape gets random weights in some format, and only as many layers as exceed the caches of the processor. Its
steps are timed, and the time of a layer counts as often as the model has layers. The model must be a dense decoder as
`compiled.describe` knows it.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sagellm import _core
from sagellm.engines.base import KVCacheSchema
from sagellm.engines.lmdeploy.cpu.cache import describe, dtype_of
from sagellm.engines.lmdeploy.cpu.packed import TILE, PackedWeight, kernels, pack_gate, team
from sagellm.engines.lmdeploy.cpu.runtime import use_huge_pages
from sagellm.models.levels import FLOAT8, LEVELS4, LEVELS8, Levels, whole_block

__all__ = ["DecoderSizes", "StepTimer", "WeightFormat"]

UNCACHED_BYTES = 256 << 20  # more than the caches of a processor hold
MAX_CACHE_BYTES = 512 << 20  # of the keys and values that a measurement allocates
SHORT = 64  # tokens
ROUNDS = 7
MAX_BLOCK = 64  # inputs that share a scale, if a row has one


@dataclass(frozen=True)
class WeightFormat:
    """`bits`: of the weights of linear layers; 16: plain. `group_size`: inputs that share a scale. `head_bits`: 8 or 16."""

    bits: int = 16
    group_size: int = 0
    is_float: bool = False
    head_bits: int = 16

    def levels(self, outputs: int, inputs: int) -> Levels | None:
        """Return random levels; None for a plain weight."""
        if self.bits == 16:
            return None
        form = LEVELS4 if self.bits == 4 else FLOAT8 if self.is_float else LEVELS8
        block = whole_block(inputs, self._block(inputs))
        # Floats of 8 bits have exponents, as nearly all weights do, and only levels of 4 bits have offsets.
        values = np.random.default_rng(0).integers(0, 16, (outputs, inputs), np.int8) + np.int8(64 * self.is_float)
        scales = np.full((outputs, inputs // block), 0.01, np.float16)
        return Levels(values, scales, scales * np.float16(-8 if self.bits == 4 else 0), form)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a packed matrix."""
        outputs = -(-outputs // TILE) * TILE
        if self.bits == 16:
            return 2 * outputs * inputs
        return outputs * inputs * self.bits // 8 + 4 * outputs * (inputs // whole_block(inputs, self._block(inputs)))

    def head(self) -> "WeightFormat":
        return WeightFormat() if self.head_bits == 16 else WeightFormat(8, MAX_BLOCK)

    def _block(self, inputs: int) -> int:
        group = self.group_size or inputs
        return group if self.bits == 4 or self.is_float else min(group, MAX_BLOCK)


@dataclass(frozen=True)
class DecoderSizes:
    """Shape of a dense decoder."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "DecoderSizes":
        """`config`: as `text_config` returns it. Raises KeyError: a size is missing."""
        heads = int(config["num_attention_heads"])
        return cls(
            layers=int(config["num_hidden_layers"]), hidden=int(config["hidden_size"]),
            feed_forward=int(config["intermediate_size"]), heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads), vocabulary=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings")),
        )  # fmt: skip

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of the matrices of a layer."""
        attended = self.heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.kv_heads * self.head_dim, self.hidden),
            "out": (self.hidden, attended),
            "gate_up": (2 * self.feed_forward, self.hidden),
            "down": (self.hidden, self.feed_forward),
        }

    def weight_bytes(self, form: WeightFormat) -> int:
        """Bytes of all matrices in memory. An output layer of its own leaves the embedding in 16 bits."""
        layer = sum(form.num_bytes(*shape) for shape in self.matrices.values())
        ends = form.head().num_bytes(self.vocabulary, self.hidden)
        if not self.is_tied:
            ends += WeightFormat().num_bytes(self.vocabulary, self.hidden)
        return self.layers * layer + ends


class StepTimer:
    """Times steps of a decoder in bfloat16 with random weights in some format."""

    def __init__(self, sizes: DecoderSizes, form: WeightFormat) -> None:
        self._sizes, self._kept = sizes, []
        of_layer = sum(form.num_bytes(*shape) for shape in sizes.matrices.values())
        self._num_layers = max(1, min(sizes.layers, -(-UNCACHED_BYTES // of_layer)))
        first = {name: self._pack(name, shape, form) for name, shape in sizes.matrices.items()}
        layers = []
        for number in range(self._num_layers):
            matrices = {name: (one if number == 0 else one.copy()) for name, one in first.items()}
            self._kept.append(matrices)
            norms = {name: self._ones(sizes.hidden) for name in ("attention_norm", "feed_forward_norm")}
            nothing = dict.fromkeys(("after_attention", "after_feed_forward", "query_norm", "key_norm", "window"), 0)
            layers.append({name: one.matrix for name, one in matrices.items()} | norms | nothing | {"experts": None})
        self._head = self._pack("head", (sizes.vocabulary, sizes.hidden), form.head())
        shape = {
            "hidden": sizes.hidden, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_size": sizes.head_dim,
            "vocabulary": sizes.vocabulary, "epsilon": 1e-5, "attention_scale": sizes.head_dim**-0.5, "softcap": 0.0,
            "logit_softcap": 0.0, "embedding_scale": 1.0, "activation": "silu",
        }  # fmt: skip
        native = kernels(torch.bfloat16)
        self._decoder = _core.CpuDecoder(native, shape, layers, self._head.matrix, self._ones(sizes.hidden), self._head.matrix)

    def step_s(self, schema: KVCacheSchema, batch: int, length: int) -> float:
        """Return seconds of a decode step of `batch` sequences of `length` tokens each: the median of several."""
        most = MAX_CACHE_BYTES * schema.num_layers // (self._num_layers * batch * schema.block_bytes) * schema.block_size
        measured = min(length, max(most, 4 * SHORT))
        of_layers = self._layers_s(schema, batch, measured)
        if measured < length:  # attention takes time in proportion to the tokens
            short = self._layers_s(schema, batch, SHORT)
            of_layers = short + (of_layers - short) * (length - SHORT) / (measured - SHORT)
        hidden = torch.ones(batch, self._sizes.hidden, dtype=torch.bfloat16)
        head = _median_s(lambda: self._head.multiply(hidden, wide=True))
        return of_layers * self._sizes.layers / self._num_layers + head

    def _layers_s(self, schema: KVCacheSchema, batch: int, length: int) -> float:
        blocks = -(-length // schema.block_size)
        caches = [self._cache(schema, batch * blocks) for _ in range(self._num_layers)]
        tables = torch.randperm(batch * blocks).reshape(batch, blocks)
        hidden = torch.empty(batch, self._sizes.hidden, dtype=torch.bfloat16)
        angles = torch.ones(1, 2 * self._sizes.head_dim)
        ones = torch.ones(batch, dtype=torch.int64)
        tensors = {"tokens": ones, "query_lengths": ones, "lengths": ones * length, "positions": 0 * ones, "tables": tables}
        step = {name: one.data_ptr() for name, one in tensors.items()} | {
            "is_decoding": True, "num_tokens": batch, "num_sequences": batch, "table_width": blocks,
            "angles": angles.data_ptr(), "num_angles": 1, "hidden": hidden.data_ptr(),
            "sharing": "never",
        }  # fmt: skip
        self._decoder.bind(describe(caches, self._sizes.head_dim))
        return _median_s(lambda: self._decoder.run(team(), step))

    def _cache(self, schema: KVCacheSchema, num_blocks: int) -> tuple[torch.Tensor, ...]:
        width = self._sizes.head_dim // (2 if schema.dtype == "int4" else 1)
        dtype = dtype_of(schema.dtype)

        def part(numbers: int, kind: torch.dtype) -> torch.Tensor:
            # Unwritten memory would be one page of zeros.
            shape = (num_blocks, schema.block_size, schema.num_kv_heads, numbers * kind.itemsize)
            tensor = torch.full(shape, 0x3C, dtype=torch.uint8)
            use_huge_pages(tensor.data_ptr(), tensor.nbytes)
            return tensor.view(kind)

        numbers = (part(width, dtype), part(width, dtype))
        return (*numbers, part(2, torch.bfloat16), part(2, torch.bfloat16)) if schema.scale_dtype else numbers

    def _pack(self, name: str, shape: tuple[int, int], form: WeightFormat) -> PackedWeight:
        weight = torch.full(shape, 0.01, dtype=torch.bfloat16)
        levels, in_8_bits = form.levels(*shape), not form.is_float
        if name == "gate_up":
            return pack_gate(weight, levels, in_8_bits)
        return PackedWeight(weight, levels=levels, in_8_bits=in_8_bits)

    def _ones(self, count: int) -> int:
        self._kept.append(torch.ones(count))
        return self._kept[-1].data_ptr()


def _median_s(work: Any) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
