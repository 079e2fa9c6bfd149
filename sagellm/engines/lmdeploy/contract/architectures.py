"""A tiny random model of each architecture in a device's engine, against transformers, token by token."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sagellm.core.config import SageConfig
from sagellm.core.contract import Report
from sagellm.engines.base import SamplingParams

__all__ = ["ARCHITECTURES", "RULES", "check_architectures", "write_model"]

RULES = {"architectures": "answers as transformers does with a tiny model of each architecture"}
SHAPE = dict(
    hidden_size=64, intermediate_size=96, vocab_size=320, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1, mlp_only_layers=[])
# Configuration of transformers: name without `Config`, and settings besides `SHAPE`.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": dict(attention_bias=True, mlp_bias=False),
    "Qwen2": {},
    "Qwen3": dict(head_dim=32),
    "Mistral": dict(sliding_window=24),
    "Phi3": dict(sliding_window=None),
    "Gemma": dict(head_dim=32),
    "Gemma2": dict(
        head_dim=32, sliding_window=24, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=9.0,
    ),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen2Moe": EXPERTS | dict(shared_expert_intermediate_size=64),
    "Qwen3Moe": EXPERTS | dict(head_dim=16, norm_topk_prob=True),
    "GptOss": dict(  # without YaRN, whose `truncate` LMDeploy 0.11 does not read
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=24, rope_scaling=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "DeepseekV2": dict(
        kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=48, first_k_dense_replace=1, topk_method="greedy",
        num_key_value_heads=4, router_n_groups=-1, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1,
    ),
}  # fmt: skip
PROMPT_TOKENS, NUM_NEW = (3, 40, 300), 12
NEAR = 0.75  # of a logit, where the device has no float32


def write_model(name: str, folder: Path, **changes: Any) -> Any:
    """Write a random float32 model of an architecture, with a tokenizer of bytes, and return it.

    Args:
        changes: fields of its config that are not those of `ARCHITECTURES`.
    """
    import transformers

    from sagellm.demo_model.tokenizer import byte_tokenizer

    config = getattr(transformers, f"{name}Config")(**SHAPE | ARCHITECTURES[name] | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    byte_tokenizer(config.vocab_size, 2048).save_pretrained(folder, save_jinja_files=False)
    return model


def check_architectures(
    device: str, dtype: str, seed: int, report: Report, names: Sequence[str] = tuple(ARCHITECTURES)
) -> None:
    """Report each architecture that fails, or answers otherwise than transformers.

    Args:
        dtype: type that the device computes in; in float32 all tokens must be equal.
    """
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(10, 250, (size,), generator=draw).tolist() for size in PROMPT_TOKENS]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="sagellm-check-") as folder:
            model = write_model(name, Path(folder))
            try:
                answers = _answers(device, dtype, Path(folder), prompts)
            except Exception as error:  # whatever LMDeploy and the device raise
                report("architectures", f"{name}: {type(error).__name__}: {error}")
                continue
            for prompt, answer in zip(prompts, answers, strict=True):
                if wrong := _wrong(model.to(getattr(torch, dtype)), prompt, answer, exact=dtype == "float32"):
                    report("architectures", f"{name}, after {len(prompt)} tokens: {wrong}")


def _answers(device: str, dtype: str, folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    config = SageConfig(device=device, dtype=dtype, model=folder, block_size=16, kv_blocks=128, max_batch_size=8, threads=1)
    with LMDeployEngine(config) as engine:
        return [each.token_ids for each in engine.generate(prompts, SamplingParams(NUM_NEW, ignore_eos=True))]


def _wrong(model: Any, prompt: list[int], answer: tuple[int, ...], exact: bool) -> str:
    """Say what is wrong with a greedy answer, "" if nothing is."""
    with torch.inference_mode():
        scores = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    behind = scores.amax(1) - scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
    place = int(behind.argmax())
    if len(answer) != NUM_NEW:
        return f"the answer has {len(answer)} tokens, not {NUM_NEW}."
    # The likeliest token of the same text is what transformers would have said, unless rounding decides.
    if float(behind[place]) > (1e-3 if exact else NEAR):
        return f"token {place} of the answer is {answer[place]}, whose logit is {float(behind[place]):.3g} below the best."
    return ""
