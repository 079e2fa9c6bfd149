"""Settings of a manager and its gateway: one YAML file."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sagellm.core.config import ROLES, Model
from sagellm.core.ports import SagePorts

__all__ = ["ApiKey", "ManagerConfig", "ScalingConfig"]


class ApiKey(Model):
    """A key of clients. `max_running`: requests that it may have at once; None: as many as it likes."""

    key: str = Field(pattern="^[!-~]+$")  # a header carries such text alone
    max_running: int | None = Field(None, ge=1)


class ScalingConfig(Model):
    """How the number of engines of a pool changes.

    Attributes:
        policy, options: a name of `sagellm list scaling`, or module:Class.
        min, max: bounds of the number of engines. The manager starts with `min`.
        interval_s: seconds from a decision to the next.
        cooldown_s: after a change the number stays so long.
        down_after: decisions in a row that must ask for fewer engines before one is stopped.
        drain_timeout_s: seconds that requests have on an engine that is to stop.
        dry_run: decide and record, and change nothing.
    """

    policy: str = Field("sla", min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    min: int = Field(1, ge=1, le=1024)
    max: int = Field(ge=1, le=1024)
    interval_s: float = Field(10.0, ge=0.05, le=3600)
    cooldown_s: float = Field(30.0, ge=0, le=86400)
    down_after: int = Field(3, ge=1, le=1000)
    drain_timeout_s: float = Field(600.0, ge=0, le=86400)
    dry_run: bool = False

    @model_validator(mode="after")
    def _bounds(self) -> "ScalingConfig":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; lower it, or raise max")
        return self


class ManagerConfig(Model):
    """One manager.

    Attributes:
        port: of the gateway; 0 is any free one.
        api_key: keys, each as a text or with its limit. Without any the gateway is open.
        max_running_per_key: limit of keys that have none of their own.
        router, router_options: a name of `sagellm list router`, or module:Class.
        ray_address: host:port of the head of a Ray cluster, or auto. Engines that are processes run on its nodes.
        wait_s: longest time that a request waits for an engine.
        check_interval_s: seconds between two health checks of an engine.
        record: file for decisions and ends of requests, as JSON lines.
        engines: name -> `kind`, a name of `sagellm list engine-kind`, and the options of the kind. With `ray_address` also
            `resources`: what the engine needs of one node, such as {CPU: 4, GPU: 1}. The kind `sagellm` also has `place`:
            process, or manager for an engine in the manager's own process.
        scaling: name of one of the engines -> how many engines like it there are. They get names such as NAME-2.
            NAME-prefill, NAME-decode and NAME-hybrid are the engines of one role of the group NAME.
    """

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(SagePorts.gateway, ge=0, le=65535)
    api_key: tuple[ApiKey, ...] = ()
    max_running_per_key: int | None = Field(None, ge=1)
    router: str = Field("least-load", min_length=1)
    router_options: dict[str, Any] = Field(default_factory=dict)
    ray_address: str | None = Field(None, min_length=1)
    wait_s: float = Field(30.0, ge=0, le=3600)
    check_interval_s: float = Field(1.0, ge=0.05, le=600)
    drain_timeout_s: float = Field(10.0, ge=0, le=3600)
    record: Path | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict)
    scaling: dict[str, ScalingConfig] = Field(default_factory=dict)

    @field_validator("api_key", mode="before")
    @classmethod
    def _plain_keys(cls, value: Any) -> Any:
        values = [value] if isinstance(value, (str, dict)) else value
        return tuple({"key": one} if isinstance(one, str) else one for one in values)

    @model_validator(mode="after")
    def _pools(self) -> "ManagerConfig":
        for name in self.scaling:
            group, _, role = name.rpartition("-")
            if name not in self.engines and not (group in self.engines and role in ROLES):
                known = ", ".join(self.engines) or "none"
                raise ValueError(f"scaling names {name!r}, which is no engine of this file; engines are {known}")
        return self

    def limits(self) -> dict[str, int | None]:
        """Return key -> requests that it may have at once."""
        return {one.key: one.max_running or self.max_running_per_key for one in self.api_key}
