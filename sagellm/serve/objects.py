"""Flags whose values are objects, and those of the KV tiers and of prefill/decode groups, as the configuration has them: one
value with parts."""

import json
from pathlib import Path
from typing import Any

from sagellm.core.errors import ConfigError

PART_OF = {  # flag -> field of `KVConfig`
    "kv_policy": "policy", "kv_policy_options": "policy_options", "kv_cpu_policy": "cpu_policy",
    "kv_cpu_options": "cpu_options", "kv_disk": "disk", "kv_disk_gib": "disk_gib", "kv_disk_policy": "disk_policy",
    "kv_disk_options": "disk_options", "kv_migration": "migration", "kv_deadline": "deadline_s", "kv_quotas": "quotas",
}  # fmt: skip

PD_PART_OF = {  # flag -> field of `PDConfig`
    "role": "role", "proxy_url": "proxy_url", "pd_key_file": "key_file", "kv_channel": "channel",
    "kv_channel_options": "channel_options", "kv_checksums": "checksums", "pd_timeout_s": "timeout_s", "pd_lease_s": "lease_s",
    "pd_port": "port", "pd_trust_proxy": "trust_proxy",
}  # fmt: skip


def with_objects(given: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given: objects read from their JSON, those of the tiers as `kv`, those of groups as `pd`.

    Raises:
        ConfigError: a value that is no JSON, or a file that cannot be read.
    """
    kv = {part: given[flag] for flag, part in PART_OF.items() if flag in given}
    for part in ("policy_options", "cpu_options", "disk_options"):
        if part in kv:
            kv[part] = _json(f"--kv-{part.replace('_', '-')}", kv[part])
    if "quotas" in kv:
        kv["quotas"] = _quotas(kv["quotas"])
    pd = {part: given[flag] for flag, part in PD_PART_OF.items() if flag in given}
    if "channel_options" in pd:
        pd["channel_options"] = _json("--kv-channel-options", pd["channel_options"])
    rest = {flag: value for flag, value in given.items() if flag not in PART_OF and flag not in PD_PART_OF}
    for name in ("strategy_options", "speculative_options", "speculative_config", "sparsity_options", "comm_options"):
        if name in rest:
            rest[name] = _json(f"--{name.replace('_', '-')}", rest[name])
    return rest | ({"kv": kv} if kv else {}) | ({"pd": pd} if pd else {})


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} is not JSON: {error}.") from None


def _quotas(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return _json("--kv-quotas", text)
    import yaml

    try:
        return yaml.safe_load(Path(text).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read --kv-quotas {text}: {error.strerror}. Give a file, or an object as JSON.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--kv-quotas {text} is neither JSON nor YAML: {error}") from None
