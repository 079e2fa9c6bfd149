"""Quantized tensors of GGUF files as whole numbers with scales: what the gguf package reads, in the same rows."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.models.gguf_files import write_gguf
from sagellm.core.config import SageConfig
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy import worker_processes
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.models import ModelError
from sagellm.models.convert import convert_gguf
from sagellm.models.gguf_levels import LEVEL_TYPES, GGUFLevels
from sagellm.models.levels import LEVELS4, LEVELS5, LEVELS6, LEVELS8, Levels
from tests.models.test_gguf import random_model
from tests.sweeps import slow_but

SUPER = 256  # weights of a super-block
# Where halves are in a block, which random bytes would make infinite.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


LARGE = {"hidden_size": 256, "intermediate_size": 512}  # whole super-blocks


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf.quants.Q6_K, "quantize_blocks", in_6_bits)  # the package has no way to write this type


def in_6_bits(blocks: np.ndarray) -> np.ndarray:
    """Round rows of 256 weights to blocks of Q6_K."""
    parts = blocks.reshape(len(blocks), 16, 16)
    largest = np.abs(parts).max(2) / 31
    scale = (largest.max(1, keepdims=True) / 127).astype(np.float16)
    scales = np.rint(largest / np.maximum(scale.astype(np.float32), 1e-9)).astype(np.int8)  # a row of padding is zero
    step = np.maximum(scale.astype(np.float32) * scales, 1e-9)[:, :, None]
    levels = (np.rint(parts / step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (levels[:, :, :2] & 15) | (levels[:, :, 2:] & 15) << 4
    high = sum((levels[:, :, number] >> 4) << 2 * number for number in range(4))
    rows = [part.reshape(len(blocks), -1) for part in (low, high, scales.view(np.uint8), scale.view(np.uint8))]
    return np.concatenate(rows, axis=1)


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
    assert levels.block in (16, 32) and form.endswith(name[1])
    assert form == LEVELS8 or (levels.values.min() >= 0 and levels.values.max() < 2 ** int(name[1]))
    # Scales of super-blocks are products, which are rounded to halves; a weight is the difference of two of them.
    rounding = 1e-3 * np.abs(levels.values).max() * np.abs(levels.scales.astype(np.float32)).max() if name.endswith("K") else 0
    np.testing.assert_allclose(values_of(levels), expected, rtol=1e-6, atol=rounding + 1e-6)


def test_blocks_of_5_bits_that_are_cut_take_6():
    five = Levels(np.full((2, 64), 31, np.int8), np.ones((2, 2), np.float16), np.zeros((2, 2), np.float16), LEVELS5)
    assert five.of_inputs(32, 32).format == LEVELS5 and five.of_inputs(16, 32).format == LEVELS6
    six = five._replace(format=LEVELS6, scales=np.ones((2, 4), np.float16), offsets=np.zeros((2, 4), np.float16))
    assert Levels.joined([five, six]).format == LEVELS6 and Levels.joined([five, five]).format == LEVELS5


def test_parts_are_joined_in_what_holds_them_all():
    four = Levels(np.full((2, 64), 15, np.int8), np.ones((2, 2), np.float16), np.zeros((2, 2), np.float16), LEVELS4)
    six = Levels(np.full((1, 64), -32, np.int8), np.ones((1, 4), np.float16), np.zeros((1, 4), np.float16), LEVELS8)
    both = Levels.joined([four, six])
    assert (both.format, both.block, both.values.shape) == (LEVELS8, 16, (3, 64))
    assert np.array_equal(values_of(both), np.concatenate([values_of(four), values_of(six)]))


def converted(tmp_path, kind, architecture="llama", **shape):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, random_model(architecture, **(LARGE if kind == "Q6_K" else {}) | shape), architecture, kind)
    return file, convert_gguf(file, "tiny")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_rows_are_those_of_the_converted_weights(tmp_path, kind):
    _, folder = converted(tmp_path, kind)
    weights, levels = load_file(folder / "model.safetensors"), GGUFLevels(folder)
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert all(name in levels for name in names) and "model.layers.1.self_attn.qkv_proj" not in levels
    expected = torch.cat([weights[f"{name}.weight"] for name in names]).numpy()
    np.testing.assert_allclose(values_of(levels.of(names)), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "Q4_1"), ("llama", "Q8_0"), ("qwen2", "Q4_0"), ("phi3", "Q5_1"), ("llama", "Q6_K")],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_an_engine_computes_the_same_from_packed_weights(tmp_path, architecture, kind, dtype, tolerance):
    _, folder = converted(tmp_path, kind, architecture)
    prompt, found = list(range(10, 60)), {}
    for weights in ("auto", "packed"):
        config = SageConfig(device="cpu", dtype=dtype, weights=weights, kv_blocks=16, context_length=128)
        engine = LMDeployEngine(config, folder)
        try:
            model = engine.engine.executor.model_agent.patched_model.model
            packed = model.lm_head.impl.packed
            assert (packed.data.dtype == torch.uint8) == (weights == "packed")
            if weights == "packed":
                bits = int(kind[1]) + 32 / (16 if kind == "Q6_K" else 32)  # with a scale and an offset for each block
                assert packed.data.nbytes * 8 == bits * packed.outputs * packed.inputs
            found[weights] = engine.prompt_logits(prompt)
        finally:
            engine.close()
    if kind == "Q6_K":  # its scales are products, which are rounded to halves
        tolerance = max(tolerance, 2e-3)
    assert np.abs(found["packed"] - found["auto"]).max() < tolerance * max(1, found["auto"].std())


def test_inputs_of_a_worker_keep_their_scales():
    values = np.arange(128, dtype=np.int8).reshape(2, 64)
    whole = Levels(values, np.array([[1, 2], [3, 4]], np.float16), np.array([[5, 6], [7, 8]], np.float16), LEVELS8)
    for first, count, block in ((0, 32, 32), (32, 32, 32), (16, 32, 16), (48, 16, 16)):
        part = whole.of_inputs(first, count)
        assert part.block == block and np.array_equal(values_of(part), values_of(whole)[:, first : first + count])


@pytest.mark.parametrize(
    ("architecture", "kind", "workers", "dtype"),
    slow_but(
        [
            ("llama", "Q4_0", 2, "float32"), ("llama", "Q4_1", 2, "float32"), ("llama", "Q5_0", 2, "float32"),
            ("llama", "Q8_0", 2, "float32"), ("qwen2", "Q5_1", 2, "float32"), ("phi3", "Q8_0", 2, "float32"),
            ("qwen3", "Q4_0", 2, "bfloat16"), ("llama with three key heads", "Q4_0", 3, "float32"),
            ("llama with one key head", "Q4_1", 2, "float32"), ("llama", "Q6_K", 2, "float32"),
        ],
        ("llama", "Q4_0", 2, "float32"),
    ),
)  # fmt: skip
def test_workers_share_packed_weights(tmp_path, architecture, kind, workers, dtype):
    """The weights that LMDeploy loads are zero here, so the answers come from the levels of the file."""
    given = {
        "llama with three key heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192},
        "llama with one key head": {"num_key_value_heads": 1},
        "qwen3": {"head_dim": 32},
    }.get(architecture, {})  # fmt: skip
    _, folder = converted(tmp_path, kind, architecture.split()[0], **given)
    stored = load_file(folder / "model.safetensors")
    prompts = [list(range(10, 60)), list(range(200, 230))]

    def answers(count):
        config = SageConfig(
            device="cpu", dtype=dtype, weights="packed", kv_blocks=16, context_length=128, threads=1, tensor_parallel=count
        )
        engine = LMDeployEngine(config, folder)
        try:
            tokens = [one.token_ids for one in engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))]
            return tokens, engine.prompt_logits(prompts[0])
        finally:
            engine.close()

    worker_processes.load_early(keep=True)
    one, logits = answers(1)
    zeros = {name: each if each.dim() == 1 else torch.zeros_like(each) for name, each in stored.items()}
    save_file(zeros, folder / "model.safetensors", {"format": "pt"})
    several, others = answers(workers)
    assert np.abs(others - logits).max() < (1e-4 if dtype == "float32" else 0.02) * max(1, logits.std())
    assert several == one or dtype == "bfloat16"


def test_what_cannot_be_packed_is_refused(tmp_path):
    file, folder = converted(tmp_path, "Q8_0")
    with pytest.raises(ModelError, match=r"not converted from a GGUF file, so it has no packed weights; use weights auto\."):
        GGUFLevels(tmp_path)
    with pytest.raises(ModelError, match=r"o_proj has 64 inputs, .* a multiple of 16 .* split for 1, 2, 4 workers"):
        GGUFLevels(folder).check_split(json.loads((folder / "config.json").read_text()), 8)
    with pytest.raises(ModelError, match=r"tensor_parallel 4: model.layers.0.mlp.down_proj has 96 inputs, .* for 1, 2, 3, 6 "):
        LMDeployEngine(SageConfig(device="cpu", weights="packed", kv_blocks=16, tensor_parallel=4), folder)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ModelError, match=r"tiny\.gguf has changed since it was converted; start with --model"):
        GGUFLevels(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"tiny\.gguf, which packed weights are read from, cannot be read: No such file"):
        GGUFLevels(folder)


def test_tensors_without_levels_stay_what_they_are(tmp_path):
    _, folder = converted(tmp_path, "F16")
    assert GGUFLevels(folder).of(["model.layers.0.mlp.down_proj"]) is None
