"""Configuration: frozen pydantic models, composed once. `SageConfig` is what the server takes from file and flags."""

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from sagellm.core.errors import ConfigError

MAX_CACHED_BLOCK_SIZE = 256  # tokens
DEVICES = ("auto", "cpu", "cuda", "ascend", "maca", "camb")
ENGINES = ("pytorch", "turbomind")
DTYPES = ("auto", "float32", "float16", "bfloat16")
ROLES = ("prefill", "decode", "hybrid")


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class PluginSpec(Model):
    """A plug-in by entry point name or as `module:Class`, with the keyword arguments of its constructor.

    `required`: without it there is no start; another one that fails when it is attached is switched off.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    required: bool = False


class KVConfig(Model):
    """Who picks victims on each tier, and which tiers there are beside the engine's own pool.

    `policy`, `cpu_policy`, `disk_policy`: names of eviction policies, or `module:Class`. `disk`: the folder of the disk tier,
    of one server at a time; `disk_gib` bounds it. `migration`: whether a block is worth a move: always, never, by measured
    cost, or `module:Class`. `deadline_s`: what was not saved or loaded by then is given up. `quotas`: tenant -> tier ->
    blocks (an integer) or share of the tier (below 1); "" is the tenant of requests that name none.
    """

    policy: str = "lru"
    policy_options: dict[str, Any] = Field(default_factory=dict)
    cpu_policy: str = "lru"
    cpu_options: dict[str, Any] = Field(default_factory=dict)
    disk: Path | None = None
    disk_gib: float = Field(4.0, gt=0)
    disk_policy: str = "lru"
    disk_options: dict[str, Any] = Field(default_factory=dict)
    migration: str = "cost"
    deadline_s: float = Field(1.0, gt=0)
    quotas: dict[str, dict[Literal["gpu", "cpu", "nvme"], StrictInt | StrictFloat]] = Field(default_factory=dict)

    @field_validator("disk", mode="before")
    @classmethod
    def _no_empty_folder(cls, value: Any) -> Any:
        if value == "":  # it would be the current folder
            raise ValueError("name a folder, or leave it out")
        return value


class SpeculativeSpec(Model):
    """A speculative strategy: a name, `dynamic:NAME` or `module:Class`, and keyword arguments of its constructor."""

    name: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)


class PDConfig(Model):
    """This server as an engine of a prefill/decode group.

    `role`: what its proxy sends to it: prompts to compute for others, requests to answer, or both. `proxy_url`: where it
    registers. `key_file`: holds the secret of the group. `channel`: by which KV blocks move; all engines of a group have the
    same. `checksums`: of the blocks that are read from here. `timeout_s`: for a prompt that another engine computes, until its
    KV blocks are here. `lease_s`: how long blocks are kept for an engine that does not fetch them. `port`: of control
    connections, 0: any. `trust_proxy`: the proxy is LMDeploy's own, which signs nothing; on loopback alone.
    """

    role: Literal[ROLES] | None = None
    proxy_url: str | None = None
    key_file: Path | None = None
    channel: str = Field("auto", min_length=1)
    channel_options: dict[str, Any] = Field(default_factory=dict)
    checksums: bool = False
    timeout_s: float = Field(10.0, gt=0, le=3600)
    lease_s: float = Field(30.0, gt=0, le=86_400)
    port: int = Field(0, ge=0, le=65535)
    trust_proxy: bool = False

    @field_validator("proxy_url")
    @classmethod
    def _is_base_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            is_url = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError("give http://host:port")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _is_whole(self) -> "PDConfig":
        if self.role is None:
            raise ValueError(
                "there are settings of a prefill/decode group, and no role; give --role prefill, decode or hybrid"
            )
        if self.proxy_url is None:
            raise ValueError(f"role {self.role} needs the proxy of its group; give --proxy-url http://host:port")
        if self.key_file is None:
            raise ValueError(f"role {self.role} needs the key of its group; give --pd-key-file FILE")
        return self


class PDHooks(Model):
    """What the engine process has to know of its prefill/decode group.

    `engine_id`: the URL of its server. `weights`: a fingerprint of the model; engines that exchange KV blocks have the same.
    `control_host`, `control_port`: where it serves control connections. The others as in `PDConfig`; `channel` is a name.
    """

    role: Literal[ROLES]
    engine_id: str
    key_file: Path
    channel: str
    channel_options: dict[str, Any] = Field(default_factory=dict)
    checksums: bool = False
    timeout_s: float = Field(10.0, gt=0)
    lease_s: float = Field(30.0, gt=0)
    control_host: str = "127.0.0.1"
    control_port: int = Field(0, ge=0, le=65535)
    weights: str = ""


class HookConfig(Model):
    """What travels, as JSON, into the engine process and its workers.

    `hold_limit_s`: a request that a plug-in holds or does not admit for longer counts as a fault of the plug-in.
    `block_bytes`: size of one KV block of one worker, which the scheduler cannot know by itself.
    `model` and `layout`: its name, and what the bytes of a block mean (see `EngineHandle`).
    `comm_metrics`: measure how long collectives keep their callers waiting.
    `run_dir`: where worker processes leave their counters for the engine process to collect.
    `pd`: of an engine of a prefill/decode group.
    """

    plugins: tuple[PluginSpec, ...] = ()
    time_limit_s: float = Field(1.0, gt=0)
    hold_limit_s: float = Field(60.0, gt=0)
    block_bytes: int = Field(0, ge=0)
    model: str = ""
    layout: str = ""
    record: Path | None = None
    run_dir: Path | None = None
    comm_metrics: bool = False
    speculative: SpeculativeSpec | None = None
    pd: PDHooks | None = None


class SageConfig(Model):
    """One engine and its server. `None` means: decide from the machine and the model.

    `kv_blocks` and `kv_memory_share` size the engine's KV pool and exclude each other; `host_kv_blocks` is the host tier
    that plug-ins may migrate blocks to. `strategy` names who schedules, or is `module:Class`; None leaves it to the engine.
    `speculative` names who guesses tokens, or is `dynamic:NAME` or `module:Class`; None: nobody.
    `pd`: of a server that is one of a prefill/decode group.
    Lengths are in tokens.
    """

    model: Path | None = None
    model_name: str | None = None
    engine: Literal[ENGINES] = "pytorch"
    device: Literal[DEVICES] = "auto"
    dtype: Literal[DTYPES] = "auto"
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(23333, ge=1, le=65535)
    api_key: tuple[str, ...] = ()
    kv_blocks: int | None = Field(None, ge=16)
    kv_memory_share: float | None = Field(None, gt=0, lt=1)
    host_kv_blocks: int = Field(0, ge=0)
    block_size: int = Field(64, ge=16, le=1024)
    prefix_caching: bool = True
    kv: KVConfig | None = None
    context_length: int | None = Field(None, ge=1)
    max_batch_size: int | None = Field(None, ge=1)
    max_prefill_tokens: int | None = Field(None, ge=16)
    decode_round: int | None = Field(None, ge=1, le=256)
    tensor_parallel: int = Field(1, ge=1, le=64)
    threads: int | None = Field(None, ge=1)
    strategy: str | None = Field(None, min_length=1)
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    speculative: str | None = Field(None, min_length=1)
    speculative_options: dict[str, Any] = Field(default_factory=dict)
    plugins: tuple[PluginSpec, ...] = ()
    plugin_time_limit_s: float = Field(1.0, gt=0)
    record: Path | None = None
    comm_metrics: bool = False
    pd: PDConfig | None = None
    drain_timeout_s: float = Field(10.0, ge=0)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"

    @field_validator("plugins", mode="before")
    @classmethod
    def _plain_names(cls, value: Any) -> Any:
        if isinstance(value, (str, dict)):
            value = [value]
        if isinstance(value, (list, tuple)):
            return tuple({"name": item} if isinstance(item, str) else item for item in value)
        return value

    @field_validator("api_key", mode="before")
    @classmethod
    def _one_key(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # What a header carries without an encoding, and without the blanks around it.
        if any(not key or not key.isascii() or not key.isprintable() or key != key.strip() for key in value):
            raise ValueError("a key is one or more ASCII characters, without blanks at its ends")
        return value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value

    @model_validator(mode="after")
    def _one_pool_size(self) -> "SageConfig":
        if self.kv_blocks is not None and self.kv_memory_share is not None:
            raise ValueError("kv_blocks and kv_memory_share both size the KV pool; give one of them")
        return self

    @model_validator(mode="after")
    def _round_fits(self) -> "SageConfig":
        # The longest answer leaves one block of the pool free, and room for a whole round is set aside at once.
        if self.decode_round is not None and self.decode_round > self.block_size:
            raise ValueError(f"decode_round {self.decode_round} is above block_size {self.block_size}; lower it")
        return self

    @model_validator(mode="after")
    def _blocks_can_be_cached(self) -> "SageConfig":
        if self.prefix_caching and self.block_size > MAX_CACHED_BLOCK_SIZE:
            raise ValueError(
                f"block_size {self.block_size} is above the {MAX_CACHED_BLOCK_SIZE} tokens that the prefix index takes; "
                "lower it, or switch prefix_caching off"
            )
        return self


PARTS: dict[str, type[Model]] = {"kv": KVConfig, "pd": PDConfig}  # of `SageConfig`


def read_config(file: Path | None, overrides: dict[str, Any]) -> SageConfig:
    """A `SageConfig` from a YAML file and values that go before it.

    Raises:
        ConfigError: an unreadable file, an unknown key, or a value out of range; one line for each.
    """
    values = {**(of_file := _read_yaml(file)), **overrides}
    for part in PARTS:
        if isinstance(of_file.get(part), dict) and isinstance(overrides.get(part), dict):
            values[part] = {**of_file[part], **overrides[part]}
    try:
        return SageConfig(**values)
    except ValidationError as error:
        raise ConfigError(_explain(error, file)) from None


def _read_yaml(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}; a configuration is a mapping of names to values.")
    odd = [name for name in content if not isinstance(name, str)]
    if odd:
        raise ConfigError(f"in {file}: the key {odd[0]!r} is a {type(odd[0]).__name__}; keys are names.")
    return content


def _explain(error: ValidationError, file: Path | None) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            part = PARTS.get(item["loc"][0]) if len(item["loc"]) > 1 else None
            known = (part or SageConfig).model_fields
            lines.append(f"{name}: unknown key; known are {', '.join(sorted(known))}.")
        elif not name or (name in PARTS and item["type"] == "value_error"):  # a combination of values
            lines.append(f"{item['msg'].removeprefix('Value error, ')}.")
        else:
            lines.append(f"{name}: {item['msg']}, got {item['input']!r}.")
    return (f"in {file}: " if file else "") + "\n".join(lines)
