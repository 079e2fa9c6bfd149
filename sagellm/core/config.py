"""Configuration: frozen pydantic models. `SageConfig` is what the server reads from file and flags."""

from pathlib import Path
from typing import Any, Literal, TypeVar
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

from sagellm.core.devices import DEVICES, GROUP, device_names
from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts

MAX_CACHED_BLOCK_SIZE = 256  # tokens
ENGINES = ("pytorch", "turbomind")
DTYPES = ("auto", "float32", "float16", "bfloat16")
WEIGHTS = ("auto", "packed")
COMPUTES = ("auto", "float32", "bfloat16", "int8")
KV_SCHEMAS = ("auto", "float32", "bfloat16", "fp8", "int8", "int4")
PREFIX_ATTENTION = ("off", "auto")
EXECUTORS = ("auto", "mp", "ray")
ENGINE_METHODS = ("eagle", "eagle3", "deepseek_mtp")  # speculation of LMDeploy's own, on a GPU
ROLES = ("prefill", "decode", "hybrid")


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


Settings = TypeVar("Settings", bound=Model)


class PluginSpec(Model):
    """A plug-in: entry point or `module:Class`, and keyword arguments of its constructor.

    `required`: if it fails to attach, the server does not start. A plug-in that is not required is switched off.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    required: bool = False


class KVConfig(Model):
    """Tiers of the KV cache besides the engine's own pool, and the policies of all tiers.

    Attributes:
        policy, cpu_policy, disk_policy: eviction policies of the pool, the host tier and the disk tier: name or `module:Class`.
        disk: folder of the disk tier; one server at a time may use it.
        disk_gib: size limit of the disk tier.
        migration: migration policy: always, never, cost, or `module:Class`.
        deadline_s: seconds after which a save or load is given up.
        quotas: tenant -> tier -> blocks (an integer) or share of the tier (below 1). "" is the tenant of requests without one.
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
    """A speculative strategy: name, `dynamic:NAME` or `module:Class`, and keyword arguments of its constructor."""

    name: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)


class SparsitySpec(Model):
    """A sparse policy: name or `module:Class`, and keyword arguments of its constructor."""

    name: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)


class PDConfig(Model):
    """This server as an engine of a prefill/decode group. With `key_file` alone it is in no group, and tells the owner of the
    key which prefixes it has cached.

    Attributes:
        role: what the proxy sends here: prompts to compute for others (prefill), requests to answer (decode), or both (hybrid).
        proxy_url: URL of the proxy to register at.
        key_file: file with the secret of the group.
        channel: KV transfer channel; all engines of a group use the same.
        checksums: whether blocks that are read from here carry checksums.
        timeout_s: seconds until the KV blocks of a prompt that another engine computes must be here.
        lease_s: seconds that blocks are kept for an engine that does not fetch them.
        port: port of control connections; 0 is any.
        trust_proxy: accept LMDeploy's own proxy, which signs nothing; on loopback alone.
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
            if self.key_file is None or self.model_fields_set - {"role", "key_file", "port"}:
                raise ValueError(
                    "there are settings of a prefill/decode group, and no role; give --role prefill, decode or hybrid"
                )
            return self
        if self.proxy_url is None:
            raise ValueError(f"role {self.role} needs the proxy of its group; give --proxy-url http://host:port")
        if self.key_file is None:
            raise ValueError(f"role {self.role} needs the key of its group; give --pd-key-file FILE")
        return self


class PDHooks(Model):
    """Settings of a prefill/decode group for the engine process; those of `PDConfig`, and:

    Attributes:
        role: None: the engine is in no group, and tells what it has cached.
        engine_id: URL of the engine's server.
        weights: fingerprint of the model; engines that exchange KV blocks have the same.
        control_host, control_port: address of control connections.
    """

    role: Literal[ROLES] | None
    engine_id: str
    key_file: Path
    channel: str = ""
    channel_options: dict[str, Any] = Field(default_factory=dict)
    checksums: bool = False
    timeout_s: float = Field(10.0, gt=0)
    lease_s: float = Field(30.0, gt=0)
    control_host: str = "127.0.0.1"
    control_port: int = Field(0, ge=0, le=65535)
    weights: str = ""


class HookConfig(Model):
    """Settings that are sent, as JSON, to the engine process and its workers.

    Attributes:
        hold_limit_s: seconds that a plug-in may hold or not admit a request; longer is a fault of the plug-in.
        block_bytes: size of one KV block of one worker.
        model, layout: name of the model, and the meaning of the bytes of a block (see `EngineHandle`).
        comm_metrics: whether to measure how long callers wait for collectives.
        run_dir: folder in which worker processes leave their counters for the engine process.
        pd: settings of a prefill/decode group.
        packed_weights: folder of a converted GGUF file, whose weights stay as the file has them.
        compute: type of the CPU device's products.
        kv_dtype: type of keys and values, as `KVCacheSchema` has it; empty: that of the model.
        prefix_attention, comm_backend, comm_options: as in `SageConfig`.
        comm_device: where tensors of collectives lie.
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
    sparsity: SparsitySpec | None = None
    pd: PDHooks | None = None
    packed_weights: Path | None = None
    compute: Literal[COMPUTES] = "auto"
    kv_dtype: str = ""
    prefix_attention: Literal[PREFIX_ATTENTION] = "off"
    comm_backend: str | None = None
    comm_device: str = "cpu"
    comm_options: dict[str, Any] = Field(default_factory=dict)


class SpeculativeConfig(Model):
    """Speculation by the names that vLLM and Dynamo give its settings.

    Attributes:
        method: speculative strategy; None: draft where a model is given, else ngram.
        model: draft model.
        num_speculative_tokens: most guesses of a sequence and step; None leaves it to the method.
        draft_tensor_parallel_size: workers that hold the draft model: the first one holds all of it.
    """

    method: str | None = Field(None, min_length=1)
    model: str | None = Field(None, min_length=1)
    num_speculative_tokens: int | None = Field(None, ge=1, le=64)
    draft_tensor_parallel_size: int = 1

    @field_validator("draft_tensor_parallel_size")
    @classmethod
    def _one_worker(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"{value} workers; one of the target's workers holds the whole draft model, so give 1 or nothing")
        return value

    def settings(self) -> dict[str, Any]:
        """Return fields of `SageConfig`."""
        method = self.method or ("draft" if self.model is not None else "ngram")
        num_guesses = "num_speculative_tokens" if method in ENGINE_METHODS else "lookahead"
        options = {"model": self.model, num_guesses: self.num_speculative_tokens}
        return {
            "speculative": method, "speculative_options": {name: each for name, each in options.items() if each is not None}
        }  # fmt: skip


class SageConfig(Model):
    """One engine and its server. None leaves a setting to the machine and the model. Lengths are in tokens.

    Attributes:
        device: a name of `core.devices.DEVICES`, or of a device that an installed package brings.
        weights: packed keeps the weights of a GGUF file in its 4 to 8 bits; auto turns them into `dtype`. On the CPU device.
        quantization: method that the model's weights are quantized by, at the first start; None leaves them as they are.
        compute: type in which the CPU device multiplies; auto is the quicker one of those that lose nothing. int8 rounds
            weights and inputs to 8 bits.
        kv_schema: type in which keys and values are stored; auto is the model's. Those of fp8, int8 and int4 have a scale for
            each head of a token. A GPU has int8 and int4.
        comm_backend: what adds up tensors of tensor-parallel workers: a name of `sagellm comm list`, or `module:Class`. "group"
            is the process group that LMDeploy makes. "auto" is the quicker one of it and shm on the CPU device, as measured at
            the start, and the group elsewhere.
        comm_options: options of that backend.
        distributed_executor_backend: what tensor-parallel workers are: mp, processes of this machine; ray, actors of a Ray
            cluster; auto, mp on the CPU device and LMDeploy's choice elsewhere.
        ray_address: host:port of the head of the cluster, or auto for the one of this machine.
        prefix_attention: auto reads keys and values that requests of a decode step have in common once, where it pays; on the
            CPU device and on cuda.
        kv_blocks, kv_memory_share: size of the engine's KV pool; give one of them at most.
        host_kv_blocks: size of the host tier, to which plug-ins may migrate blocks.
        strategy: scheduling strategy: name or `module:Class`; None leaves scheduling to the engine.
        speculative: speculative strategy: name, `dynamic:NAME` or `module:Class`; None decodes without guesses.
        speculative_config: the same as an object, see `SpeculativeConfig`; it takes the place of these two.
        sparsity: sparse policy, which chooses the KV blocks that decode steps read: name or `module:Class`; None reads all.
        pd: settings of a server in a prefill/decode group.
        max_body_mib: size of the largest body of a request, in MiB; a larger one is answered with 413.
        hold_limit_s: seconds that a plug-in may hold or not admit a request; longer is a fault of the plug-in.
        sot_workers: further engines, each in a process of its own, that write points of skeleton-of-thought answers.
    """

    model: Path | None = None
    model_name: str | None = None
    engine: Literal[ENGINES] = "pytorch"
    device: str = "auto"
    dtype: Literal[DTYPES] = "auto"
    weights: Literal[WEIGHTS] = "auto"
    quantization: str | None = Field(None, min_length=1)
    quantization_options: dict[str, Any] = Field(default_factory=dict)
    compute: Literal[COMPUTES] = "auto"
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(SagePorts.serve, ge=1, le=65535)
    api_key: tuple[str, ...] = ()
    kv_schema: Literal[KV_SCHEMAS] = "auto"
    prefix_attention: Literal[PREFIX_ATTENTION] = "off"
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
    distributed_executor_backend: Literal[EXECUTORS] = "auto"
    ray_address: str | None = Field(None, min_length=1)
    threads: int | None = Field(None, ge=1)
    strategy: str | None = Field(None, min_length=1)
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    speculative: str | None = Field(None, min_length=1)
    speculative_options: dict[str, Any] = Field(default_factory=dict)
    sparsity: str | None = Field(None, min_length=1)
    sparsity_options: dict[str, Any] = Field(default_factory=dict)
    plugins: tuple[PluginSpec, ...] = ()
    plugin_time_limit_s: float = Field(1.0, gt=0)
    record: Path | None = None
    comm_metrics: bool = False
    comm_backend: str = Field("auto", min_length=1)
    comm_options: dict[str, Any] = Field(default_factory=dict)
    pd: PDConfig | None = None
    max_body_mib: float = Field(8.0, gt=0, le=1024)
    hold_limit_s: float = Field(60.0, gt=0, le=3600)
    drain_timeout_s: float = Field(10.0, ge=0)
    restart_workers: bool = False
    sot_workers: int = Field(0, ge=0, le=64)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"

    @model_validator(mode="before")
    @classmethod
    def _speculation(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("speculative_config") is None:
            return values
        values = dict(values)
        if values.get("speculative") is not None or values.get("speculative_options"):
            raise ValueError("speculative_config and speculative both choose the speculation; give one of them")
        try:
            wanted = SpeculativeConfig.model_validate(values.pop("speculative_config"))
        except ValidationError as error:
            said = "; ".join(" ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors())
            raise ValueError(f"speculative_config: {said}; known are {', '.join(SpeculativeConfig.model_fields)}") from None
        return values | wanted.settings()

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if value not in DEVICES and value not in (known := device_names()):
            raise ValueError(
                f"unknown device {value!r}; known are {', '.join(known)}. A package brings one by an entry point of the group "
                f"{GROUP}"
            )
        return value

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
        # A header carries such text without an encoding, and loses blanks around it.
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
    def _sot_workers_fit(self) -> "SageConfig":
        if self.sot_workers and self.pd is not None:
            raise ValueError("sot_workers and settings of a prefill/decode group exclude each other; give one of them")
        if self.sot_workers and self.engine == "turbomind":
            raise ValueError("sot_workers needs the engine pytorch; leave it out, or use --engine pytorch")
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
    """Return a `SageConfig`, see `read_model`."""
    return read_model(SageConfig, file, overrides)


def read_model(kind: type[Settings], file: Path | None, overrides: dict[str, Any]) -> Settings:
    """Return a model from a YAML file and `overrides`, which replace values of the file.

    Raises:
        ConfigError: an unreadable file, an unknown key, or an invalid value; one line for each.
    """
    values = {**(of_file := _read_yaml(file)), **overrides}
    for part in PARTS:
        if isinstance(of_file.get(part), dict) and isinstance(overrides.get(part), dict):
            values[part] = {**of_file[part], **overrides[part]}
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_explain(kind, error, file)) from None


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


def _explain(kind: type[Model], error: ValidationError, file: Path | None) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            part = PARTS.get(item["loc"][0]) if len(item["loc"]) > 1 else None
            known = (part or kind).model_fields
            is_known = part is not None or len(item["loc"]) == 1
            lines.append(f"{name}: unknown key; " + (f"known are {', '.join(sorted(known))}." if is_known else "leave it out."))
        elif not name or (name in PARTS and item["type"] == "value_error"):  # a combination of values
            lines.append(f"{item['msg'].removeprefix('Value error, ')}.")
        else:
            lines.append(f"{name}: {item['msg']}, got {item['input']!r}.")
    return (f"in {file}: " if file else "") + "\n".join(lines)
