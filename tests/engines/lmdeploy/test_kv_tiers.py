"""From `SageConfig.kv` to a plug-in in the engine, and what is refused before a model is loaded."""

import json
import sys
from types import ModuleType

import pytest

from sagellm.core.config import KVConfig, PluginSpec, SageConfig
from sagellm.core.errors import ConfigError, PolicyError, TierError
from sagellm.core.hooks import Plugin
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy import kv_tiers
from sagellm.engines.lmdeploy.kv_tiers import all_plugins, check_tiers, layout_of
from sagellm.engines.lmdeploy.sizing import size_engine
from sagellm.engines.lmdeploy.turbomind_config import check_settings
from tests.plugins import plugin_of
from tests.reference import make_prompts

POLICIES = ("lru", "fifo")


class StandIn(Plugin):
    """Takes what `TieredKV` takes, and counts."""

    def __init__(self, **options):
        self.config = KVConfig(**options)
        self.stored = 0

    def attach(self, engine):
        self.engine = engine

    def on_prefix_stored(self, update):
        self.stored += len(update.block_ids)
        self.engine.record("kv_stored", request=update.request_id, blocks=update.block_ids, n=7)

    def report(self):
        return {"blocks": {"gpu": self.stored, "cpu": 0}, "evictions": {"lru": {"oldest leaf": 2}}, "text": "left out"}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Policies by name, in place of the real registry: what is asked of it is what counts here."""

    def make(name, *capacity, **options):
        if name not in (*POLICIES, "cost", "always"):
            raise PolicyError(f"unknown policy {name!r}; known are: {', '.join(POLICIES)}.")
        if options:
            raise PolicyError(f"policy {name} has no options {sorted(options)}.")

    module = ModuleType("sagellm.kv_policy.registry")
    module.make_policy = module.make_migration_policy = make
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def folders(monkeypatch):
    """Folders that were locked to try them."""
    tried = []

    class LockedFolder:
        def __init__(self, path):
            if path.name == "busy":
                raise TierError(f"disk tier {path} is in use by process 7")
            tried.append(path)

        def close(self):
            pass

    module = ModuleType("sagellm.kv_runtime.disk_store_folder")
    module.LockedFolder = LockedFolder
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return tried


def config(**values):
    return SageConfig(**values)


def test_the_tiers_become_a_plugin(tmp_path):
    mine = PluginSpec(name="mine:Policy")
    assert all_plugins(config(plugins=[mine])) == (mine,)
    first, second = all_plugins(config(plugins=[mine], kv={"policy": "fifo"}))
    assert (first, second.name) == (mine, "sagellm.kv_runtime.plugin:TieredKV")
    assert KVConfig(**second.options) == KVConfig(policy="fifo")
    (with_disk,) = all_plugins(config(kv={"disk": tmp_path, "quotas": {"a": {"gpu": 0.5}}}))
    assert with_disk.name.endswith(":TieredKVWithDisk")
    assert json.loads(json.dumps(with_disk.options))["disk"] == str(tmp_path)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"kv": {"policy": "lruu"}}, PolicyError, "unknown policy 'lruu'; known are: lru, fifo"),
        ({"kv": {"policy_options": {"x": 1}}}, PolicyError, "has no options"),
        ({"kv": {"cpu_policy": "lruu"}, "host_kv_blocks": 4}, PolicyError, "lruu"),
        ({"kv": {"migration": "sometimes"}}, PolicyError, "sometimes"),
        ({"kv": {}, "prefix_caching": False}, ConfigError, "prefix_caching is off; switch it on"),
        ({"kv": {"cpu_policy": "fifo"}}, ConfigError, "kv.cpu_policy fifo: there is no host tier; give --host-kv-blocks"),
        ({"kv": {"disk_gib": 2}, "host_kv_blocks": 4}, ConfigError, "kv.disk_gib 2.0: there is no disk tier; give --kv-disk"),
        ({"kv": {"disk": "d"}}, ConfigError, "host_kv_blocks is 0; give --host-kv-blocks"),
        ({"kv": {"disk": "d"}, "host_kv_blocks": 4, "tensor_parallel": 2}, ConfigError, "use --tensor-parallel 1"),
        ({"kv": {"disk": "busy"}, "host_kv_blocks": 4}, TierError, "in use by process 7"),
        ({"kv": {"disk": "d", "disk_policy": "lruu"}, "host_kv_blocks": 4}, PolicyError, "lruu"),
    ],
)
def test_what_cannot_be_is_refused(folders, values, error, message):
    with pytest.raises(error, match=message):
        check_tiers(config(**values))


def test_a_disk_folder_is_tried_and_given_back(folders, tmp_path):
    check_tiers(config(kv={"disk": tmp_path}, host_kv_blocks=4))
    assert folders == [tmp_path]


def test_turbomind_has_no_tiers():
    with pytest.raises(ConfigError, match="kv lru: TurboMind does not tell when a request lets go"):
        check_settings(config(engine="turbomind", kv={}))


def test_a_layout_is_of_one_model(model_folder, tmp_path):
    def layout(name, **values):
        settings = SageConfig(block_size=16, kv_blocks=16, **values)
        return layout_of(model_folder(name), settings, size_engine(settings, model_folder(name), "cpu"))

    assert layout("llama") == layout("llama")
    assert len({layout("llama"), layout("qwen2"), layout("llama-bf16")}) == 3
    assert layout("llama") != layout("llama", dtype="bfloat16")


def test_in_the_engine(start_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(kv_tiers, "TIERED", "tests.engines.lmdeploy.test_kv_tiers:StandIn")
    record = tmp_path / "events.jsonl"
    engine = start_engine(kv={"policy": "fifo"}, record=record)
    engine.generate(make_prompts((40,)), SamplingParams(max_new_tokens=4, ignore_eos=True))
    plugin = plugin_of(engine)
    assert plugin.config.policy == "fifo" and plugin.engine.layout and plugin.engine.num_lost_notices == 0
    engine.hooks._host.flush()
    reports = engine.hooks.report()["plugins"]
    assert list(reports.values()) == [{"blocks": {"gpu": 2.0, "cpu": 0.0}, "evictions": {"lru": {"oldest leaf": 2.0}}}]
    engine.close()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["n"] for line in lines] == list(range(len(lines))), "a plug-in cannot number lines"
    header = lines[0]
    assert header["event"] == "open" and header["format"] == 2 and header["layout"] == plugin.engine.layout
    assert (header["block_size"], header["block_bytes"]) == (16, plugin.engine.block_bytes)
    assert header["plugins"][0]["options"]["policy"] == "fifo" and header["model"] == "llama"
    assert "kv_stored" in [line["event"] for line in lines]
    (end,) = [line for line in lines if line["event"] == "end"]
    assert (end["generated"], end["reason"]) == (4, "length")
    (arrived,) = [line for line in lines if line["event"] == "arrive"]
    assert (arrived["tokens"], arrived["max_new"]) == (40, 4)
