"""A run of the kit: the device, and the models that its parts make."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Place", "eagle3_head", "make_prompts", "random_model", "seven_billion"]


class Place(NamedTuple):
    """Where a part runs.

    Attributes:
        device: name of LMDeploy's device.
        model: folder of the demo model.
        stock: folder for `sys.path` that holds LMDeploy as shipped, or with the CPU device alone.
        scratch: empty folder.
    """

    device: str
    model: Path
    stock: Path
    scratch: Path

    @property
    def is_small(self) -> bool:
        """Whether models are tiny, since the device is this processor."""
        return self.device == "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32",) if self.is_small else ("bfloat16", "float16")


def make_prompts(place: Place, count: int, num_tokens: int) -> list[list[int]]:
    from benchmarks.models.real_text import RealText

    text = RealText(place.model)
    return [text.completion(num_tokens, 1, number) for number in range(count)]


def random_model(place: Place, name: str, **shape: Any) -> Path:
    from sagellm.demo_model.random_model import write_random_model

    known = {"intermediate_size": 2 * shape["hidden_size"], "vocab_size": 4096, "dtype": place.dtypes[0]}
    return write_random_model(place.scratch / name, architecture="llama", **known | shape)


def eagle3_head(target: Path, folder: Path) -> Path:
    """Write a random EAGLE-3 head for a Llama model, with the names of the published heads."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, dtype = config["num_attention_heads"] * config["head_dim"], getattr(torch, config["dtype"])
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (vocab, hidden), "norm": (hidden,), "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,), "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden), "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden), "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"{name}.weight": torch.ones(shape, dtype=dtype) if len(shape) == 1
        else (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
        for name, shape in shapes.items()
    } | {"d2t": torch.zeros(vocab, dtype=torch.long)}  # fmt: skip
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "draft_vocab_size": vocab}, indent=1))
    return folder


def seven_billion(place: Place) -> Path:
    """Write the configuration of the shape of Qwen2.5-7B and a tokenizer. Weights are made in memory."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    large = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "vocab_size": 152064,
    }  # fmt: skip
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
        "num_key_value_heads": 4 if not place.is_small else 2, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": place.dtypes[0],
    }  # fmt: skip
    folder = place.scratch / "big"
    shutil.copytree(place.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config | (small if place.is_small else large), indent=1))
    return folder
