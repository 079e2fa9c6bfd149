"""Tests of what the server does differently for TurboMind, up to the point where a GPU would be needed."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError
from sagellm.engines.lmdeploy import turbomind_build
from sagellm.engines.lmdeploy.sizing import size_engine
from sagellm.engines.lmdeploy.turbomind_build import Probe
from sagellm.serve import backends
from sagellm.serve.backends import PytorchBackend, TurboMindBackend, backend_of
from sagellm.serve.metrics import TurboMindCollector
from sagellm.serve.prompts import Prompts
from tests.engines.turbomind.played import PlayedRank

PLUGINS = "tests.engines.turbomind.plugins"
PD = {"role": "decode", "proxy_url": "http://127.0.0.1:1", "key_file": "key"}


@pytest.fixture
def able(monkeypatch):
    """A machine whose TurboMind has the hook table; returns what is installed in it."""
    installed = []
    engine, known = ModuleType("_turbomind"), ModuleType("lmdeploy.turbomind.supported_models")
    engine.sage_install = installed.append
    known.is_supported = lambda model: "unknown" not in model
    monkeypatch.setitem(sys.modules, "_turbomind", engine)
    monkeypatch.setitem(sys.modules, "lmdeploy.turbomind", ModuleType("lmdeploy.turbomind"))
    monkeypatch.setitem(sys.modules, "lmdeploy.turbomind.supported_models", known)
    monkeypatch.setattr(turbomind_build, "probe", lambda: Probe("ready", "all is there"))
    monkeypatch.setattr(backends, "resolve_device", lambda device: device)
    return installed


def config(**values):
    return SageConfig(**{"engine": "turbomind", "dtype": "bfloat16", "block_size": 64} | values)


def test_the_engine_that_was_asked_for():
    assert isinstance(backend_of(SageConfig()), PytorchBackend)
    assert isinstance(backend_of(config()), TurboMindBackend)


def test_a_machine_without_it_is_told_before_anything_else(monkeypatch):
    monkeypatch.setattr(turbomind_build, "probe", lambda: Probe("absent", "there is none", "Build it"))
    with pytest.raises(EngineError, match=r"^there is none\. Build it\.$"):
        TurboMindBackend(config(device="cpu", plugins=["nobody"])).require()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(device="cpu"), "device cpu: TurboMind runs on cuda"),
        (dict(plugins=[f"{PLUGINS}:LooksUp"]), "LooksUp has lookup_prefix"),
        (dict(plugins=[f"{PLUGINS}:HearsReleases"]), "HearsReleases has on_prefix_released: TurboMind does not tell"),
        (dict(pd=PD), "role decode: its blocks cannot be read by others"),
        (dict(pd={"key_file": "key"}), "pd_key_file key: TurboMind does not tell which prefixes it has cached"),
        (dict(kv={}), "kv lru: TurboMind does not tell when a request lets go"),
    ],
)
def test_settings_are_refused(able, values, words):
    assert TurboMindBackend(config()).require() == "cuda"
    with pytest.raises(ConfigError, match=words):
        TurboMindBackend(config(**values)).require()
    assert able == []


def test_the_table_is_installed_before_the_engine_is_made(able, model_folder):
    wanted = config(plugins=[f"{PLUGINS}:Schedules"], tensor_parallel=2)
    backend, model = TurboMindBackend(wanted), model_folder("llama")
    sizes = size_engine(wanted, model, "cuda")
    built = backend.engine_config(model, sizes, "cuda", Path("unused"))
    try:
        assert built.tp == 2 and built.cache_block_seq_len == 64
        (capsule,) = able
        assert "sage.hooks.v1" in repr(capsule)
        rank = PlayedRank(backend._hooks.table)
        assert rank.schedule([{"seq_id": 1, "priority": 3}]) == ([3], 64)
        assert backend._hooks._config.block_bytes == sizes.schema.block_bytes > 0
        told = metrics_of(backend, total_blocks=10, active_blocks=3, free_blocks=5)
        assert told["sagellm_kv_blocks", "cached"] == 2 and told["sagellm_kv_blocks", "active"] == 3
        assert told["sagellm_plugin_enabled", f"{PLUGINS}:Schedules"] == 1
        assert told["sagellm_hook_table_calls_total", "divergences"] == 0
        assert told["sagellm_plugin_notices_total", "lost"] == 0
        rank.request(1, range(500, 532))
        rank.request(2, range(600, 632))
        told = metrics_of(backend, total_blocks=10, active_blocks=3, free_blocks=5)
        assert told["sagellm_evicted_blocks_total", "prefix"] == sum(map(len, rank.victims)) > 0
        assert ("sagellm_prefix_tokens_total", "first", "hit") in told
        assert not any(name.startswith(("sagellm_preemptions", "sagellm_migrated")) for name, *_ in told)
    finally:
        backend.close()
    assert rank.schedule([{"seq_id": 1, "priority": 3}]) is None, "an engine that goes on is answered at once"


def metrics_of(backend, **counts):
    engine = SimpleNamespace(get_schedule_metrics=lambda: SimpleNamespace(**counts))
    families = TurboMindCollector(engine, backend._hooks).collect()
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value for sample in samples}


def test_a_model_that_turbomind_does_not_know(able, model_folder, tmp_path):
    folder = tmp_path / "unknown"
    folder.symlink_to(model_folder("llama"))
    with pytest.raises(ConfigError, match="does not know the architecture"):
        TurboMindBackend(config()).engine_config(folder, size_engine(config(), folder, "cuda"), "cuda", Path("unused"))
    assert able == []


def test_limits_of_a_prompt_come_from_turbominds_own_configuration():
    vocabulary = SimpleNamespace(model=SimpleNamespace(model=SimpleNamespace(get_vocab=lambda: {"ab": 0, "abcd": 1})))
    engine = SimpleNamespace(
        backend="turbomind", session_len=512, tokenizer=vocabulary,
        engine=SimpleNamespace(config=SimpleNamespace(vocab_size=321)),
    )  # fmt: skip
    prompts = Prompts(engine)
    assert (prompts.vocab_size, prompts.context, prompts._most_chars) == (321, 512, 2048)
