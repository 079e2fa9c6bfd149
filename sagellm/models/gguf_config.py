"""From the metadata of a GGUF file to config.json, one row of `FAMILIES` an architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sagellm.models.base import ModelError
from sagellm.models.gguf_file import GGUFFile, shortest

__all__ = ["FAMILIES", "Family", "family_of", "hf_config"]

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3.1 and later: transformers' `_compute_llama3_parameters`. GGUF keeps only the resulting factors.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Family:
    """How files of one architecture are stored.

    Attributes:
        hf_class: class of transformers and LMDeploy.
        model_type: `model_type` of config.json.
        layer_names: tensors of a layer, all of them needed: name in GGUF -> name in transformers.
        permuted: whether rows of Q and K are stored in llama.cpp's order for rotary positions.
        unit_norms: whether norms are stored with 1 added.
        extra: returns further settings of config.json.
    """

    hf_class: str
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    permuted: bool = False
    unit_norms: bool = False
    extra: Callable[[GGUFFile], dict[str, Any]] = lambda file: {}


def _llama(file: GGUFFile) -> dict[str, Any]:
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
    return {name: f"blk.0.{tensor}.bias" in file.tensors for name, tensor in biases.items()}


def _gemma(file: GGUFFile) -> dict[str, Any]:
    act = "gelu_pytorch_tanh"
    return {"hidden_act": act, "hidden_activation": act}


def _gemma2(file: GGUFFile) -> dict[str, Any]:
    # llama.cpp scales by the width of a head, but for the 27B models of Gemma 2 and 3, which it knows by their layers.
    is_27b = file.need("{arch}.block_count") in (46, 62)
    width = file.need("{arch}.embedding_length") // file.need("{arch}.attention.head_count")
    settings = {"query_pre_attn_scalar": width if is_27b else file.need("{arch}.attention.key_length")}
    for name, key in (
        ("sliding_window", "{arch}.attention.sliding_window"),
        ("attn_logit_softcapping", "{arch}.attn_logit_softcapping"),
        ("final_logit_softcapping", "{arch}.final_logit_softcapping"),
    ):
        settings[name] = file.get(key)
    return _gemma(file) | settings


def _gemma3(file: GGUFFile) -> dict[str, Any]:
    # Only every sixth layer sees beyond the window, and only it has the base and the scaling that the file keeps.
    local = shortest(file.get("{arch}.rope.freq_base_swa", 10_000.0))
    return _gemma2(file) | {"sliding_window_pattern": 6, "rope_local_base_freq": local}


def _phi3(file: GGUFFile) -> dict[str, Any]:
    heads = file.need("{arch}.attention.head_count")
    width = file.need("{arch}.embedding_length") // heads
    settings: dict[str, Any] = {"sliding_window": file.get("{arch}.attention.sliding_window") or None}
    rotated = file.get("{arch}.rope.dimension_count", width)
    if rotated != width:
        settings["partial_rotary_factor"] = rotated / width
    if "rope_factors_long.weight" in file.tensors:
        factors = {kind: file.array(f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short")}
        original = file.need("{arch}.rope.scaling.original_context_length")
        settings["original_max_position_embeddings"] = original
        settings["rope_scaling"] = {
            "type": "longrope", **{f"{kind}_factor": values for kind, values in factors.items()},
        }  # fmt: skip
    return settings


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", permuted=True, extra=_llama),  # Mistral's are stored as these
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", LAYER_NAMES | QK_NORMS),
    "gemma": Family("GemmaForCausalLM", "gemma", unit_norms=True, extra=_gemma),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", LAYER_NAMES | SANDWICH_NORMS, unit_norms=True, extra=_gemma2),
    "gemma3": Family(
        "Gemma3ForCausalLM", "gemma3_text", LAYER_NAMES | SANDWICH_NORMS | QK_NORMS, unit_norms=True, extra=_gemma3
    ),
    "phi3": Family("Phi3ForCausalLM", "phi3", FUSED_NAMES, extra=_phi3),
}


def family_of(file: GGUFFile) -> Family:
    """
    Raises:
        ModelError: the architecture cannot be converted; it is named.
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(
            f"{file.path} has architecture {file.architecture!r}; GGUF files can be converted for {', '.join(FAMILIES)}. "
            "Give the model's Hugging Face folder or hub id."
        )
    if file.get("{arch}.expert_count"):
        raise ModelError(
            f"{file.path} is a mixture of {file.get('{arch}.expert_count')} experts, which cannot be converted from GGUF. "
            "Give the model's Hugging Face folder or hub id."
        )
    return family


def hf_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        dtype: type that the model is computed in by default.
    """
    family = family_of(file)
    heads, hidden = file.need("{arch}.attention.head_count"), file.need("{arch}.embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise file.damaged("no tensor token_embd.weight")
    config = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": file.need("{arch}.block_count"),
        "intermediate_size": file.need("{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("{arch}.attention.head_count_kv", heads),
        "head_dim": file.get("{arch}.attention.key_length", hidden // heads if heads else 0),
        "rms_norm_eps": shortest(file.need("{arch}.attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": file.need("{arch}.context_length"),
        "rope_theta": shortest(file.get("{arch}.rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "dtype": dtype,
    }
    for name, value in config.items():
        if isinstance(value, list):
            if len(set(map(str, value))) > 1 and name != "architectures":
                raise ModelError(f"{file.path}: {name} differs between layers, which LMDeploy cannot run.")
            config[name] = value[0] if name != "architectures" else value
    scaling = _rope_scaling(file, config)
    return config | ({"rope_scaling": scaling} if scaling else {}) | family.extra(file)


def _rope_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    kind, factor = file.get("{arch}.rope.scaling.type", "none"), file.get("{arch}.rope.scaling.factor", 1.0)
    if kind == "none" or "rope_factors_long.weight" in file.tensors:
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path} scales rotary positions by {kind!r}; allowed are none, linear, yarn and llama3's.")
    scaling = {"rope_type": kind, "factor": shortest(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.need("{arch}.rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Find the scaling whose factors the file keeps."""
    stored = file.array("rope_freqs.weight").astype(np.float64)
    factor = float(stored.max())
    half = config["head_dim"] // 2
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    low, high, original = LLAMA3_ROPE.values()
    share = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - share) / factor + share)
    expected = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{file.path} has factors of rotary positions that are not those of Llama 3.1 and later.")
    return {"rope_type": "llama3", "factor": shortest(factor), **LLAMA3_ROPE}
