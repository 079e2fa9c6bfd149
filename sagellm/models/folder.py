"""Reads and checks a Hugging Face model folder, without torch and transformers."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sagellm.models.base import ModelError
from sagellm.models.gguf_config import FAMILIES
from sagellm.models.gguf_weights import TOP_NAMES, tensor_shape
from sagellm.models.quantized import quantization_of, wrong_tensor

__all__ = ["check_folder", "num_weights", "read_hf_config", "sampling_defaults", "text_config", "weight_sizes"]

# Any of them makes a tokenizer of transformers.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab*", "*.tiktoken", "tokenization_*.py")
SAFETENSORS, PYTORCH = "*.safetensors", "pytorch_model*.bin"
INDEX = "model.safetensors.index.json"
# Read by the tokenizer or the engine where they are there.
SETTINGS = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json")
# Fields of generation_config.json that requests have too, and whether a value can be served.
SAMPLING: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
}
# Numbers of config.json from which sizes are computed.
NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
FLOATS = ("F16", "BF16", "F32", "F64")  # that are converted to the type that the engine computes in
# Types of safetensors and their bits.
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_hf_config(model: Path) -> dict[str, Any]:
    """Return the content of `config.json`.

    Raises:
        ModelError: the folder or its config.json does not exist or cannot be read.
    """
    if not model.is_dir():
        raise ModelError(f"{model} is not a folder; give a local Hugging Face model folder.")
    file = model / "config.json"
    if not file.is_file():
        raise ModelError(f"{model} has no config.json; give a local Hugging Face model folder.")
    return _read_json(file)


def text_config(model: Path) -> dict[str, Any]:
    """Return the part of `config.json` that describes the language model, with `vocab_size` and the like.

    Raises:
        ModelError: as `read_hf_config`, or a size that is not a positive number.
    """
    config = read_hf_config(model)
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelError(f"{model}/config.json has text_config {text!r}; it must be an object. Download the file again.")
    for name in NUMBERS:
        value = text.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(
                f"{model}/config.json has {name} {value!r}; it must be a whole number above 0. Download the file again."
            )
    return text


def sampling_defaults(model: Path) -> dict[str, float]:
    """Return what the authors of a model advise to sample with: the fields of `SAMPLING` in its generation_config.json.

    vLLM reads the same fields. A value that no request could have is left out.
    """
    file = model / "generation_config.json"
    given = _read_json(file) if file.is_file() else {}
    return {
        name: given[name]
        for name, is_allowed in SAMPLING.items()
        if type(given.get(name)) in (int, float) and is_allowed(given[name])
    }


def check_folder(model: Path) -> None:
    """Check what LMDeploy would find out after minutes, or not at all.

    Raises:
        ModelError: no configuration, weights or tokenizer; a truncated or damaged file; more tokens than embeddings;
            tensors that are missing or have another shape, where the architecture is one of `FAMILIES`.
    """
    config = text_config(model)
    names = read_hf_config(model).get("architectures")
    if not names or not isinstance(names, list):
        raise ModelError(f"{model}/config.json names no `architectures`; is this a language model?")
    for name in SETTINGS:
        if (model / name).is_file():
            _read_json(model / name)
    if not any(found for pattern in TOKENIZERS for found in model.glob(pattern)):
        raise ModelError(f"{model} has no tokenizer: none of {', '.join(TOKENIZERS)}.")
    rows, tokens = config.get("vocab_size"), _num_tokens(model / "tokenizer.json")
    if rows is not None and tokens > rows:
        raise ModelError(f"{model} has a tokenizer of {tokens} tokens and an embedding of only {rows}.")
    _check_weights(model, str(names[0]), config)


def num_weights(model: Path) -> int | None:
    """Return the number of weights, or None where they are not in safetensors files. A word of several levels counts as one."""
    tensors = _tensors(model)
    return sum(math.prod(tensor["shape"]) for tensor in tensors) if tensors else None


def weight_sizes(model: Path) -> tuple[int, int] | None:
    """Return the number of floats of 16 bits or more, and the bytes of all other tensors; None without safetensors files."""
    tensors = _tensors(model)
    floats = sum(math.prod(tensor["shape"]) for tensor in tensors if tensor["dtype"] in FLOATS)
    others = [tensor["data_offsets"] for tensor in tensors if tensor["dtype"] not in FLOATS]
    return (floats, sum(end - begin for begin, end in others)) if tensors else None


def _tensors(model: Path) -> list[dict[str, Any]]:
    return [tensor for file in sorted(model.glob(SAFETENSORS)) for tensor in read_header(file).values()]


def read_header(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name: `dtype`, `shape`, `data_offsets`.

    Raises:
        ModelError: the file cannot be read, or its size or the place of a tensor is not the one that its header asks for.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(length)) if length <= size - 8 else None
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max(tensor["data_offsets"][1] for tensor in tensors.values())
        wrong = _misplaced(tensors)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        raise ModelError(f"{file} is truncated or damaged: its header cannot be read; download it again.") from None
    if size != 8 + length + end:
        raise ModelError(f"{file} is truncated or damaged: {size} bytes, its header asks for {8 + length + end}.")
    if wrong:
        raise ModelError(f"{file} is damaged: {wrong}; download it again.")
    return tensors


def _misplaced(tensors: dict[str, Any]) -> str:
    """Say which tensor does not begin where the one before it ends, or does not fill its bytes; "" if all do."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        if dtype not in BITS:
            return f"tensor {name} has type {dtype}, which safetensors does not have"
        if begin != end:
            return f"tensor {name} begins at byte {begin} of the data, the tensor before it ends at {end}"
        if any(type(part) is not int or part < 0 for part in shape) or BITS[dtype] * math.prod(shape) != 8 * (stop - begin):
            return f"tensor {name} has type {dtype}, shape {shape} and {stop - begin} bytes, which do not fit together"
        end = stop
    return ""


def _check_weights(model: Path, architecture: str, config: dict[str, Any]) -> None:
    files = sorted(model.glob(SAFETENSORS))
    if not files and not any(model.glob(PYTORCH)):
        raise ModelError(f"{model} has no weights: neither {SAFETENSORS} nor {PYTORCH}.")
    shapes = {name: tensor["shape"] for file in files for name, tensor in read_header(file).items()}
    if (model / INDEX).is_file():
        wanted = _read_json(model / INDEX).get("weight_map")
        if not isinstance(wanted, dict):
            raise ModelError(f"{model / INDEX} has no object weight_map; download it again.")
        if missing := sorted(set(map(str, wanted.values())) - {file.name for file in files}):
            raise ModelError(f"{model} lacks {len(missing)} files of its index, such as {missing[0]}; download it again.")
    quantization = quantization_of(config)
    wrong = _wrong_tensor(architecture, config, shapes)
    if not wrong and quantization is not None:
        wrong = wrong_tensor(quantization, shapes)
    if files and wrong:
        raise ModelError(f"{model} {wrong}; download it again.")


def _wrong_tensor(architecture: str, config: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    """Say what an architecture of `FAMILIES` asks for and the weights lack; "" for another architecture.

    Quantized folders have tensors of other endings and shapes, so neither is looked at there.
    """
    if architecture == "MistralForCausalLM":
        architecture = "LlamaForCausalLM"
    family = next((family for family in FAMILIES.values() if family.hf_class == architecture), None)
    if family is None:
        return ""
    needed = {
        f"model.layers.{layer}.{theirs}": part
        for layer in range(config.get("num_hidden_layers") or 0)
        for part, theirs in family.layer_names.items()
    }
    untied = config.get("tie_word_embeddings") is False
    needed |= {theirs: part for part, theirs in TOP_NAMES.items() if part != "output" or untied}
    if missing := sorted(needed.keys() - {name.rpartition(".")[0] for name in shapes}):
        return f"lacks {len(missing)} tensors of {architecture}, such as {missing[0]}"
    if "quantization_config" in config:
        return ""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not heads or not hidden:
        return ""
    given = {name: value for name, value in config.items() if value is not None}
    sizes = {"head_dim": hidden // heads, "num_key_value_heads": heads, "model_type": family.model_type} | given
    for name, part in needed.items():
        with suppress(KeyError):  # the weight is quantized, or config.json leaves a size to transformers
            shape, wanted = shapes[f"{name}.weight"], tensor_shape(part, sizes)
            if shape != wanted:
                return f"has tensor {name}.weight of shape {shape}, its config.json asks for {wanted}"
    return ""


def _num_tokens(file: Path) -> int:
    """Return the number after the largest token id; 0 where there is no tokenizer.json."""
    if not file.is_file():
        return 0
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    # The library raises no class of its own.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} cannot be loaded by the tokenizers library ({reason}); download it again.") from None
    return 1 + max(vocabulary.values(), default=-1)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}; download it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, not an object; download it again.")
    return content
