"""Settings that all ranks of a group share."""

from typing import Any
from urllib.parse import urlparse

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = ["RENDEZVOUS", "SCHEMES", "CommConfig"]

SCHEMES = ("file", "tcp", "memory")
# Environment: where the workers of one engine meet, by torch.distributed's names.
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


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
