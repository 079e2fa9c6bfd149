"""Write a randomly initialised Hugging Face folder of any small shape, for tests and benchmarks of an engine."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from sagellm.core.errors import ConfigError
from sagellm.demo_model.tokenizer import BYTE_VOCAB_SIZE, byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Architecture = Literal["llama", "qwen2"]
Dtype = Literal["float32", "bfloat16", "float16"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Standard deviations are gain / sqrt(inputs), which keeps activations near 1 at every width. The usual 0.02 makes the
# logits of a small model nearly equal, so that rounding decides the greedy token and two right engines disagree.
QUERY_KEY_GAIN = 1.5  # attention that looks at some positions more than at others
LOGIT_SCALE = 4.0  # standard deviation of a logit; the best two are then some tenths apart
BIAS_STD = 0.5  # large enough that an engine which forgets the biases is found out
NORM_JITTER = 0.1  # the norms' weights too
# The rows that give the special tokens' logits are this much smaller, so that they never win: generation then has the
# length that was asked for, whatever the seed.
SPECIAL_TOKEN_SCALE = 0.01


class _Shape(NamedTuple):
    """Checked arguments of `write_random_model`."""

    architecture: Architecture
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype: Dtype
    sliding_window: int | None
    tie_embeddings: bool
    max_position_embeddings: int


def write_random_model(
    path: str | os.PathLike[str],
    *,
    architecture: Architecture = "llama",
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None = None,
    intermediate_size: int,
    vocab_size: int,
    tokenizer_from: str | os.PathLike[str] | None = None,
    dtype: Dtype = "float32",
    sliding_window: int | None = None,
    tie_embeddings: bool = False,
    seed: int = 0,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write config, weights and tokenizer into the folder `path` (made if need be) and return it.

    Args:
        head_dim: by default `hidden_size // num_heads`.
        tokenizer_from: a model folder whose tokenizer is copied; by default bytes, padded with made-up words up to
            `vocab_size`, so that every id the model can emit has a text.
        sliding_window: tokens each position sees, in every layer; only qwen2 has it.
        seed: equal arguments give equal weights.

    Raises:
        ConfigError: a shape that cannot work, or a tokenizer that does not fit the vocabulary.
    """
    shape = _Shape(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // max(1, num_heads) if head_dim is None else head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        dtype=dtype,
        sliding_window=sliding_window,
        tie_embeddings=tie_embeddings,
        max_position_embeddings=max_position_embeddings,
    )
    _check(shape)
    folder = Path(path)
    source = Path(tokenizer_from) if tokenizer_from is not None else None
    if source and not (source / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer_from is {source}, which has no tokenizer.json; give a Hugging Face model folder.")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_tokenizer(shape, folder, source)
    _write_config(shape, folder, tokenizer)
    _write_weights(shape, folder, seed, tokenizer.all_special_ids)
    return folder


def _check(shape: _Shape) -> None:
    """Refuse shapes that no engine can run."""
    for name, value, allowed in (
        ("architecture", shape.architecture, get_args(Architecture)),
        ("dtype", shape.dtype, get_args(Dtype)),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(allowed)}.")
    for name, value in shape._asdict().items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more.")
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"num_heads is {shape.num_heads} and num_kv_heads {shape.num_kv_heads}; "
            "num_heads must be a multiple of num_kv_heads."
        )
    if shape.head_dim % 2:
        raise ConfigError(f"head_dim is {shape.head_dim}; rotary positions need an even number.")
    if shape.vocab_size < BYTE_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {shape.vocab_size}; at least {BYTE_VOCAB_SIZE} are needed for the bytes and special tokens."
        )
    if shape.sliding_window and shape.architecture != "qwen2":
        raise ConfigError(f"sliding_window is {shape.sliding_window}; only architecture 'qwen2' has one. Leave it out.")


def _write_tokenizer(shape: _Shape, folder: Path, source: Path | None) -> "PreTrainedTokenizerBase":
    """Write or copy the tokenizer, and return it."""
    if source is None:
        tokenizer = byte_tokenizer(shape.vocab_size, shape.max_position_embeddings)
        tokenizer.save_pretrained(folder, save_jinja_files=False)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source)
        if len(tokenizer) > shape.vocab_size:
            raise ConfigError(
                f"vocab_size is {shape.vocab_size}, but the tokenizer of {source} has {len(tokenizer)} tokens; "
                "give at least that many."
            )
        for name in TOKENIZER_FILES:
            if (source / name).is_file() and (source / name).resolve() != (folder / name).resolve():
                shutil.copyfile(source / name, folder / name)
    return tokenizer


def _write_config(shape: _Shape, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    from transformers import GenerationConfig, LlamaConfig, Qwen2Config

    # None has to be said: left out, LlamaConfig takes 1 and 2.
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings: dict[str, Any] = dict(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_embeddings,
        dtype=shape.dtype,
        **ids,
    )
    if shape.architecture == "llama":
        config = LlamaConfig(architectures=["LlamaForCausalLM"], **settings)
    else:
        windows = {"use_sliding_window": False}
        if shape.sliding_window:
            # max_window_layers is the number of leading layers that see everything.
            windows = {"use_sliding_window": True, "sliding_window": shape.sliding_window, "max_window_layers": 0}
        config = Qwen2Config(architectures=["Qwen2ForCausalLM"], **settings, **windows)
    settings = json.loads(config.to_json_string(use_diff=False))
    # transformers 4.57.3 takes any local folder with more than 100,000 tokens that a release after 4.57.2 wrote for a
    # Mistral with a broken tokenizer, and says so at each load.
    settings["transformers_version"] = "4.57.2"
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    GenerationConfig(**ids).save_pretrained(folder)


def _write_weights(shape: _Shape, folder: Path, seed: int, special_ids: list[int]) -> None:
    """Draw every tensor in its final type and write one safetensors file."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    tensors = {
        name: (torch.randn(size, generator=generator) * std + mean).to(dtype)
        for name, size, std, mean in _parameters(shape)
    }
    head = "model.embed_tokens.weight" if shape.tie_embeddings else "lm_head.weight"
    tensors[head][special_ids] *= SPECIAL_TOKEN_SCALE
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable to its owner alone


def _parameters(shape: _Shape) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """(name, size, standard deviation, mean) of every tensor, in a fixed order."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Small beside what the layers add: a tied model would otherwise answer each token with itself.
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden), hidden**-0.5, 0.0
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows, gain in (("q", queries, QUERY_KEY_GAIN), ("k", keys, QUERY_KEY_GAIN), ("v", keys, 1.0)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden), gain * hidden**-0.5, 0.0
            if shape.architecture == "qwen2":
                yield f"{prefix}self_attn.{name}_proj.bias", (rows,), BIAS_STD, 0.0
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries), queries**-0.5, 0.0
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden), hidden**-0.5, 0.0
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden), hidden**-0.5, 0.0
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner), 2 * inner**-0.5, 0.0
        yield f"{prefix}input_layernorm.weight", (hidden,), NORM_JITTER, 1.0
        yield f"{prefix}post_attention_layernorm.weight", (hidden,), NORM_JITTER, 1.0
    yield "model.norm.weight", (hidden,), NORM_JITTER * LOGIT_SCALE, LOGIT_SCALE
    if not shape.tie_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden), hidden**-0.5, 0.0
