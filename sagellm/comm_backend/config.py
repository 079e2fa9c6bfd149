"""Settings that all ranks of a group share."""

import socket
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlparse

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sagellm.core.errors import ConfigError

__all__ = ["NODES_WAIT_S", "RENDEZVOUS", "CommConfig", "check_ray_address"]

# Environment: where the workers of one engine meet, by torch.distributed's names.
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
NODES_WAIT_S = 60.0  # for nodes of Ray with room; one may just be starting again
CONNECT_S = 5.0


def check_ray_address(address: str, setting: str) -> None:
    """Raise ConfigError if Ray is not installed or no cluster answers at the address. `setting`: what needs Ray."""
    if find_spec("ray") is None:
        raise ConfigError(f"{setting} needs the package ray; install it: pip install 'sagellm[ray]'.")
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"ray_address is {address!r}; give host:port of the cluster's head, or auto.")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"no Ray cluster answers at {address}: {why}.") from None


class CommConfig(BaseModel):
    """One rank of a group.

    Attributes:
        backend: a name (`sagellm comm list`), or `module:Class`.
        rendezvous: where the ranks find each other: `file:///path`, a file that does not exist yet and that all of them can
            write; `tcp://127.0.0.1:port`, which rank 0 opens; `memory://name`, for ranks that are threads of one process.
        timeout_s: deadline of every operation that is given none, and of the start.
        options: of the backend, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = "gloo"
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    rendezvous: str
    timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, value: str) -> str:
        parts = urlparse(value)
        is_whole = {"file": parts.path not in ("", "/"), "memory": bool(parts.netloc), "tcp": _has_port(parts)}
        if not is_whole.get(parts.scheme, False):
            raise ValueError(
                f"rendezvous is {value!r}; give file:///path, tcp://127.0.0.1:port or memory://name."
            )
        return value

    @model_validator(mode="after")
    def _check_rank(self) -> "CommConfig":
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank} of {self.world_size}; ranks go from 0 to {self.world_size - 1}.")
        return self


def _has_port(parts: Any) -> bool:
    try:
        return bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False
