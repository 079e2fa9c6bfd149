"""Kinds whose start takes minutes of a core: a prefill/decode group, and vLLM's own server."""

import os

import pytest

from sagellm.control_plane.contract import ENGINE_SUITE
from sagellm.control_plane.registry import make_engine

pytestmark = pytest.mark.slow
VLLM = os.environ.get("SAGELLM_VLLM")


def faults(kind, **options):
    report = ENGINE_SUITE.check(lambda: make_engine(kind, **options))
    return [result for result in report.results if not result.passed]


def test_a_group_keeps_to_the_contract(model_folder):
    flags = ["--device", "cpu", "--threads", "1", "--kv-blocks", "64", "--block-size", "16"]
    assert not faults("group", model=str(model_folder("llama")), flags=flags)


def test_our_server_keeps_to_the_contract(model_folder):
    assert not faults("sagellm", model=str(model_folder("llama")), device="cpu", threads=1, kv_blocks=64)


@pytest.mark.skipif(VLLM is None, reason="SAGELLM_VLLM does not name the command or the interpreter of vLLM")
@pytest.mark.filterwarnings("default")
def test_vllm_keeps_to_the_contract(tmp_path):
    from sagellm.demo_model.random_model import write_random_model

    folder = tmp_path / "model"
    write_random_model(folder, architecture="llama", hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
                       intermediate_size=256, vocab_size=320)  # fmt: skip
    flags = ["--max-model-len", "256", "--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
    assert not faults("vllm", model=str(folder), executable=VLLM, model_name="tiny", flags=flags)
