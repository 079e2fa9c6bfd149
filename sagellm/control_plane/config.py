"""Settings of a manager and its gateway: one YAML file."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from sagellm.core.config import Model
from sagellm.core.ports import SagePorts

__all__ = ["ApiKey", "ManagerConfig"]


class ApiKey(Model):
    """A key of clients. `max_running`: requests that it may have at once; None: as many as it likes."""

    key: str = Field(pattern="^[!-~]+$")  # a header carries such text alone
    max_running: int | None = Field(None, ge=1)


class ManagerConfig(Model):
    """One manager.

    Attributes:
        port: of the gateway; 0 is any free one.
        api_key: keys, each as a text or with its limit. Without any the gateway is open.
        max_running_per_key: limit of keys that have none of their own.
        router, router_options: a name of `sagellm list router`, or module:Class.
        wait_s: longest time that a request waits for an engine.
        check_interval_s: seconds between two health checks of an engine.
        record: file for decisions and ends of requests, as JSON lines.
        engines: name -> `kind`, a name of `sagellm list engine-kind`, and the options of the kind.
    """

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(SagePorts.gateway, ge=0, le=65535)
    api_key: tuple[ApiKey, ...] = ()
    max_running_per_key: int | None = Field(None, ge=1)
    router: str = Field("least-load", min_length=1)
    router_options: dict[str, Any] = Field(default_factory=dict)
    wait_s: float = Field(30.0, ge=0, le=3600)
    check_interval_s: float = Field(1.0, ge=0.05, le=600)
    drain_timeout_s: float = Field(10.0, ge=0, le=3600)
    record: Path | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    engines: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("api_key", mode="before")
    @classmethod
    def _plain_keys(cls, value: Any) -> Any:
        values = [value] if isinstance(value, (str, dict)) else value
        return tuple({"key": one} if isinstance(one, str) else one for one in values)

    def limits(self) -> dict[str, int | None]:
        """Return key -> requests that it may have at once."""
        return {one.key: one.max_running or self.max_running_per_key for one in self.api_key}
