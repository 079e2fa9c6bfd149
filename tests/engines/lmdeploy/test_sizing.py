"""From memory and a model's shape to sizes; what does not fit is refused with the numbers."""

import json
import re
from pathlib import Path

import pytest

from sagellm.core.config import SageConfig
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.engines.lmdeploy.cpu import operators
from sagellm.engines.lmdeploy.sizing import resolve_device, size_engine
from sagellm.models.folder import read_hf_config

MIB = 2**20
# 2 (keys and values) * 4 layers * 64 tokens * 2 heads * 32 * 4 bytes
BLOCK = 2 * 4 * 64 * 2 * 32 * 4
SHAPE = dict(
    num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=4, hidden_size=256, max_position_embeddings=1024,
    dtype="float32",
)  # fmt: skip


def write_weights(file: Path, num_bytes: int) -> None:
    """Write a safetensors file with one tensor of zeros in 16 bits."""
    tensor = {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"weights": tensor}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


@pytest.fixture
def model(tmp_path):
    def write(weights=MIB, **change):
        shape = {name: value for name, value in (SHAPE | change).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(shape))
        write_weights(tmp_path / "model.safetensors", weights)
        return tmp_path

    return write


@pytest.fixture
def memory(monkeypatch):
    def set_to(available, total=64 * MIB):
        monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.runtime.memory_bytes", lambda: (available, total))

    set_to(64 * MIB)
    return set_to


def size(model, **config):
    return size_engine(SageConfig(**config), model, "cpu")


def test_defaults(model, memory):
    memory(1024 * MIB)
    sizes = size(model())
    assert (sizes.dtype, sizes.context_length, sizes.max_batch_size) == ("float32", 1024, 32)
    assert sizes.schema.block_bytes == BLOCK
    assert sizes.num_blocks == 32 * 16  # every request of a full batch at full length
    assert sizes.num_host_blocks == 0


def test_a_quarter_of_the_memory_is_the_most_by_default(model, memory):
    assert size(model()).num_blocks == 64 * MIB // 4 // BLOCK


def test_the_default_holds_one_full_context(model, memory):
    memory(8 * MIB)
    assert size(model()).num_blocks == 1024 // 64 + 1


def test_share_and_count(model, memory):
    assert size(model(), kv_memory_share=0.5).num_blocks == 32 * MIB // BLOCK
    assert size(model(), kv_blocks=33, host_kv_blocks=7).num_blocks == 33
    assert size(model(), kv_memory_share=0.001).num_blocks == 16  # LMDeploy's least


def test_what_does_not_fit_is_refused_with_the_numbers(model, memory):
    with pytest.raises(CapacityError) as caught:
        size(model(weights=4 * MIB), kv_blocks=500, host_kv_blocks=100)
    message = str(caught.value)
    extra = operators.extra_bytes(SHAPE, "float32", 1024)
    assert extra == 1024 * 2 * 32 * 4  # cos and sin of every position
    room = (64 * MIB - 8 * MIB - extra) // BLOCK  # float32 from 16 bits could double the weights
    numbers = ("500 KV blocks", "100 host blocks of 0.1 MiB", "need 75.0 MiB", "weights 8.0 MiB", "operators 0.2 MiB")
    for number in (*numbers, "64.0 MiB free"):
        assert number in message
    assert f"at most {room} blocks in all" in message
    assert size(model(weights=4 * MIB), kv_blocks=room - 100, host_kv_blocks=100).num_blocks == room - 100
    with pytest.raises(CapacityError):
        size(model(weights=4 * MIB), kv_blocks=room - 99, host_kv_blocks=100)


def test_weights_alone_too_large(model, memory):
    with pytest.raises(CapacityError, match="at most 0 blocks in all"):
        size(model(weights=40 * MIB))


def test_tensor_parallel_shares_the_heads(model, memory):
    two = size(model(), tensor_parallel=2, kv_blocks=16)
    assert two.schema.num_kv_heads == 1 and two.schema.block_bytes == BLOCK // 2
    # Four workers, two heads: each holds one all the same.
    assert size(model(), tensor_parallel=4, kv_blocks=16).schema.num_kv_heads == 1


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [("float32", "auto", "float32"), ("float16", "auto", "bfloat16"), ("bfloat16", "auto", "bfloat16"),
     (None, "auto", "bfloat16"), ("bfloat16", "float32", "float32")],
)  # fmt: skip
def test_dtypes(model, memory, stored, asked, expected):
    sizes = size(model(dtype=stored), dtype=asked)
    assert sizes.dtype == sizes.schema.dtype == expected
    assert size(model(dtype=None, torch_dtype=stored), dtype=asked).dtype == expected


def test_shapes_of_configurations(model, memory):
    assert size(model(head_dim=64)).schema.head_dim == 64
    assert size(model(num_key_value_heads=None)).schema.num_kv_heads == 8
    nested = model()
    (nested / "config.json").write_text(json.dumps({"text_config": SHAPE}))
    assert size(nested).schema.num_layers == 4


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"context_length": 2048}, "context_length 2048 exceeds the 1024 tokens"),
        ({}, {"dtype": "float16"}, "dtype float16 is not available on the CPU device"),
        ({}, {"tensor_parallel": 3}, "tensor_parallel 3 .* 8 attention heads and 2 heads .* Possible are 1, 2, 4, 8"),
        ({}, {"tensor_parallel": 16}, "Possible are 1, 2, 4, 8"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, {"tensor_parallel": 6}, "Possible are 1, 2, 4, 12"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, {"tensor_parallel": 4}, "Possible are 1, 2, 3, 6, 12"),
        ({"num_hidden_layers": None}, {}, "config.json has no num_hidden_layers"),
        ({"num_attention_heads": None}, {}, "config.json has no num_attention_heads"),
    ],
)
def test_what_cannot_work(model, memory, change, config, message):
    with pytest.raises(ConfigError, match=message):
        size(model(**change), **config)


def test_other_devices_size_themselves(model):
    sizes = size_engine(SageConfig(kv_blocks=99), model(), "cuda")
    assert (sizes.num_blocks, sizes.max_batch_size, sizes.dtype) == (99, None, "auto")
    assert size_engine(SageConfig(), model(), "cuda").num_blocks == 0


def test_weights_and_activations_in_int8_need_float16_on_a_gpu(model):
    folder = model(quantization_config={"quant_method": "smooth_quant", "quant_dtype": "int8"})
    assert size_engine(SageConfig(kv_blocks=99), folder, "cuda").dtype == "float16"
    with pytest.raises(ConfigError, match="dtype is bfloat16; LMDeploy computes int8 weights .* in float16 on cuda"):
        size_engine(SageConfig(kv_blocks=99, dtype="bfloat16"), folder, "cuda")


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no config.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'config.json'} cannot be read")):
        read_hf_config(tmp_path)


def test_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (resolve_device("auto"), resolve_device("cpu")) == ("cpu", "cpu")
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        resolve_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_device("auto") == "cuda"
