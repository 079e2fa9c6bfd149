"""The flags of the KV tiers: into the configuration, and refused where they cannot be."""

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sagellm.core.config import KVConfig, SageConfig, read_config
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.kv_tiers import check_tier_settings
from sagellm.serve.command import serve
from sagellm.serve.metrics import families
from sagellm.serve.objects import PART_OF, with_objects


def test_flags_become_one_value(tmp_path):
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("team-a: {gpu: 0.5}\n")
    given = with_objects(
        {
            "port": 1, "host_kv_blocks": 8, "kv_policy": "s3fifo", "kv_policy_options": '{"small_ratio": 0.2}',
            "kv_cpu_policy": "arc", "kv_disk": tmp_path, "kv_disk_gib": 0.5, "kv_migration": "always", "kv_deadline": 0.2,
            "kv_quotas": str(quotas),
        }
    )  # fmt: skip
    assert set(given) == {"port", "host_kv_blocks", "kv"}
    kv = read_config(None, given).kv
    assert (kv.policy, kv.policy_options, kv.cpu_policy) == ("s3fifo", {"small_ratio": 0.2}, "arc")
    assert (kv.disk, kv.disk_gib, kv.migration, kv.deadline_s) == (tmp_path, 0.5, "always", 0.2)
    assert kv.quotas == {"team-a": {"gpu": 0.5}}
    assert with_objects({"kv_quotas": json.dumps({"b": {"cpu": 3}})})["kv"]["quotas"] == {"b": {"cpu": 3}}
    assert with_objects({"port": 1}) == {"port": 1}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_policy_options": "small"}, "--kv-policy-options 'small' is not JSON"),
        ({"kv_disk_options": "small"}, "--kv-disk-options 'small' is not JSON"),
        ({"kv_quotas": "{oops"}, "--kv-quotas '{oops' is not JSON"),
        ({"kv_quotas": "/no/such/file"}, "cannot read --kv-quotas /no/such/file: No such file"),
    ],
)
def test_flags_that_cannot_be_read(flags, message):
    with pytest.raises(ConfigError, match=message):
        with_objects(flags)


def test_what_plugins_report_is_among_the_metrics():
    blocks = dict(free=1, cached=2, active=3, total=6, host_total=4, host_used=1)
    lookups = dict.fromkeys(("query_tokens", "hit_tokens", "query_blocks", "hit_blocks"), 0)
    report = {
        "blocks": blocks, "evicted": {}, "prefix": lookups, "comm": [], "enabled": {}, "calls": [], "faults": [],
        "plugins": {"tiers": {"blocks": {"gpu": 5.0}, "moves": {"gpu-cpu": {"moved": 3.0}}, "share": 0.5}},
    }  # fmt: skip

    class Collector:
        def collect(self):
            return families(report)

    registry = CollectorRegistry()
    registry.register(Collector())
    text = generate_latest(registry).decode()
    assert "# TYPE sagellm_plugin_value untyped" in text  # sums and states alike
    assert 'sagellm_plugin_value{key="gpu",kind="blocks",plugin="tiers"} 5.0' in text
    assert 'sagellm_plugin_value{key="gpu-cpu/moved",kind="moves",plugin="tiers"} 3.0' in text
    assert 'sagellm_plugin_value{key="",kind="share",plugin="tiers"} 0.5' in text


def generate(server, first, length=50):
    ids = [first + i % 100 for i in range(length)]
    answer = server.post("/generate", {"input_ids": ids, "max_tokens": 4, "ignore_eos": True, "temperature": 0})
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


@pytest.mark.slow
def test_tiers_of_a_server_that_is_started_again(launch, tmp_path):
    """More prompts than the pool holds go down to files; the next server finds them there, and a second one may not."""
    pytest.importorskip("sagellm.kv_runtime.plugin", reason="the tiers' plug-in is not built")
    options = ["--kv-policy", "s3fifo", "--kv-blocks", 16, "--host-kv-blocks", 8, "--context-length", 200]
    options += ["--kv-disk", tmp_path / "tier", "--kv-migration", "always", "--kv-deadline", 5]
    answers, loaded = [], []
    for _ in range(2):
        server = launch(*options).ready()
        answers.append([generate(server, first) for first in range(5, 105, 10)])
        server.wait_idle()
        assert server.metric("sagellm_plugin_value", kind="victims") > 0
        for tier in ("gpu", "cpu", "nvme"):
            exchanged = server.post("/sagellm/policy", {"policy": "arc", "tier": tier})
            assert exchanged.json() == {"tier": tier, "policy": "arc", "former": "s3fifo" if tier == "gpu" else "lru"}
        assert generate(server, 5) == answers[-1][0]
        assert server.metric("sagellm_plugin_faults_total") == 0
        loaded.append(server.metric("sagellm_plugin_value", kind="moves", key="nvme_cpu/moved"))
        if len(loaded) == 1:
            refused = launch(*options)
            refused.end(None, code=2)
            assert "in use by process" in refused.stderr and "Traceback" not in refused.stderr
        server.end()
    assert answers[0] == answers[1]
    assert loaded[1] > 0, "nothing of the first server was found by the second"


def test_quotas_of_a_tier_that_is_not_there_are_refused():
    with pytest.raises(ConfigError, match="team-a.*no tier cpu"):
        check_tier_settings(SageConfig(kv=KVConfig(quotas={"": {"gpu": 0.5}, "team-a": {"cpu": 3}})))
    check_tier_settings(SageConfig(kv=KVConfig(quotas={"": {"gpu": 0.5}, "team-a": {"gpu": 3}})))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"kv": KVConfig(migration="always")}, "kv.migration always"),
        ({"kv": KVConfig(deadline_s=2), "host_kv_blocks": 4}, "kv.deadline_s 2.0"),
    ],
)
def test_settings_of_tiers_that_are_not_there_are_refused(values, word):
    with pytest.raises(ConfigError, match=word):
        check_tier_settings(SageConfig(**values))


def test_every_part_has_a_flag_and_no_folder_is_not_the_current_one():
    flags = {option.name for option in serve.params}
    assert set(PART_OF) <= flags and set(PART_OF.values()) == set(KVConfig.model_fields)
    with pytest.raises(ConfigError, match="kv.disk: .*name a folder"):
        read_config(None, with_objects({"kv_disk": ""}))
