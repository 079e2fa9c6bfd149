"""From the tensors of a GGUF file to safetensors.

Quantized tensors become float32, which loses nothing, unless the folder would grow beyond `MAX_FLOAT32_BYTES`; then they
become bfloat16. float16 and bfloat16 tensors stay what they are.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.models.base import ModelError
from sagellm.models.gguf_config import Family
from sagellm.models.gguf_file import GGUFFile

__all__ = [
    "MAX_FLOAT32_BYTES", "TOP_NAMES", "compute_dtype", "in_halves", "num_permuted_heads", "tensor_names", "tensor_shape",
    "write_weights",
]  # fmt: skip

MAX_FLOAT32_BYTES = 4 << 30
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Kept in config.json.
ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
OWN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def compute_dtype(file: GGUFFile) -> str:
    """Return the type that the matrices are computed in by default: as stored, or bfloat16 where they are quantized."""
    return OWN_TYPES.get(file.tensors["token_embd.weight"].tensor_type.name, "bfloat16")


def write_weights(
    file: GGUFFile, family: Family, config: dict[str, Any], folder: Path, tick: Callable[[int], None]
) -> None:
    """Write the weights into `folder` as model.safetensors, one tensor after the other.

    Args:
        tick: called with the number of elements after each tensor.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or damaged.
    """
    names = tensor_names(file, family, config)
    total = sum(int(file.tensors[name].n_elements) for name in names)
    quantized = "F32" if 4 * total <= MAX_FLOAT32_BYTES else "BF16"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for ours, theirs in names.items():
        tensor = file.tensors[ours]
        dtype = tensor.tensor_type.name if tensor.tensor_type.name in OWN_TYPES else quantized
        start, end = end, end + int(tensor.n_elements) * (4 if dtype == "F32" else 2)
        shape = [int(size) for size in reversed(tensor.shape)]
        _check_shape(file, ours, shape, config)
        header[theirs] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for ours, theirs in names.items():
            values = file.array(ours)
            if heads := num_permuted_heads(ours, family, config):
                values = in_halves(values, heads)
            if family.unit_norms and ours.endswith("norm.weight"):
                values = values - 1
            out.write(_data(values, header[theirs]["dtype"]))
            tick(values.size)


def tensor_names(file: GGUFFile, family: Family, config: dict[str, Any]) -> dict[str, str]:
    """Map the names of all tensors to those of transformers."""
    known = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in TOP_NAMES.items()}
    needed = {name for name in known if name != "output.weight"}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs in family.layer_names.items():
            needed.add(f"blk.{layer}.{ours}.weight")
            for suffix in ("weight", "bias"):
                known[f"blk.{layer}.{ours}.{suffix}"] = f"model.layers.{layer}.{theirs}.{suffix}"
    found = set(file.tensors) - ROPE_TENSORS
    if missing := sorted(needed - found):
        raise file.damaged(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if unknown := sorted(found - set(known)):
        raise ModelError(
            f"{file.path} has {len(unknown)} tensors that {family.hf_class} does not have, such as {unknown[0]}. "
            "Give the model's Hugging Face folder or hub id."
        )
    return {name: known[name] for name in file.tensors if name in known}


def tensor_shape(part: str, config: Mapping[str, Any]) -> list[int]:
    """Return the shape of a weight, [outputs, inputs] for a matrix.

    Args:
        part: end of its name in GGUF, such as attn_q.
        config: content of config.json, with `head_dim` and `num_key_value_heads`.

    Raises:
        KeyError: config.json lacks a size.
    """
    hidden, ffn, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    rows = 2 * ffn if config["model_type"] == "phi3" else ffn
    shapes = {
        "token_embd": [config["vocab_size"], hidden], "output": [config["vocab_size"], hidden], "output_norm": [hidden],
        "attn_q": [q, hidden], "attn_k": [kv, hidden], "attn_v": [kv, hidden], "attn_output": [hidden, q],
        "attn_qkv": [q + 2 * kv, hidden], "attn_q_norm": [width], "attn_k_norm": [width],
        "ffn_gate": [ffn, hidden], "ffn_up": [rows, hidden], "ffn_down": [hidden, ffn],
    }  # fmt: skip
    return shapes.get(part, [hidden])


def _check_shape(file: GGUFFile, name: str, shape: list[int], config: dict[str, Any]) -> None:
    part, suffix = name.split(".")[-2:]
    wanted = tensor_shape(part, config)
    if suffix == "bias":
        wanted = wanted[:1]
    if shape != wanted:
        raise file.damaged(f"tensor {name} has shape {shape}, its metadata ask for {wanted}")


def num_permuted_heads(name: str, family: Family, config: Mapping[str, Any]) -> int:
    """Return the number of heads whose halves are interleaved in the rows of a tensor; 0 if none are."""
    if not family.permuted or not (".attn_q." in name or ".attn_k." in name):
        return 0
    return config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]


def in_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a head, which interleaves its halves for rotary positions."""
    heads = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)


def _data(values: np.ndarray, dtype: str) -> bytes:
    if dtype != "BF16":
        return values.astype(np.float32 if dtype == "F32" else np.float16, copy=False).tobytes()
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)  # to the nearest, ties to even; the values are finite
    return ((bits + rounding) >> 16).astype(np.uint16).tobytes()
