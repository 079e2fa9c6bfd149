"""Describes a model: its sizes, the operators that the CPU device lacks, the memory that it needs."""

import json
from pathlib import Path
from typing import Any

from sagellm.core.config import SageConfig
from sagellm.engines.lmdeploy.architecture import cpu_support
from sagellm.engines.lmdeploy.sizing import resolve_device, schema_of, weight_bytes
from sagellm.models.folder import num_weights, read_hf_config, text_config

__all__ = ["describe"]


def describe(model: Path, name: str, dtype: str = "auto", context_length: int | None = None) -> dict[str, Any]:
    """Return the facts that `sagellm model info` shows; sizes in bytes, lengths in tokens.

    Args:
        dtype: type of the weights and of the KV cache, or "auto".
        context_length: tokens of the request whose KV blocks are counted; by default the longest that the model takes.

    Raises:
        ConfigError: a config.json that cannot be read or describes no language model.
    """
    text = text_config(model)
    config = SageConfig(dtype=dtype)
    _, schema = schema_of(text, config, resolve_device("auto"))
    support = cpu_support(model, schema.dtype)
    longest = int(text.get("max_position_embeddings", 0))
    tokens = context_length or longest
    return {
        "name": name,
        "folder": str(model),
        "architecture": ", ".join(read_hf_config(model)["architectures"]),
        "parameters": num_weights(model),
        "layers": schema.num_layers,
        "heads": int(text["num_attention_heads"]),
        "kv_heads": schema.num_kv_heads,
        "hidden_size": text.get("hidden_size"),
        "vocabulary": text.get("vocab_size"),
        "context": longest,
        "chat_template": _chat_template(model),
        "stop_tokens": _stop_tokens(model),
        "missing_on_cpu": support.missing,
        "eager_on_cpu": support.eager,
        "dtype": schema.dtype,
        "weight_bytes": weight_bytes(model, schema.dtype),
        "context_length": tokens,
        "kv_bytes": -(-tokens // schema.block_size) * schema.block_bytes,
    }


def _chat_template(model: Path) -> str:
    """Say which template LMDeploy renders chats with: the model's own, or one of its built-in ones."""
    from lmdeploy.model import best_match_model

    found = best_match_model(str(model))
    if found == "hf":
        return "of the model"
    return "none: chats are refused" if found == "base" else f"{found}, built into LMDeploy"


def _stop_tokens(model: Path) -> list[str]:
    """Return the texts of the tokens that end an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    generation = model / "generation_config.json"
    ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    ids = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
    return [str(tokenizer.convert_ids_to_tokens(number)) for number in ids if number is not None]
