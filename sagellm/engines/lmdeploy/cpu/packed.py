"""Weights packed for the native kernels, and the threads that multiply by them."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import nn

from sagellm import _core
from sagellm.core.cached_folder import default_cache_dir
from sagellm.engines.lmdeploy.cpu.compute import choose_isa
from sagellm.engines.lmdeploy.cpu.runtime import HUGE_PAGE_BYTES, use_huge_pages
from sagellm.models.levels import FLOAT8, Levels

__all__ = [
    "TILE", "PackedEmbedding", "PackedGate", "PackedWeight", "can_pack", "computing_in", "kernels", "kernels_of", "pack_gate",
    "team",
]  # fmt: skip

TILE = 32  # outputs of a tile of packed weights
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_local = threading.local()
_chosen = cache(choose_isa)


def team() -> _core.CpuTeam:
    """Return the threads that compute for the calling one: as many as torch has been given there.

    Torch itself then gets one thread here. Its OpenMP workers would spin for the cores that these threads need.
    """
    found = getattr(_local, "team", None)
    if found is None:
        found = _local.team = _core.CpuTeam(torch.get_num_threads())
        torch.set_num_threads(1)
    return found


@contextmanager
def computing_in(compute: str) -> Iterator[None]:
    """Pack weights in this thread for products of a type, as `choose_isa` has it; else for the quickest ones."""
    former, _local.compute = _compute(), compute
    try:
        yield
    finally:
        _local.compute = former


def _compute() -> str:
    return getattr(_local, "compute", "auto")


def kernels(dtype: torch.dtype) -> _core.CpuKernels:
    """Return the kernels for weights of `dtype`.

    Raises:
        ConfigError: as `choose_isa`.
    """
    return kernels_of(dtype, _chosen(_compute(), dtype, default_cache_dir()))


@cache
def kernels_of(dtype: torch.dtype, isa: str) -> _core.CpuKernels:
    """Return the kernels of an instruction set."""
    return _core.CpuKernels(DTYPES[dtype], isa)


def can_pack(weight: torch.Tensor) -> bool:
    """True for a row-major matrix of a dtype that the kernels know."""
    return weight.dim() == 2 and weight.dtype in DTYPES and weight.stride(1) == 1


class PackedWeight:
    """A matrix [outputs, inputs] in the kernels' layout.

    Args:
        weight: the matrix; its dtype is that of inputs and results.
        levels: the same matrix in few bits, which is packed in its place. With `computing_in("int8")` every matrix has some.
        in_8_bits: inputs are rounded to 8 bits, where this processor multiplies these and weights are not in float32, unless
            `computing_in` asks for another type. With "int8" they are rounded for all weights.

    Attributes:
        data: the packed numbers, one-dimensional.
        matrix: the same for the native code.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, levels: Levels | None = None, in_8_bits: bool = False
    ) -> None:
        self.outputs, self.inputs = weight.shape
        self.dtype, self.kernels = weight.dtype, kernels(weight.dtype)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        address = 0 if self._bias is None else self._bias.data_ptr()
        self.matrix = {"bias": address, "outputs": self.outputs, "inputs": self.inputs}
        if _compute() == "int8" and levels is None:
            levels = Levels.rounded(weight.detach().float().numpy())
        if levels is not None:
            self.matrix |= {"weight": 0, "format": levels.format, "block": levels.block}
            wanted = _compute() == "int8" or (in_8_bits and _compute() == "auto" and weight.dtype != torch.float32)
            if wanted and self.kernels.has_8_bits and levels.format != FLOAT8:
                self.matrix["in_8_bits"] = 1
            if levels.order is not None:
                self._order = np.ascontiguousarray(levels.order, np.int32)
                self.matrix["order"] = self._order.ctypes.data
            self.data = _storage(_core.packed_levels_bytes(self.matrix), torch.uint8)
            parts = [np.ascontiguousarray(part) for part in levels[:3]]
            _core.pack_levels(self.matrix, *(part.ctypes.data for part in parts), self.data.data_ptr())
        else:
            size = self.kernels.packed_bytes(self.outputs, self.inputs) // weight.element_size()
            self.data = _storage(size, weight.dtype)
            self.kernels.pack(weight.data_ptr(), weight.stride(0), self.outputs, self.inputs, self.data.data_ptr())
        self.matrix["weight"] = self.data.data_ptr()

    def copy(self) -> "PackedWeight":
        """Return the same matrix in other memory."""
        new = copy.copy(self)
        new.data = _storage(self.data.numel(), self.data.dtype).copy_(self.data)
        new.matrix = self.matrix | {"weight": new.data.data_ptr()}
        return new

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, [..., inputs] for int64 [...]."""
        numbers = numbers.contiguous()
        out = torch.empty(*numbers.shape, self.inputs)
        self.kernels.unpack(self.matrix, numbers.data_ptr(), numbers.numel(), out.data_ptr())
        return out.to(self.dtype)

    def multiply(self, x: torch.Tensor, gate: str = "", outputs: int | None = None, wide: bool = False) -> torch.Tensor:
        """Return x W^T + b, [..., outputs], in float32 if `wide`, else in the dtype of `x`: [..., inputs].

        Args:
            gate: silu or gelu: the weight holds tiles of gates and of factors in turn; the result is act(gate) * factor.
            outputs: numbers of a row of the result, if it is less than the weight has.
        """
        x = x.contiguous()
        if x.dtype != self.dtype or x.shape[-1] != self.inputs:
            raise ValueError(f"input is {x.dtype} {tuple(x.shape)}; the weight takes {self.dtype} [..., {self.inputs}].")
        outputs = outputs or self.outputs
        out = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32 if wide else x.dtype)
        rows = x.numel() // self.inputs
        self.kernels.multiply(team(), self.matrix, gate, x.data_ptr(), rows, out.data_ptr(), outputs, wide)
        return out


class _HugePages:
    """Memory in pages of 2 MiB, which matrices of less than a page share.

    In pages of 4 KiB a processor fetches ahead to the end of a page and no further: a decode step of SmolLM2 takes 3% longer.
    """

    SLAB_BYTES, ALIGNMENT = 32 << 20, 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialized bytes. Their slab is freed with the last part of it."""
        with self._lock:
            if self._used + num_bytes > len(self._slab):
                self._slab, self._used = self._new_slab(max(num_bytes, self.SLAB_BYTES)), 0
            taken = self._slab[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
            return taken

    def _new_slab(self, num_bytes: int) -> torch.Tensor:
        whole = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)  # what is never written takes no memory
        use_huge_pages(whole.data_ptr(), whole.nbytes)
        begin = -whole.data_ptr() % HUGE_PAGE_BYTES
        return whole[begin : begin + num_bytes]


_huge_pages = _HugePages()


def _storage(size: int, dtype: torch.dtype) -> torch.Tensor:
    return _huge_pages.take(size * dtype.itemsize).view(dtype)


def pack_gate(weight: torch.Tensor, levels: Levels | None = None, in_8_bits: bool = False) -> PackedWeight:
    """Pack [2 * size, inputs], gates first, so that each tile of gates is followed by that of their factors."""
    if levels is not None:
        levels = levels.in_order(lambda part: _tiles_in_turn(torch.from_numpy(part)).numpy())
    return PackedWeight(_tiles_in_turn(weight), levels=levels, in_8_bits=in_8_bits)


def _tiles_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """[2 * size, n] with tiles of both halves in turn, the last ones padded with zeros."""
    halves = rows.unflatten(0, (2, -1))
    halves = nn.functional.pad(halves, (0, 0, 0, -halves.shape[1] % TILE))
    return halves.unflatten(1, (-1, TILE)).transpose(0, 1).flatten(0, 2).contiguous()


class PackedGate(nn.Module):
    """act(x Wg^T) * (x Wu^T) in one pass over both weights."""

    def __init__(
        self, weight: torch.Tensor, activation: str, levels: Levels | None = None, in_8_bits: bool = False
    ) -> None:
        """`weight`: [2 * size, inputs], gates first. `activation`: silu or gelu."""
        super().__init__()
        self.size, self.activation = weight.shape[0] // 2, activation
        self.packed = pack_gate(weight, levels, in_8_bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., inputs]; returns [..., size]."""
        return self.packed.multiply(x, self.activation, self.size)


class PackedEmbedding(nn.Module):
    """Rows of a packed weight, so that a tied output layer and the embedding share one copy."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: [...] int64; returns [..., inputs]."""
        return self.packed.rows(tokens)
