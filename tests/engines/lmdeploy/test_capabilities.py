"""Tests that the engine reports the capabilities that this machine lets it have."""

import json

import pytest
import torch
from click.testing import CliRunner

from sagellm.cli import main
from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.capabilities import pytorch_capabilities
from sagellm.engines.lmdeploy.sizing import size_engine


def test_the_cpu_device_takes_the_dtypes_it_names_and_no_other(model_folder):
    found = pytorch_capabilities("cpu")
    folder = model_folder("llama")
    for name in found.dtypes:
        assert size_engine(SageConfig(dtype=name), folder, "cpu").dtype == name
    with pytest.raises(ConfigError, match="float16 is not available"):
        size_engine(SageConfig(dtype="float16"), folder, "cpu")
    assert "float16" not in found.dtypes and "float16" in found.missing
    assert found.quantization == ("awq", "smooth_quant", "fp8", "gptq")
    assert found.kv_tiers == ("gpu", "cpu", "nvme") and "eagle" not in found.speculation
    assert {"ngram", "draft"} <= set(found.speculation) and found.roles == ("prefill", "decode", "hybrid")


def test_what_the_machine_lacks_is_missing_with_a_reason(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    for name in channel_names():
        monkeypatch.setattr(find_channel(name), "missing", staticmethod(lambda: "broken"))
    found = pytorch_capabilities("cpu")
    assert not found.tensor_parallel and "no gloo" in found.missing["tensor parallel"]
    assert found.roles == () and "no KV channel" in found.missing["roles"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default device is the GPU")
def test_doctor_says_it():
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)["checks"]}
    assert "dtypes: float32, bfloat16; tensor parallel: yes" in rows["pytorch on cpu"]["text"]
    assert "float16: the CPU device" in rows["missing on cpu"]["text"]
