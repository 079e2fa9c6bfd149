"""Configuration from a file and from values that go before it; what is wrong is named, with what is allowed."""

import re

import pytest
from pydantic import ValidationError

from sagellm.core.config import HookConfig, PDHooks, PluginSpec, SageConfig, read_config
from sagellm.core.errors import ConfigError

BAD_URLS = ("", "host:80", "ftp://a:1", "http://", "http://a:0", "http://a:x", "http://a:1/path", "http://a:1?b")


def write(tmp_path, text):
    file = tmp_path / "sage.yaml"
    file.write_text(text)
    return file


def test_values_go_before_the_file(tmp_path):
    file = write(tmp_path, "kv_blocks: 64\nport: 8000\nplugins: [lru, {name: 'a:B', options: {size: 3}}]\n")
    config = read_config(file, {"port": 9000})
    assert (config.kv_blocks, config.port) == (64, 9000)
    assert config.plugins == (PluginSpec(name="lru"), PluginSpec(name="a:B", options={"size": 3}))
    assert read_config(None, {}) == read_config(write(tmp_path, ""), {}) == SageConfig()


def test_one_plugin_or_key_needs_no_list():
    assert SageConfig(plugins="lru", api_key="secret") == SageConfig(plugins=["lru"], api_key=["secret"])
    assert SageConfig(plugins={"name": "lru"}).plugins == (PluginSpec(name="lru"),)


def test_an_unknown_key_names_the_known_ones(tmp_path):
    file = write(tmp_path, "kv_block: 64\n")
    with pytest.raises(ConfigError) as caught:
        read_config(file, {})
    message = str(caught.value)
    assert message.startswith(f"in {file}: kv_block: unknown key; known are ")
    assert all(name in message for name in SageConfig.model_fields)


GROUP = {"role": "decode", "proxy_url": "http://a:1", "key_file": "key"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 0}, "port: .*greater than or equal to 1, got 0"),
        ({"port": "many"}, "port: .*integer.*got 'many'"),
        ({"kv_blocks": 15}, "kv_blocks: .*greater than or equal to 16, got 15"),
        ({"kv_memory_share": 1.0}, "kv_memory_share: .*less than 1, got 1.0"),
        ({"block_size": 48}, "block_size: .*48 is not a power of two"),
        ({"block_size": 8}, "block_size: .*greater than or equal to 16"),
        ({"device": "tpu"}, "device: .*unknown device 'tpu'; known are auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype: .*'bfloat16', got 'int8'"),
        ({"max_prefill_tokens": -1}, "max_prefill_tokens"),
        ({"plugin_time_limit_s": 0}, "plugin_time_limit_s: .*greater than 0"),
        ({"plugin_time_limit_s": float("inf")}, "plugin_time_limit_s: .*finite number"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s: .*finite number"),
        ({"kv_memory_share": float("nan")}, "kv_memory_share: .*finite number"),
        ({"host": ""}, "host: .*at least 1 character"),
        ({"api_key": ""}, "api_key: .*a key is one or more ASCII"),
        ({"api_key": ["good", "schlüssel"]}, "api_key: .*a key is one or more ASCII"),
        ({"api_key": "key "}, "api_key: .*without blanks"),
        ({"plugins": 7}, "plugins"),
        ({"plugins": [{"name": "a", "options": {1: 2}}]}, "plugins.0.options.1"),
        ({"plugins": [{"name": "a", 1: 2}]}, "plugins.0.1"),
        ({"plugins": [{"name": "a", "colour": 1}]}, "plugins.0.colour: unknown key"),
        ({"pd": {}}, "^there are settings of a prefill/decode group, and no role; give --role prefill, decode or hybrid.$"),
        ({"pd": {"role": "decode"}}, "^role decode needs the proxy of its group; give --proxy-url http://host:port.$"),
        ({"pd": {"role": "decode", "proxy_url": "http://a:1"}}, "^role decode needs the key .* give --pd-key-file FILE.$"),
        ({"pd": {"role": "boss"}}, "pd.role: .*'prefill', 'decode' or 'hybrid', got 'boss'"),
        ({"pd": {"rule": "decode"}}, "pd.rule: unknown key; known are channel, .*role"),
        ({"pd": {"lease_s": 0}}, "pd.lease_s: .*greater than 0"),
        *(({"pd": {"proxy_url": url}}, "pd.proxy_url: .*give http://host:port") for url in BAD_URLS),
        ({"sot_workers": 65}, "sot_workers: .*less than or equal to 64, got 65"),
        ({"sot_workers": 1, "engine": "turbomind"}, "sot_workers needs the engine pytorch"),
        ({"sot_workers": 1, "pd": GROUP}, "sot_workers and settings of a prefill/decode group exclude each other"),
        ({"kv_blocks": 64, "kv_memory_share": 0.5}, "kv_blocks and kv_memory_share both size the KV pool"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ConfigError, match=message):
        read_config(None, values)


def test_every_mistake_has_a_line():
    with pytest.raises(ConfigError) as caught:
        read_config(None, {"port": 0, "dtype": "int8", "colour": 1})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: 2", "the key 1 is a int; keys are names"),
        ("a: [", "is not YAML"),
        ("- 1\n- 2\n", "holds a list; a configuration is a mapping"),
        ("7", "holds a int"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(str(file)) + ".*" + message):
        read_config(file, {})


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_files_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read .*: "):
        read_config(tmp_path / name, {})


def test_a_file_that_is_no_text(tmp_path):
    file = tmp_path / "sage.yaml"
    file.write_bytes(b"\xff\xfe\x00kv")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_config(file, {})


def test_configurations_are_frozen_and_travel_as_json(tmp_path):
    config = SageConfig()
    with pytest.raises(ValidationError):
        config.port = 1
    hooks = HookConfig(
        plugins=(PluginSpec(name="a:B", options={"n": [1, float("inf")]}),), record=tmp_path / "r", run_dir=tmp_path
    )
    assert HookConfig.model_validate_json(hooks.model_dump_json()) == hooks


def test_parts_of_the_tiers_go_before_those_of_the_file(tmp_path):
    file = write(tmp_path, "kv: {policy: arc, cpu_policy: lfu, quotas: {a: {gpu: 0.5, cpu: 10}}}\n")
    kv = read_config(file, {"kv": {"policy": "sieve", "disk": "/d"}}).kv
    assert (kv.policy, kv.cpu_policy, str(kv.disk), kv.quotas) == ("sieve", "lfu", "/d", {"a": {"gpu": 0.5, "cpu": 10}})
    assert read_config(file, {}).kv.policy == "arc" and read_config(None, {}).kv is None
    with pytest.raises(ConfigError, match="kv.polcy: unknown key; known are .*policy_options"):
        read_config(None, {"kv": {"polcy": "lru"}})
    with pytest.raises(ConfigError, match="kv.disk_gib: .*greater than 0"):
        read_config(None, {"kv": {"disk_gib": 0}})


def test_parts_of_a_group_go_before_those_of_the_file(tmp_path):
    file = write(tmp_path, "pd: {role: prefill, proxy_url: 'http://a:1/', key_file: key, timeout_s: 3}\n")
    pd = read_config(file, {"pd": {"role": "decode", "channel": "tcp"}}).pd
    assert (pd.role, pd.proxy_url, str(pd.key_file), pd.timeout_s, pd.channel) == ("decode", "http://a:1", "key", 3, "tcp")
    assert read_config(None, {}).pd is None
    hooks = HookConfig(pd=PDHooks(role="decode", engine_id="http://a:2", key_file="/key", channel="tcp"))
    assert HookConfig.model_validate_json(hooks.model_dump_json()) == hooks


@pytest.mark.parametrize("value", [True, "5", None])
def test_quotas_are_numbers_and_nothing_that_looks_like_one(value):
    with pytest.raises(ConfigError, match="quotas"):
        read_config(None, {"kv": {"quotas": {"a": {"gpu": value}}}})


def test_speculation_as_one_object():
    config = read_config(None, {"speculative_config": {"model": "small", "num_speculative_tokens": 3}})
    assert (config.speculative, config.speculative_options) == ("draft", {"model": "small", "lookahead": 3})
    config = SageConfig(speculative_config={"method": "eagle3", "model": "head", "num_speculative_tokens": 3})
    assert config.speculative_options == {"model": "head", "num_speculative_tokens": 3}
    assert SageConfig(speculative_config={"method": "suffix"}).speculative == "suffix"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"speculative_config": {"draft_tensor_parallel_size": 2}}, "one of the target's workers holds the whole draft model"),
        ({"speculative_config": {"modle": "small"}}, "modle Extra inputs are not permitted; known are method, model"),
        ({"speculative_config": 3}, "valid dictionary"),
        ({"speculative_config": {}, "speculative": "ngram"}, "give one of them"),
    ],
)
def test_speculation_that_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        read_config(None, values)
