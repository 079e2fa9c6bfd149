"""The one result format of all scenarios, version 1. `docs/result.schema.json` is made from these models."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.errors import BenchmarkError
from benchmarks.output import json_text, write_json

SCHEMA = "sagellm-benchmark/1"


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Definition(Model):
    """Meaning of a metric. `better` tells which way a change is good; None for figures that are neither."""

    unit: str
    better: Literal["lower", "higher"] | None
    text: str


class Run(Model):
    """One scenario of one contestant in one round.

    `round` counts through the whole benchmark; `launch` is the number of the process that answered, which several rounds
    may share. A component has a process of its own in each round.
    `status`: valid; void, the measurement itself is not to be trusted (saturated client, contaminated cache); failed, the
    server or the scenario broke. `metrics` holds what could be measured; `absent` says why the others are missing.
    """

    contestant: str
    scenario: str
    round: int
    launch: int = 0
    seed: int
    status: Literal["valid", "void", "failed"] = "valid"
    reason: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)
    absent: dict[str, str] = Field(default_factory=dict)
    client: dict[str, float] = Field(default_factory=dict)
    cache: dict[str, float] = Field(default_factory=dict)
    samples: str | None = None


class Result(Model):
    """A benchmark's outcome.

    `status`: complete; partial, stopped by its user; failed, a server died. `reason` tells why. `environment` carries
    machine, versions, commit and patch state. `definitions` covers every metric that appears in `runs`.
    """

    schema_name: Literal["sagellm-benchmark/1"] = Field(SCHEMA, alias="schema")
    name: str
    status: Literal["complete", "partial", "failed"]
    reason: str = ""
    started: str
    duration_s: float
    config: dict[str, Any]
    environment: dict[str, Any]
    definitions: dict[str, Definition]
    runs: list[Run]

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def of(self, contestant: str, scenario: str, metric: str) -> dict[int, float]:
        """Round -> value, of the valid runs that have it."""
        return {
            run.round: run.metrics[metric]
            for run in self.runs
            if (run.contestant, run.scenario, run.status) == (contestant, scenario, "valid") and metric in run.metrics
        }

    def independent(self, contestants: Sequence[str], scenario: str, metric: str) -> np.ndarray:
        """float[observations, contestants]: means over the rounds of each launch, or rounds where one launch ran them all.
        Means are geometric, so that a rate and its inverse tell the same, unless a value is 0.

        Rounds of one launch share their process's luck with memory and threads, so they are no samples of the code's speed.
        A round counts when every contestant has it: each brings prompts of its own.
        """
        values = [self.of(contestant, scenario, metric) for contestant in contestants]
        common = sorted(set.intersection(*map(set, values)))
        table = np.array([[of[number] for of in values] for number in common]).reshape(-1, len(values))
        launch_of = {run.round: run.launch for run in self.runs if run.scenario == scenario}
        if len(set(launch_of.values())) < 2:
            return table
        launches = np.array([launch_of[number] for number in common])
        groups = [table[launches == launch] for launch in np.unique(launches)]
        if (table > 0).all():
            groups = [np.log(group) for group in groups]
        means = np.array([group.mean(axis=0) for group in groups]).reshape(-1, len(values))
        return np.exp(means) if (table > 0).all() else means

    def contestants(self) -> list[str]:
        return list(dict.fromkeys(run.contestant for run in self.runs))

    def scenarios(self) -> list[str]:
        return list(dict.fromkeys(run.scenario for run in self.runs))

    def write(self, file: Path) -> None:
        """Write the whole file or nothing."""
        write_json(file, self.model_dump(mode="json", by_alias=True))

    def csv_text(self) -> str:
        """Return one line a metric of a run."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("contestant", "scenario", "round", "launch", "seed", "status", "metric", "value"))
        for run in self.runs:
            own = (run.contestant, run.scenario, run.round, run.launch, run.seed, run.status)
            writer.writerows((*own, name, value) for name, value in run.metrics.items())
        return text.getvalue()


def read_result(file: Path) -> Result:
    """Raises BenchmarkError when it cannot be read or is no result of this schema."""
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise BenchmarkError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise BenchmarkError(f"{file} is no JSON: {error}") from None
    found = values.get("schema") if isinstance(values, dict) else None
    if found != SCHEMA:
        raise BenchmarkError(f"{file} has schema {found!r}; this program reads {SCHEMA!r}")
    try:
        return Result.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BenchmarkError(f"{file} is damaged at {where}: {first['msg']}") from None


def json_schema() -> dict[str, Any]:
    return Result.model_json_schema(by_alias=True)


if __name__ == "__main__":  # python -m benchmarks.result > benchmarks/docs/result.schema.json
    print(json_text(json_schema()), end="")
