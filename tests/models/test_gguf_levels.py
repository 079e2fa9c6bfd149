"""Quantized tensors of GGUF files as whole numbers with scales: what the gguf package reads, in the same rows."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models.gguf_files import write_gguf
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.models import ModelError
from sagellm.models.convert import convert_gguf
from sagellm.models.gguf_levels import LEVEL_TYPES, GGUFLevels
from sagellm.models.levels import LEVELS4, LEVELS8, Levels
from tests.models.test_gguf import random_model

SUPER = 256  # weights of a super-block
# Where halves are in a block, which random bytes would make infinite.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def values_of(levels: Levels) -> np.ndarray:
    scales, offsets = (np.repeat(part.astype(np.float32), levels.block, axis=1) for part in levels[1:3])
    return levels.values * scales + offsets


@pytest.mark.parametrize("name", LEVEL_TYPES)
def test_levels_are_the_values_of_the_gguf_package(name):
    kind = gguf.GGMLQuantizationType[name]
    weights_of_block, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(1)
    data = random.integers(0, 256, (12 * SUPER // weights_of_block, bytes_of_block), np.uint8)
    for place in HALVES[name]:
        data[:, place : place + 2] = random.normal(size=(len(data), 1)).astype(np.float16).view(np.uint8)
    expected = gguf.dequantize(data.reshape(12, -1), kind)
    size, form, read = LEVEL_TYPES[name]
    levels = Levels(*(part.reshape(12, -1) for part in read(data)), form)
    assert size == bytes_of_block and levels.values.dtype == np.int8 and levels.scales.dtype == np.float16
    assert levels.block in (16, 32) and (form == LEVELS8 or (levels.values.min() >= 0 and levels.values.max() <= 15))
    # Scales of super-blocks are products, which are rounded to halves; a weight is the difference of two of them.
    rounding = 1e-3 * np.abs(levels.values).max() * np.abs(levels.scales.astype(np.float32)).max() if name.endswith("K") else 0
    np.testing.assert_allclose(values_of(levels), expected, rtol=1e-6, atol=rounding + 1e-6)


def test_parts_are_joined_in_what_holds_them_all():
    four = Levels(np.full((2, 64), 15, np.int8), np.ones((2, 2), np.float16), np.zeros((2, 2), np.float16), LEVELS4)
    six = Levels(np.full((1, 64), -32, np.int8), np.ones((1, 4), np.float16), np.zeros((1, 4), np.float16), LEVELS8)
    both = Levels.joined([four, six])
    assert (both.format, both.block, both.values.shape) == (LEVELS8, 16, (3, 64))
    assert np.array_equal(values_of(both), np.concatenate([values_of(four), values_of(six)]))


def converted(tmp_path, kind, architecture="llama"):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, random_model(architecture), architecture, kind)
    return file, convert_gguf(file, "tiny")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_rows_are_those_of_the_converted_weights(tmp_path, kind):
    _, folder = converted(tmp_path, kind)
    weights, levels = load_file(folder / "model.safetensors"), GGUFLevels(folder)
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert all(name in levels for name in names) and "model.layers.1.self_attn.qkv_proj" not in levels
    expected = torch.cat([weights[f"{name}.weight"] for name in names]).numpy()
    np.testing.assert_allclose(values_of(levels.of(names)), expected, atol=1e-6)


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_1"), ("llama", "Q8_0"), ("qwen2", "Q4_0"), ("phi3", "Q5_1")])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_an_engine_computes_the_same_from_packed_weights(tmp_path, architecture, kind, dtype, tolerance):
    _, folder = converted(tmp_path, kind, architecture)
    prompt, found = list(range(10, 60)), {}
    for weights in ("auto", "packed"):
        config = SageConfig(device="cpu", dtype=dtype, weights=weights, kv_blocks=16, context_length=128)
        engine = LMDeployEngine(config, folder)
        try:
            model = engine.engine.executor.model_agent.patched_model.model
            stored = model.lm_head.impl.packed.data.dtype
            assert (stored == torch.uint8) == (weights == "packed")
            found[weights] = engine.prompt_logits(prompt)
        finally:
            engine.close()
    assert np.abs(found["packed"] - found["auto"]).max() < tolerance * max(1, found["auto"].std())


def test_what_cannot_be_packed_is_refused(tmp_path):
    file, folder = converted(tmp_path, "Q8_0")
    with pytest.raises(ModelError, match=r"not converted from a GGUF file, so it has no packed weights; use weights auto\."):
        GGUFLevels(tmp_path)
    with pytest.raises(ConfigError, match=r"weights packed needs the whole model in one worker; use tensor_parallel 1"):
        LMDeployEngine(SageConfig(device="cpu", weights="packed", tensor_parallel=2), folder)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ModelError, match=r"tiny\.gguf has changed since it was converted; start with --model"):
        GGUFLevels(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"tiny\.gguf, which packed weights are read from, cannot be read: No such file"):
        GGUFLevels(folder)


def test_tensors_without_levels_stay_what_they_are(tmp_path):
    _, folder = converted(tmp_path, "F16")
    assert GGUFLevels(folder).of(["model.layers.0.mlp.down_proj"]) is None
