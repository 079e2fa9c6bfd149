"""Writes GGUF files from random Hugging Face models, as llama.cpp's converter would, and from vocabularies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from sagellm.models.gguf_config import FAMILIES
from sagellm.models.gguf_weights import TOP_NAMES

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>")


def byte_texts() -> list[str]:
    """Make the 256 letters that byte-level BPE writes bytes with."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_vocabulary(words: list[str]) -> tuple[list[str], list[str]]:
    """Make tokens and merges that build each of the words from left to right."""
    tokens, merges = [*SPECIAL, *byte_texts()], []
    known = set(tokens)
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in known:
                known.add(word[:end])
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return tokens, merges


def add_byte_level(writer: gguf.GGUFWriter, tokens: list[str], merges: list[str], pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)


def add_sentence_pieces(writer: gguf.GGUFWriter, words: list[str], prefix: bool) -> int:
    """Add a vocabulary of SentencePiece's kind, and return its size; a word that comes first merges first."""
    control, unknown, byte, normal = 3, 2, 6, 1
    pieces = [("<unk>", unknown), ("<s>", control), ("</s>", control)]
    pieces += [(f"<0x{number:02X}>", byte) for number in range(256)]
    known: dict[str, None] = {}
    for word in words:
        for end in range(1, len(word) + 1):
            known.setdefault(word[:end])
            known.setdefault(word[end - 1 : end])
    pieces += [(word, normal) for word in known]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([-float(number) for number in range(len(pieces))])
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    return len(pieces)


def write_vocabulary(path: Path, add: Callable[[gguf.GGUFWriter], int]) -> None:
    """Write a file with a tokenizer and an embedding of zeros, and no layers. `add` returns the number of tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    num_tokens = add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((num_tokens, 8), np.float32))
    _finish(writer)


def write_gguf(
    path: Path, model: Any, architecture: str, quantization: str = "F32", rope_factors: np.ndarray | None = None
) -> None:
    """Write a model of transformers with a byte-level tokenizer.

    Args:
        model: a causal model with at least 300 rows of embedding.
        quantization: type of the matrices, a name of `gguf.GGMLQuantizationType`.
        rope_factors: what the frequencies of rotary positions are divided by, if anything.
    """
    config, family = model.config, FAMILIES[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture in ("qwen3", "gemma", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(20)
    add_byte_level(writer, *byte_level_vocabulary(["hello", "Ġworld"]), "smollm")
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    kind = gguf.GGMLQuantizationType[quantization]
    for theirs, values in model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = values.float().numpy()
        ours = _gguf_name(theirs, family.layer_names)
        if family.permuted and (".attn_q." in ours or ".attn_k." in ours):
            heads = config.num_attention_heads if ".attn_q." in ours else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if family.unit_norms and ours.endswith("norm.weight"):
            array = array + 1
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ours, gguf.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(theirs: str, layer_names: dict[str, str]) -> str:
    stem, _, suffix = theirs.rpartition(".")
    for short, long in TOP_NAMES.items():
        if stem == long:
            return f"{short}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    short = next(name for name, long in layer_names.items() if long == part)
    return f"blk.{layer}.{short}.{suffix}"
