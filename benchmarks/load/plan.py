"""Requests that the client process sends: a JSON file."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.errors import BenchmarkError
from sagellm.core.service import ServiceRequest


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlannedRequest(Model):
    """One request. Answers are `max_tokens` long where the server knows `ignore_eos`; decoding is greedy.

    `scheduled_s`: seconds since the start; None in a closed loop, where the answer before sets the time.
    `service`: what it asks of the server's scheduler, if anything.
    """

    scheduled_s: float | None = Field(None, ge=0)
    prompt_ids: list[int] | None = None
    text: str | None = None
    max_tokens: int = Field(ge=1)
    seed: int | None = None
    service: ServiceRequest | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "PlannedRequest":
        if bool(self.prompt_ids) == bool(self.text):
            raise ValueError("a request needs either prompt_ids or text, and not an empty one")
        return self


class Plan(Model):
    """One round of load.

    `concurrency`: requests under way at any time in a closed loop; None for an open loop, where each request goes out
    at its own time. `timeout_s` bounds one answer; `grace_s` all that are missing when the last request has been sent.
    """

    url: str = Field(pattern=r"^https?://\S+$")
    endpoint: Literal["generate", "completions", "chat"] = "generate"
    headers: dict[str, str] = Field(default_factory=dict)
    model: str = ""
    requests: list[PlannedRequest] = Field(min_length=1)
    concurrency: int | None = Field(None, ge=1)
    timeout_s: float = Field(600.0, gt=0)
    grace_s: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> "Plan":
        times = [request.scheduled_s for request in self.requests]
        if self.concurrency is not None and times.count(None) != len(times):
            raise ValueError("a closed loop has no scheduled_s; leave them out, or leave out concurrency")
        if self.concurrency is None and None in times:
            raise ValueError("scheduled_s is needed for every request unless concurrency is given")
        if self.concurrency is None and times != sorted(times):
            raise ValueError("requests must be in the order of scheduled_s")
        if self.endpoint == "chat" and any(request.text is None for request in self.requests):
            raise ValueError("endpoint chat takes text, no prompt_ids")
        return self

    def write(self, file: Path) -> None:
        file.write_text(self.model_dump_json(exclude_none=True))


def read_plan(file: Path) -> Plan:
    """Raises BenchmarkError when it cannot be read or is no plan."""
    try:
        return Plan.model_validate_json(file.read_bytes())
    except OSError as error:
        raise BenchmarkError(f"cannot read plan {file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "plan"
        raise BenchmarkError(f"plan {file}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
