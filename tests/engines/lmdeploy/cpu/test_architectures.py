"""Tiny random models of each architecture against transformers, greedy, token by token."""

import pytest
import torch
import transformers

from sagellm.engines.base import SamplingParams
from tests.reference import make_prompts, save_random

SHAPE = dict(
    hidden_size=64, intermediate_size=96, vocab_size=320, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1, mlp_only_layers=[])
NATIVE = {
    "Llama": dict(attention_bias=True, mlp_bias=False),
    "Qwen2": {},
    "Qwen3": dict(head_dim=32),
    "Mistral": dict(sliding_window=24),
    "Phi3": dict(sliding_window=None),
    "Gemma": dict(head_dim=32),
    "Gemma2": dict(
        head_dim=32, sliding_window=24, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=9.0,
    ),
}  # fmt: skip
EAGER = {
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen2Moe": EXPERTS | dict(shared_expert_intermediate_size=64),
    "Qwen3Moe": EXPERTS | dict(head_dim=16, norm_topk_prob=True),
}
PROMPTS = make_prompts([3, 40, 300], seed=5)
NEW = 12


@pytest.mark.parametrize(("name", "native"), [*((name, True) for name in NATIVE), *((name, False) for name in EAGER)])
def test_an_architecture_answers_as_transformers_does(start_engine, tmp_path, name, native):
    config = getattr(transformers, f"{name}Config")(**SHAPE | (NATIVE | EAGER)[name])
    model = save_random(config, tmp_path)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=NEW, max_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, use_cache=True,
        )  # fmt: skip
        expected.append(tuple(out[0, len(prompt) :].tolist()))
    engine = start_engine(model=tmp_path)
    runner = engine.engine.executor.model_agent.patched_model
    assert (runner.native is not None) == native, runner.reason
    found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert [tuple(each.token_ids) for each in found] == expected
