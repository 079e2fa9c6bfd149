"""Keys and values as they lie in LMDeploy's cache on the CPU device.

A layer's cache is (keys, values), [blocks, block_size, kv_heads, head_size] each. Numbers of few bits have two tensors more,
(keys, values, key scales, value scales). A number is scale * (code - zero point). The scales are [blocks, block_size, kv_heads,
2], scale and zero point of a head of a token.

Codes of keys of 4 and 8 bits lie in groups of KEY_GROUP tokens. The words of 4 bytes of a head, [tokens, words], lie as [words,
tokens] in the group's slots, one slot after the other. A vector then holds the same numbers of all keys of a group.
`CachedRows` is the plain twin of the native code in `csrc/src/cpu/cached_impl.h`.

Source: LMDeploy 0.11.0, pytorch/engine/cache_engine.py (shapes) and pytorch/kernels/cuda/fill_kv_cache.py (4 bits: number i
and number head_size / 2 + i share a byte). Floats of 8 bits are ours.
"""

from collections.abc import Sequence
from typing import Any

import torch

from sagellm.models.levels import FLOAT8, LEVELS4, LEVELS8

__all__ = ["KEY_GROUP", "PLAIN", "CachedRows", "decode", "describe", "dtype_of", "encode", "format_of"]

PLAIN = "plain"
KEY_GROUP = 16  # tokens
LARGEST = {LEVELS4: 15.0, LEVELS8: 255.0, FLOAT8: 448.0}


def dtype_of(kv_dtype: str) -> torch.dtype:
    """Return the type of the tensors that hold numbers of a `KVCacheSchema.dtype`."""
    return {"int4": torch.uint8, "int8": torch.uint8, "fp8": torch.float8_e4m3fn}.get(kv_dtype) or getattr(torch, kv_dtype)


def format_of(cache: torch.Tensor, head_size: int) -> str:
    """Return the format of a layer's keys or values: PLAIN, LEVELS4, LEVELS8 or FLOAT8."""
    if cache.dtype == torch.float8_e4m3fn:
        return FLOAT8
    if cache.dtype != torch.uint8:
        return PLAIN
    return LEVELS8 if cache.shape[-1] == head_size else LEVELS4


def encode(numbers: torch.Tensor, form: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize heads.

    Args:
        numbers: [..., head_size].
        dtype: of scales and zero points.

    Returns:
        Codes [..., head_size], or [..., head_size / 2] with 4 bits; scales and zero points [..., 2].
    """
    wide = numbers.float()
    low, high = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
    span = torch.maximum(-low, high) if form == FLOAT8 else high - low
    scale = (span / LARGEST[form]).to(dtype)
    by = torch.where(scale > 0, 1 / scale.float(), torch.zeros(()))
    if form == FLOAT8:
        codes = (wide * by).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes, torch.cat([scale, torch.zeros_like(scale)], -1)
    zero = (-low * by).round()
    codes = (wide * by + zero).round().clamp(0, LARGEST[form]).to(torch.uint8)
    if form == LEVELS4:
        first, second = codes.chunk(2, -1)
        codes = first | second << 4
    return codes, torch.cat([scale, zero.to(dtype)], -1)


def decode(codes: torch.Tensor, scales: torch.Tensor, form: str) -> torch.Tensor:
    """Return the numbers [..., head_size], in the dtype of the scales."""
    if form == LEVELS4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    scale, zero = scales.float().split(1, -1)
    return ((codes.float() - zero) * scale).to(scales.dtype)


class CachedRows:
    """A layer's keys, or its values, by slot: token t of block b is slot b * block_size + t.

    Args:
        cache: [blocks, block_size, kv_heads, width].
        scales: [blocks, block_size, kv_heads, 2] of numbers of few bits; None for others.
        head_size: numbers of a head.
        is_key: keys lie in groups.
    """

    def __init__(self, cache: torch.Tensor, scales: torch.Tensor | None, head_size: int, is_key: bool) -> None:
        self._form = format_of(cache, head_size)
        self._numbers, self._scales = cache.flatten(0, 1), None if scales is None else scales.flatten(0, 1)
        self._is_grouped = is_key and self._form in (LEVELS4, LEVELS8)

    def write(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        """Store heads. `slots`: [tokens]; `numbers`: [tokens, kv_heads, head_size]."""
        if self._form == PLAIN:
            self._numbers.index_copy_(0, slots, numbers.to(self._numbers.dtype))
            return
        codes, scales = encode(numbers, self._form, self._scales.dtype)
        self._scales.index_copy_(0, slots, scales)
        if self._is_grouped:
            words = codes.contiguous().view(torch.int32)
            self._numbers.view(torch.int32)[self._places(slots, words.shape[-1])] = words.transpose(1, 2)
        else:
            self._numbers.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the heads of `slots`, [tokens, kv_heads, head_size]."""
        if self._form == PLAIN:
            return self._numbers.index_select(0, slots).to(dtype)
        if self._is_grouped:
            stored = self._numbers.view(torch.int32)
            words = stored[self._places(slots, stored.shape[-1])]
            codes = words.transpose(1, 2).contiguous().view(torch.uint8)
        else:
            codes = self._numbers.view(torch.uint8).index_select(0, slots).view(self._numbers.dtype)
        return decode(codes, self._scales.index_select(0, slots), self._form).to(dtype)

    @staticmethod
    def _places(slots: torch.Tensor, words: int) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """Return an index of keys' words, which gives [tokens, words, kv_heads]."""
        at = torch.arange(words) * KEY_GROUP + slots[:, None] % KEY_GROUP
        return slots[:, None] // KEY_GROUP * KEY_GROUP + at // words, slice(None), at % words


def describe(caches: Sequence[Sequence[torch.Tensor]], head_size: int) -> dict[str, Any]:
    """Return what `CpuDecoder.bind` takes. `caches`: of each layer; they must stay where they are."""
    keys, scales = caches[0][0], caches[0][2:]

    def bytes_of(tensor: torch.Tensor, axis: int) -> int:
        return tensor.stride(axis) * tensor.element_size()

    form = format_of(keys, head_size)
    return {
        "keys": [layer[0].data_ptr() for layer in caches],
        "values": [layer[1].data_ptr() for layer in caches],
        "key_scales": [layer[2].data_ptr() for layer in caches] if scales else [],
        "value_scales": [layer[3].data_ptr() for layer in caches] if scales else [],
        "num_blocks": keys.shape[0],
        "block_size": keys.shape[1],
        "block_stride": bytes_of(keys, 0),
        "slot_stride": bytes_of(keys, 1),
        "scale_block_stride": bytes_of(scales[0], 0) if scales else 0,
        "scale_slot_stride": bytes_of(scales[0], 1) if scales else 0,
        "format": form,
        "bounds": 0,
        "codes": 0,
        "key_sums": 0,
        "dtype": str((keys if form == PLAIN else scales[0]).dtype).removeprefix("torch."),
    }
