"""Reads and checks a Hugging Face model folder, without torch and transformers."""

import json
from pathlib import Path
from typing import Any

from sagellm.models.base import ModelError

__all__ = ["check_folder", "num_weights", "read_hf_config", "text_config"]

# Any of them makes a tokenizer of transformers.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab*", "*.tiktoken", "tokenization_*.py")
SAFETENSORS, PYTORCH = "*.safetensors", "pytorch_model*.bin"
INDEX = "model.safetensors.index.json"


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
        ModelError: as `read_hf_config`.
    """
    config = read_hf_config(model)
    return config.get("text_config", config)


def check_folder(model: Path) -> None:
    """Check what LMDeploy would find out after minutes, or not at all.

    Raises:
        ModelError: no configuration, weights or tokenizer; a truncated or damaged file; more tokens than embeddings.
    """
    config = text_config(model)
    if not read_hf_config(model).get("architectures"):
        raise ModelError(f"{model}/config.json names no `architectures`; is this a language model?")
    files = sorted(model.glob(SAFETENSORS))
    if not files and not any(model.glob(PYTORCH)):
        raise ModelError(f"{model} has no weights: neither {SAFETENSORS} nor {PYTORCH}.")
    for file in files:
        read_header(file)
    if (model / INDEX).is_file():
        wanted = set(_read_json(model / INDEX).get("weight_map", {}).values())
        if missing := sorted(wanted - {file.name for file in files}):
            raise ModelError(f"{model} lacks {len(missing)} files of its index, such as {missing[0]}; download it again.")
    if not any(found for pattern in TOKENIZERS for found in model.glob(pattern)):
        raise ModelError(f"{model} has no tokenizer: none of {', '.join(TOKENIZERS)}.")
    rows, tokens = config.get("vocab_size"), _num_tokens(model / "tokenizer.json")
    if rows is not None and tokens > rows:
        raise ModelError(f"{model} has a tokenizer of {tokens} tokens and an embedding of only {rows}.")


def num_weights(model: Path) -> int | None:
    """Return the number of weights, or None where they are not in safetensors files."""
    files = sorted(model.glob(SAFETENSORS))
    if not files:
        return None
    total = 0
    for file in files:
        for tensor in read_header(file).values():
            elements = 1
            for size in tensor["shape"]:
                elements *= size
            total += elements
    return total


def read_header(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name: `dtype`, `shape`, `data_offsets`.

    Raises:
        ModelError: the file cannot be read, or its size is not the one that its header asks for.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(length)) if length <= size - 8 else None
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max(tensor["data_offsets"][1] for tensor in tensors.values())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise ModelError(f"{file} is truncated or damaged: its header cannot be read; download it again.") from None
    if size != 8 + length + end:
        raise ModelError(f"{file} is truncated or damaged: {size} bytes, its header asks for {8 + length + end}.")
    return tensors


def _num_tokens(file: Path) -> int:
    """Return the number after the largest token id; 0 where there is no tokenizer.json."""
    if not file.is_file():
        return 0
    content = _read_json(file)
    try:
        vocabulary = content["model"].get("vocab") or {}
        ids = [len(vocabulary) - 1, *(vocabulary.values() if isinstance(vocabulary, dict) else ())]
        return 1 + max(ids + [token["id"] for token in content.get("added_tokens") or []])
    except (AttributeError, KeyError, TypeError):
        raise ModelError(f"{file} is no tokenizer that the tokenizers library knows; download it again.") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, not an object; download it again.")
    return content
