"""Tests of the CPU device's operators beyond the contract of devices, which compares all operators with plain formulas."""

import sys

import pytest
import torch
from lmdeploy.pytorch.backends.base import OpType
from lmdeploy.pytorch.backends.default.rotary_embedding import DefaultRotaryEmbeddingBuilder
from lmdeploy.pytorch.backends.rotary_embedding import Llama3Parameters, RopeType, YarnParameters

from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.cpu import operators
from sagellm.engines.lmdeploy.cpu.backend import CpuOpsBackend
from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner
from sagellm.engines.lmdeploy.cpu.operators.norm import CpuRMSNormImpl
from sagellm.engines.lmdeploy.cpu.operators.rotary import (
    CpuApplyRotaryEmbImpl,
    CpuRotaryEmbeddingBuilder,
    TabledRotaryEmbedding,
    _joined,
)
from sagellm.engines.lmdeploy.cpu.operators.sampling import CpuMultinomialSamplingImpl, _uniform

TEXT = {"num_attention_heads": 2, "hidden_size": 32}


def test_rms_norm_with_and_without_a_residual():
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)
    norm = CpuRMSNormImpl(32, 1e-5)

    def plain(value):
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    torch.testing.assert_close(norm.forward(x, weight), plain(x))
    before = x.clone(), residual.clone()
    out, total = norm.forward(x, weight, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, plain(x + residual))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def rotated(states, cos, sin):
    half = states.shape[-1] // 2
    turned = torch.cat((-states[..., half:], states[..., :half]), -1)
    return states * cos[:, None] + turned * sin[:, None]


@pytest.mark.parametrize("layout", ["packed", "separate", "values_between"])
@pytest.mark.parametrize("inplace", [True, False])
def test_rotary(layout, inplace):
    tokens, heads, kv_heads, dim = 6, 4, 2, 16
    packed = torch.randn(tokens, heads + 2 * kv_heads, dim)
    query, key, value = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    if layout == "separate":
        query, key = query.clone(), key.clone()
    if layout == "values_between":
        key, value = value, key
    angles = torch.rand(tokens, dim // 2) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    assert (_joined(query, key) is not None) == (layout == "packed")
    expected = rotated(query, cos, sin), rotated(key, cos, sin)
    kept = query.clone(), value.clone()
    out = CpuApplyRotaryEmbImpl().forward(query, key, cos, sin, inplace=inplace)
    torch.testing.assert_close(out, expected)
    assert torch.equal(value, kept[1]), "the values are not rotated"
    assert torch.equal(query, out[0] if inplace else kept[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (RopeType.Default, {}),
        (RopeType.LinearScaling, {"scaling_factor": 4.0}),
        (RopeType.Llama3, {"scaling_factor": 8.0, "llama3_params": Llama3Parameters(1.0, 4.0, 256)}),
        (RopeType.Yarn, {"scaling_factor": 4.0, "yarn_params": YarnParameters()}),
        (RopeType.DynamicNTKScaling, {"scaling_factor": 2.0}),
    ],
)
def test_rotary_embedding_is_that_of_lmdeploy(kind, options, dtype):
    options |= {"dim": 16, "max_position_embeddings": 64, "base": 10000, "emb_type": kind}
    ours, theirs = CpuRotaryEmbeddingBuilder.build(**options), DefaultRotaryEmbeddingBuilder.build(**options)
    assert isinstance(ours, TabledRotaryEmbedding) == (kind != RopeType.DynamicNTKScaling), "that one looks at the longest text"
    x = torch.zeros(1, 4, 32, dtype=dtype)
    for positions in ([0, 1, 63, 7], [3], [5, 4000, 1024, 5000], [1023]):  # the table grows once
        wanted, found = theirs(x, torch.tensor([positions])), ours(x, torch.tensor([positions]))
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


def sample(scores, seeds, offsets=None, indices=None):
    offsets = torch.zeros_like(seeds) if offsets is None else offsets
    return CpuMultinomialSamplingImpl().forward(scores, seeds, offsets, indices)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(monkeypatch, uniform):
    monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.operators.sampling._uniform", lambda seed, offset: uniform)
    for scores in ([0, 0, 1, 0, 0], [0, 0.3, 0, 0.7, 0], [0.2] * 5, [1e-30, 0, 1, 1e-30, 0]):
        row = torch.tensor([scores], dtype=torch.float32)
        assert row[0, sample(row, torch.zeros(1, dtype=torch.int64))] > 0
    many = torch.full((1, 50_000), 1 / 50_000)
    many[0, -5:] = 0
    assert many[0, sample(many, torch.zeros(1, dtype=torch.int64))] > 0


def test_uniform_numbers_spread():
    values = [_uniform(seed, offset) for seed in range(100) for offset in range(100)]
    assert 0 <= min(values) < 0.001 and 0.999 < max(values) < 1
    assert len(set(values)) > 9900
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    assert 0 <= _uniform(-5, 2**40) < 1


def test_one_new_file_brings_builder_packing_and_size(tmp_path, monkeypatch):
    source = """
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
def mark(model, levels):
    model.is_marked = True
FAMILY = OperatorFamily({OPERATOR: "builder"}, prepare=mark, extra_bytes=lambda text, dtype, context: 7 * context)
"""
    known = operators.extra_bytes(TEXT, "float32", 16)
    monkeypatch.setattr(operators, "__path__", [*operators.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{operators.__name__}.added", raising=False)
    (tmp_path / "added.py").write_text(source.replace("OPERATOR", repr("LayerNorm")))
    operators.families.cache_clear()
    operators.builders.cache_clear()
    try:
        assert CpuOpsBackend.get_layer_impl_builder(OpType.LayerNorm) == "builder"
        model = torch.nn.Identity()
        model.ctx_mgr = None
        CpuRunner(model, None, None, None, "cpu")
        assert model.is_marked
        assert operators.extra_bytes(TEXT, "float32", 16) == known + 7 * 16
        (tmp_path / "again.py").write_text(source.replace("OPERATOR", repr("LayerNorm")))
        operators.families.cache_clear()
        operators.builders.cache_clear()
        with pytest.raises(ConfigError, match="added.py and again.py both build LayerNorm"):
            operators.builders()
    finally:
        operators.families.cache_clear()
        operators.builders.cache_clear()
