"""FLOPs against torch's own counter and a token-by-token sum; peaks that are known, measured or refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.errors import BenchmarkError
from benchmarks.metrics import flops
from benchmarks.metrics.flops import Shape
from tests.benchmarks.metrics.conftest import Request, make_samples

SHAPE = Shape(
    hidden_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=80, vocab_size=100
)
CONFIG = dict(
    model_type="llama", hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
    intermediate_size=80, vocab_size=100,
)  # fmt: skip


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_read_shape(tmp_path: Path):
    assert flops.read_shape(write(tmp_path)) == SHAPE


def test_missing_head_sizes_follow_from_the_others(tmp_path: Path):
    shape = flops.read_shape(write(tmp_path, head_dim=None, num_key_value_heads=None))
    assert (shape.head_dim, shape.num_kv_heads) == (12, 4)


def test_a_window_that_is_switched_off_is_none(tmp_path: Path):
    changes = dict(model_type="qwen2", sliding_window=16)
    assert flops.read_shape(write(tmp_path, **changes, use_sliding_window=False)) == SHAPE
    assert flops.read_shape(write(tmp_path, **changes)) == SHAPE
    with pytest.raises(BenchmarkError, match="sliding window"):
        flops.read_shape(write(tmp_path, **changes, use_sliding_window=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ('{"model_type": "mamba"}', "known are llama"),
        ('{"model_type": "llama"}', "lacks 'num_att"),
    ],
)
def test_bad_folders(tmp_path: Path, text: str, message: str):
    with pytest.raises(BenchmarkError, match="cannot read"):
        flops.read_shape(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        flops.read_shape(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_linear_part_is_what_torch_counts(family: str):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    values = {key: value for key, value in CONFIG.items() if key != "model_type"}
    make_config, make_model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    model = make_model(make_config(**values, attn_implementation="eager")).eval()
    num_tokens = 17
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(1, num_tokens, dtype=torch.long), logits_to_keep=1)
    counted = counter.get_flop_counts()["Global"]
    linear = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert linear == flops.linear_flops(SHAPE, np.array(num_tokens), np.array(1))
    # Eager attention computes the masked half too, and rotary embeddings take one product of head_dim / 2 by tokens.
    whole_square = 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim * num_tokens**2
    rotary = SHAPE.head_dim * num_tokens
    assert counted[torch.ops.aten.bmm] - rotary == whole_square
    causal = flops.attention_flops(SHAPE, np.array(0), np.array(num_tokens))
    assert causal == whole_square * (num_tokens + 1) / (2 * num_tokens)


def token_by_token(prompt: int, cached: int, output: int) -> float:
    """Every position that goes through the model, one at a time."""
    total = 0
    for position in range(cached, prompt + output - 1):
        total += 2 * SHAPE.layer_weights
        total += 4 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim * (position + 1)
        total += 2 * SHAPE.hidden_size * SHAPE.vocab_size if position >= prompt - 1 else 0
    return total


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.integers(0, 20)), min_size=1, max_size=5))
def test_requests_equal_the_sum_over_tokens(drawn: list[tuple[int, float, int]]):
    prompt = [tokens for tokens, _, _ in drawn]
    cached = [int(share * (tokens - 1)) for tokens, share, _ in drawn]
    output = [tokens for _, _, tokens in drawn]
    expected = [token_by_token(*of) if of[2] else 0 for of in zip(prompt, cached, output, strict=True)]
    np.testing.assert_allclose(flops.request_flops(SHAPE, prompt, cached, output), expected, rtol=1e-12)


def test_a_round_counts_whole_answers_and_spreads_the_cache():
    round_ = [
        Request(0.0, True, [(1.0, 1), (2.0, 1)], prompt_tokens=40),
        Request(0.0, True, [(1.0, 3)], prompt_tokens=20),
        Request(0.0, False, [(1.0, 3)], prompt_tokens=20),
    ]
    expected = token_by_token(40, 20, 2) + token_by_token(20, 10, 3)
    assert flops.round_flops(SHAPE, make_samples(round_), cached_tokens=40) == pytest.approx(expected)


def test_the_last_prompt_token_is_always_computed():
    round_ = [Request(0.0, True, [(1.0, 1)], prompt_tokens=8)]
    assert flops.round_flops(SHAPE, make_samples(round_), cached_tokens=8) == pytest.approx(token_by_token(8, 7, 1))


def test_gpu_peaks_are_dense():
    peak, name = flops.gpu_peak_flops("NVIDIA H200", "bfloat16")
    assert peak == 989.4e12 and "dense" in name and "NVIDIA H200" in name
    assert flops.gpu_peak_flops("NVIDIA GeForce RTX 4090", "float16")[0] == 165.2e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("NVIDIA H100 PCIe", "bfloat16"), ("NVIDIA H200 MIG 1g.18gb", "bfloat16"), ("NVIDIA H200", "int8")],
)
def test_unknown_peaks_are_asked_for(name: str, dtype: str):
    with pytest.raises(BenchmarkError, match="peak_tflops"):
        flops.gpu_peak_flops(name, dtype)


def test_unknown_devices_are_asked_for():
    with pytest.raises(BenchmarkError, match="peak_tflops"):
        flops.peak_flops("ascend", "float16", 1)


def test_cpu_peak_is_measured_and_named(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(flops, "GEMM_SIZES", (16, 32))
    monkeypatch.setattr(flops, "GEMM_BUDGET_S", 0.02)
    before = torch.get_num_threads()
    peak, name = flops.peak_flops("cpu", "float32", 2)
    assert peak > 0 and name.startswith("measured GEMM peak, float32, 2 threads, ")
    assert torch.get_num_threads() == before


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch):
    tried = []

    def slow(size: int, dtype: object, end: float) -> float:
        tried.append(size)
        return size**3 * 1e-6

    monkeypatch.setattr(flops, "_fastest_product", slow)
    assert flops.gemm_flops("float32", 1, sizes=(10, 100, 1000), budget_s=60.0) == pytest.approx(2e6)
    assert tried == [10, 100]
