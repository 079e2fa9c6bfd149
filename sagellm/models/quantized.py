"""Quantized checkpoints: what `quantization_config` says, and weights in the layouts of AWQ, GPTQ, FP8 and INT8.

The layouts are those of AutoAWQ (`gemm`), AutoGPTQ, DeepSeek-V3 (FP8 in blocks of 128 x 128) and LMDeploy (`smooth_quant`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sagellm.models.base import ModelError
from sagellm.models.levels import FLOAT8_SHIFT

if TYPE_CHECKING:
    import torch

__all__ = [
    "FP8_BLOCK",
    "METHODS",
    "PARTS",
    "Quantization",
    "container_of",
    "pack_awq",
    "pack_gptq",
    "plain_weight",
    "quantization_of",
    "to_container",
    "unpack_awq",
    "unpack_gptq",
    "wrong_tensor",
]  # fmt: skip

METHODS = ("awq", "gptq", "fp8", "smooth_quant")
FP8_BLOCK = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble of a word
GROUPS = (128, 64, 32)  # inputs that share a scale in a container
# Tensors of a quantized layer, by method.
PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight", "weight_scale_inv"),
    "smooth_quant": ("weight", "scale"),
}


@dataclass(frozen=True)
class Quantization:
    """`quantization_config` of a model.

    Attributes:
        group_size: inputs that share a scale; 0: all inputs of an output.
        is_ordered: GPTQ with activation order: an input's group is in `g_idx`.
        zero_offset: what is added to stored zero points (GPTQ of version 1 stores one less).
        dtype: of `smooth_quant` weights.
        head_bits: 8: the CPU device rounds the output layer, which these methods leave as it is, to 8 bits. A key of ours.
    """

    method: Literal["awq", "gptq", "fp8", "smooth_quant"]
    bits: int = 8
    group_size: int = 0
    is_ordered: bool = False
    zero_offset: int = 0
    dtype: str = "int8"
    head_bits: int = 16


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Read `quantization_config` of config.json; None if the model has none.

    Raises:
        ModelError: a method, or a form of it, that is not known here.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ModelError("config.json has a quantization_config that is not an object; download it again.")
    method, head_bits = given.get("quant_method"), given.get("head_bits", 16)
    if head_bits not in (8, 16):
        raise ModelError(f"head_bits of quantization_config is {head_bits!r}; allowed are 8 and 16.")
    match method:
        case "awq":
            _allow("AWQ", given, bits=(4,), version=("gemm", None), group_size=(32, 64, 128))
            return Quantization("awq", 4, given.get("group_size", 128), head_bits=head_bits)
        case "gptq":
            _allow("GPTQ", given, bits=(4, 8), group_size=(-1, 32, 64, 128))
            offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
            group = max(0, given["group_size"])
            return Quantization("gptq", given["bits"], group, bool(given.get("desc_act")), offset, head_bits=head_bits)
        case "fp8":
            _allow("FP8", given, fmt=("e4m3", None), weight_block_size=([FP8_BLOCK, FP8_BLOCK], None))
            return Quantization("fp8", 8, FP8_BLOCK, head_bits=head_bits)
        case "smooth_quant":
            _allow("smooth_quant", given, quant_dtype=("int8", "float8_e4m3fn", None))
            return Quantization("smooth_quant", dtype=given.get("quant_dtype") or "int8", head_bits=head_bits)
    raise ModelError(f"the model is quantized by {method!r}; known are {', '.join(METHODS)}. Use one of these, or 16 bits.")


def _allow(name: str, given: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if (found := given.get(key)) not in values:
            known = " or ".join(str(value) for value in values if value is not None)
            raise ModelError(f"the model is quantized by {name} with {key} {found!r}; allowed is {known}.")


def wrong_tensor(found: Quantization, shapes: Mapping[str, list[int]]) -> str:
    """Say which tensor of a quantized layer is missing or has a wrong shape; "" if none is.

    Args:
        shapes: of all tensors of the checkpoint, by name.
    """
    weight, *others = PARTS[found.method]
    for name, shape in shapes.items():
        place, _, last = name.rpartition(".")
        if last != weight or (weight == "weight" and f"{place}.{others[0]}" not in shapes):
            continue
        for part, wanted in _expected(found, shape).items():
            if part in others or f"{place}.{part}" in shapes:
                got = shapes.get(f"{place}.{part}")
                if got is None:
                    return f"lacks tensor {place}.{part}"
                if got != wanted:
                    return f"has tensor {place}.{part} of shape {got}; {name} of shape {shape} needs {wanted}"
    if not any(name.rpartition(".")[2] == others[-1] for name in shapes):
        return f"has no tensor named *.{others[-1]}, which {found.method} weights need"
    return ""


def _expected(found: Quantization, weight: list[int]) -> dict[str, list[int]]:
    """Shapes of a layer's other tensors, from that of its weight."""
    first, second = weight
    if found.method == "fp8":
        return {"weight_scale_inv": [math.ceil(first / FP8_BLOCK), math.ceil(second / FP8_BLOCK)]}
    if found.method == "smooth_quant":
        return {"scale": [first, 1]}
    in_word = 32 // found.bits
    inputs, outputs = (first, second * in_word) if found.method == "awq" else (first * in_word, second)
    groups = inputs // found.group_size if found.group_size else 1
    return {"qzeros": [groups, outputs // in_word], "scales": [groups, outputs]} | (
        {"g_idx": [inputs]} if found.method == "gptq" else {}
    )


def unpack_awq(words: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Return the levels in int32 [rows, outputs * bits / 32], as uint8 [rows, outputs]."""
    import torch

    in_word = 32 // bits
    levels = torch.stack([words >> (bits * place) & (2**bits - 1) for place in range(in_word)], -1).to(torch.uint8)
    return (levels[..., torch.tensor(AWQ_ORDER).argsort()] if bits == 4 else levels).flatten(-2)


def pack_awq(levels: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Return levels [rows, outputs] as int32 [rows, outputs * bits / 32]."""
    import torch

    numbers = levels.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    return _words(numbers[..., list(AWQ_ORDER)] if bits == 4 else numbers, bits)


def _words(numbers: "torch.Tensor", bits: int) -> "torch.Tensor":
    """[..., 32 / bits] int64 to [...] int32, the first number in the lowest bits."""
    import torch

    packed = sum(numbers[..., place] << (bits * place) for place in range(32 // bits))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def pack_gptq(levels: "torch.Tensor", bits: int, along: int) -> "torch.Tensor":
    """Return a matrix of levels as int32 words that hold 32 / bits numbers along an axis."""
    import torch

    numbers = levels.to(torch.int64).unflatten(along, (-1, 32 // bits))
    return _words(numbers.movedim(along + 1, -1), bits)


def unpack_gptq(words: "torch.Tensor", bits: int, along: int) -> "torch.Tensor":
    """Return the levels in int32 words that hold 32 / bits numbers along an axis, as uint8."""
    import torch

    levels = torch.stack([words >> (bits * place) & (2**bits - 1) for place in range(32 // bits)], along + 1)
    return levels.to(torch.uint8).flatten(along, along + 1)


def container_of(found: Quantization, sizes: Iterable[int]) -> dict[str, Any] | None:
    """Return the `quantization_config` of AWQ linears that hold the weights of a method which LMDeploy has no linear for.

    None: LMDeploy has one. `to_container` converts the tensors. With 8 bits four outputs lie in a word, in order.

    Args:
        sizes: inputs and outputs of all linear layers.
    """
    sizes = list(sizes)
    if found.method not in ("gptq", "fp8") or (found.method == "fp8" and not any(size % FP8_BLOCK for size in sizes)):
        return None  # where FP8 has partial blocks, LMDeploy joins weights with the wrong scales
    largest = found.group_size or max(GROUPS)
    group = next((size for size in GROUPS if size <= largest and all(each % size == 0 for each in sizes)), 0)
    if not group:
        raise ModelError(
            f"the model is quantized by {found.method}, and has a linear layer of {min(sizes)} inputs or outputs; multiples of "
            f"{min(GROUPS)} run."
        )
    return {"quant_method": "awq", "bits": found.bits, "group_size": group, "holds": found.method, "head_bits": found.head_bits}


def to_container(
    found: Quantization, group_size: int, tensors: Iterable[tuple[str, "torch.Tensor"]], orders: dict[str, "torch.Tensor"]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Convert the tensors of a checkpoint to those of AWQ linears.

    Args:
        group_size: as `container_of` has it.
        orders: filled with the order of inputs, int32 [inputs], of each layer that does not have them in order, by name.
    """
    parts = {*PARTS[found.method], "g_idx"}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        place, _, last = name.rpartition(".")
        is_linear = last in parts and (last != "weight" or tensor.dtype.itemsize == 1)
        if not is_linear:
            yield name, tensor
            continue
        layer = waiting.setdefault(place, {})
        layer[last] = tensor
        if len(layer) == len(PARTS[found.method]) + (found.method == "gptq"):
            convert = _convert_gptq if found.method == "gptq" else _convert_fp8
            for part, converted in convert(found, group_size, place, waiting.pop(place), orders).items():
                yield f"{place}.{part}", converted
    if waiting:
        place, layer = next(iter(waiting.items()))
        missing = sorted((parts if found.method == "gptq" else set(PARTS["fp8"])) - set(layer))
        raise ModelError(f"the checkpoint lacks tensor {place}.{missing[0]}.")


def _convert_gptq(
    found: Quantization, group_size: int, name: str, layer: dict[str, "torch.Tensor"], orders: dict[str, "torch.Tensor"]
) -> dict[str, "torch.Tensor"]:
    import torch

    levels = unpack_gptq(layer["qweight"], found.bits, 0)  # [inputs, outputs]
    zeros = unpack_gptq(layer["qzeros"], found.bits, 1).to(torch.int32) + found.zero_offset
    if int(zeros.max()) >= 2**found.bits:
        raise ModelError(f"{name} has zero points above {2**found.bits - 1}; its checkpoint_format is another one.")
    groups, scales = layer["g_idx"].to(torch.int64), layer["scales"]
    order = groups.argsort(stable=True)
    if not torch.equal(order, torch.arange(len(order))):
        levels, orders[name] = levels[order], order.to(torch.int32)
        size = len(order) // len(scales)
        if not torch.equal(groups[order], torch.arange(len(order)) // size):
            raise ModelError(f"{name} has groups of unequal sizes in g_idx; they must have {size} inputs each.")
    repeat = len(levels) // group_size // len(scales)
    zeros, scales = zeros.repeat_interleave(repeat, 0), scales.repeat_interleave(repeat, 0)
    return {"qweight": pack_awq(levels, found.bits), "qzeros": pack_awq(zeros, found.bits), "scales": scales.half()}


def _convert_fp8(
    found: Quantization, group_size: int, name: str, layer: dict[str, "torch.Tensor"], orders: dict[str, "torch.Tensor"]
) -> dict[str, "torch.Tensor"]:
    import torch

    weight = layer["weight"]
    outputs, inputs = weight.shape
    scales = layer["weight_scale_inv"].float() * 2.0**FLOAT8_SHIFT
    scales = scales.repeat_interleave(FP8_BLOCK, 0)[:outputs].repeat_interleave(FP8_BLOCK // group_size, 1)
    scales = scales[:, : inputs // group_size].T.contiguous()  # [groups, outputs]
    zeros = torch.zeros(len(scales), outputs // 4, dtype=torch.int32)
    return {"qweight": pack_awq(weight.view(torch.uint8).T, 8), "qzeros": zeros, "scales": scales.half()}


def plain_weight(found: Quantization, layer: Mapping[str, "torch.Tensor"]) -> "torch.Tensor":
    """Return the weight that a layer's tensors stand for, float32 [outputs, inputs], by the formula of its method.

    It shares no code with the kernels, and is what they are held against.

    Args:
        layer: tensors by the last part of their names.
    """
    import torch

    if found.method == "smooth_quant":
        return layer["weight"].float() * layer["scale"].float()
    if found.method == "fp8":
        outputs, inputs = layer["weight"].shape
        scales = layer["weight_scale_inv"].float()
        rows, columns = torch.arange(outputs) // FP8_BLOCK, torch.arange(inputs) // FP8_BLOCK
        return layer["weight"].float() * scales[rows][:, columns]
    scales = layer["scales"].float()
    if found.method == "awq":
        levels, zeros = unpack_awq(layer["qweight"], 4).float(), unpack_awq(layer["qzeros"], 4).float()
        group = torch.arange(len(levels)) // found.group_size
    else:
        levels, group = unpack_gptq(layer["qweight"], found.bits, 0).float(), layer["g_idx"].long()
        zeros = unpack_gptq(layer["qzeros"], found.bits, 1).float() + found.zero_offset
    return ((levels - zeros[group]) * scales[group]).T
