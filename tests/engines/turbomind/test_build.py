"""Tests of the messages on a machine that has TurboMind in part: each part that may be missing, and the next step."""

import sys
from pathlib import Path

import pytest

from sagellm._core import HOOKS_ABI, HookTable
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError
from sagellm.engines.lmdeploy import turbomind_build
from sagellm.engines.lmdeploy.sizing import size_engine
from sagellm.engines.lmdeploy.turbomind_build import install, probe
from sagellm.engines.lmdeploy.turbomind_config import build_turbomind_config, check_settings
from tests.engines.turbomind import abi

PATCHED = """
installed = []
def sage_query():
    return {"abi": %d}
def sage_install(capsule):
    installed.append(capsule)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(source)`: LMDeploy with this text as its compiled engine, or with none."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(turbomind_build, "default_target", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "_turbomind", raising=False)

    def build(source: str | None) -> None:
        (tmp_path / "lib").mkdir()
        if source is not None:
            (tmp_path / "lib/_turbomind.py").write_text(source)

    yield build
    sys.modules.pop("_turbomind", None)


def test_no_compiled_engine(machine):
    machine(None)
    found = probe()
    assert found.state == "absent" and "has no compiled TurboMind" in found.text
    assert "git submodule update --init third_party/lmdeploy" in found.next_step and "./apply_patches.sh" in found.next_step
    with pytest.raises(EngineError, match="no compiled TurboMind.* Build LMDeploy from the patched submodule"):
        found.require()


@pytest.mark.parametrize(("body", "step"), [("", "Build LMDeploy"), ("# sage_install\n", "apply_patches.sh --cuda")])
def test_a_library_is_missing(machine, body, step):
    machine(body + "raise ImportError('libcublas.so.12: cannot open shared object file: No such file or directory')")
    found = probe()
    assert found.state == "not loadable" and "it needs libcublas.so.12, which is not on this machine" in found.text
    assert ("built without the hook table" in found.text) == (body == "") and step in found.next_step


def test_an_engine_without_the_table(machine):
    machine("")
    found = probe()
    assert found.state == "without hooks" and "was built without the hook table" in found.text
    assert "patched submodule" in found.next_step


def test_a_table_of_another_version(machine):
    machine(PATCHED % (HOOKS_ABI + 1))
    found = probe()
    assert found.state == "refused" and f"version {HOOKS_ABI + 1} of the hook table" in found.text


@pytest.mark.parametrize(("has_gpu", "state"), [(False, "no gpu"), (True, "ready")])
def test_with_the_table(machine, monkeypatch, has_gpu, state):
    import torch

    machine(PATCHED % HOOKS_ABI)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found = probe()
    assert found.state == state and found.is_ready is has_gpu
    table = HookTable()
    install(table)
    (capsule,) = sys.modules["_turbomind"].installed
    assert '"sage.hooks.v1"' in repr(capsule) and abi.hooks_of(table).abi == HOOKS_ABI


def test_an_engine_that_refuses(machine):
    machine(PATCHED % HOOKS_ABI + "def sage_install(capsule): raise ValueError('the table has 8 bytes; 136 are needed')")
    probe()
    with pytest.raises(EngineError, match="refuses the hook table: the table has 8 bytes"):
        install(HookTable())


def test_the_installed_wheel_says_what_is_wrong():
    found = probe()
    assert not found.is_ready and "TurboMind" in found.text and found.next_step
    assert Path(turbomind_build.default_target()).name in found.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(device="cpu"), "device cpu: TurboMind runs on cuda"),
        (dict(dtype="float32"), "float16 or bfloat16"),
        (dict(host_kv_blocks=4), "host_kv_blocks 4"),
        (dict(threads=2), "threads 2"),
        (dict(decode_round=4), "decode_round 4"),
        (dict(speculative="ngram"), "speculative ngram: guesses are checked in steps of the PyTorch engine alone"),
        (dict(block_size=16), "block_size 16"),
    ],
)
def test_settings_that_turbomind_does_not_have(settings, words):
    check_settings(SageConfig())
    with pytest.raises(ConfigError, match=words):
        check_settings(SageConfig(**settings))


def test_the_configuration_that_lmdeploy_gets(model_folder):
    config = SageConfig(
        engine="turbomind", dtype="bfloat16", tensor_parallel=2, context_length=512, max_batch_size=8, kv_blocks=32,
        max_prefill_tokens=256, block_size=128,
    )  # fmt: skip
    built = build_turbomind_config(config, size_engine(config, model_folder("llama"), "cuda"))
    assert (built.dtype, built.tp, built.session_len, built.max_batch_size) == ("bfloat16", 2, 512, 8)
    assert (built.cache_max_entry_count, built.cache_block_seq_len, built.enable_prefix_caching) == (32, 128, True)
    assert built.max_prefill_token_num == 256
    share = SageConfig(dtype="bfloat16", kv_memory_share=0.5, prefix_caching=False)
    built = build_turbomind_config(share, size_engine(share, model_folder("llama"), "cuda"))
    assert (built.cache_max_entry_count, built.enable_prefix_caching) == (0.5, False)
