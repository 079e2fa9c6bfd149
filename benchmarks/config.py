"""Configuration of a benchmark: frozen pydantic models, read from YAML. Lengths are in tokens."""

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.errors import BenchmarkError
from sagellm.core.config import SageConfig
from sagellm.core.service import ServiceRequest

CONFIGS = Path(__file__).parent / "configs"


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Constant(Model):
    kind: Literal["constant"] = "constant"
    value: int = Field(ge=1)

    @property
    def largest(self) -> int:
        return self.value


class Uniform(Model):
    kind: Literal["uniform"] = "uniform"
    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> "Uniform":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self

    @property
    def largest(self) -> int:
        return self.high


class LogNormal(Model):
    """The usual shape of chat traffic; draws outside low..high are drawn again."""

    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)
    sigma: float = Field(gt=0, le=4)
    low: int = Field(1, ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> "LogNormal":
        if not self.low <= self.median <= self.high:
            raise ValueError(f"median {self.median:g} is not between low {self.low} and high {self.high}")
        return self

    @property
    def largest(self) -> int:
        return self.high


Length = Annotated[Constant | Uniform | LogNormal, Field(discriminator="kind")]


class Closed(Model):
    """A fixed number of users, each sending its next request when the last one is answered."""

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(ge=1, le=4096)


class Poisson(Model):
    """Arrivals that do not wait for answers: exponential gaps with a mean of 1 / rate seconds."""

    kind: Literal["poisson"] = "poisson"
    rate: float = Field(gt=0)


class Trace(Model):
    """Arrivals, lengths and shared prefixes of a recorded trace (JSON lines; see the README for the fields).

    `speed` 2 replays twice as fast; `scale` 0.1 shortens prompts and answers to a tenth.
    """

    kind: Literal["trace"] = "trace"
    file: Path
    speed: float = Field(1.0, gt=0)
    scale: float = Field(1.0, gt=0, le=1)


Arrivals = Annotated[Closed | Poisson | Trace, Field(discriminator="kind")]


class Slo(Model):
    """Targets that a good request meets, in seconds."""

    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)


class LoadClass(Model):
    """One kind of request in a mixed load.

    `share`: of the requests, in proportion to the other classes' shares. With Poisson arrivals a class with the half of all
    shares comes at half the rate.
    `service`: what each of its requests asks of the server's scheduler. They are good within the targets that they ask for.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    share: float = Field(1.0, gt=0)
    prompt_tokens: Length
    output_tokens: Length
    reuse: float = Field(0.0, ge=0, lt=1)
    num_prefixes: int = Field(1, ge=1)
    service: ServiceRequest = ServiceRequest()

    @model_validator(mode="after")
    def _lasting(self) -> "LoadClass":
        if self.service.deadline is not None:
            raise ValueError("service.deadline is a time of the clock, which one run alone could keep; leave it out")
        return self

    def slo(self, otherwise: Slo) -> Slo:
        """Return the targets of its requests in seconds, `otherwise` where they have none."""
        ttft_ms, tpot_ms = self.service.ttft_slo_ms, self.service.tpot_slo_ms
        return Slo(
            ttft_s=otherwise.ttft_s if ttft_ms is None else ttft_ms / 1000,
            tpot_s=otherwise.tpot_s if tpot_ms is None else tpot_ms / 1000,
        )


class Workload(Model):
    """Requests of one round.

    `classes`: kinds of requests that come mixed, each with its own lengths and `reuse`.
    `reuse`: share of each prompt's tokens that it begins with and has in common with others, of `num_prefixes` kinds.
    `content`: what prompts are made of: random token ids, or pieces of English and code.
    `cache`: cold, nothing of this round was sent before; warm, everything was, once, before the clock starts.
    """

    arrivals: Arrivals
    num_requests: int = Field(ge=2)
    prompt_tokens: Length | None = None
    output_tokens: Length | None = None
    reuse: float = Field(0.0, ge=0, lt=1)
    num_prefixes: int = Field(1, ge=1)
    content: Literal["random", "text"] = "random"
    cache: Literal["cold", "warm"] = "cold"
    endpoint: Literal["generate", "completions", "chat"] = "generate"
    warmup_requests: int = Field(2, ge=0)
    classes: tuple[LoadClass, ...] = ()

    @model_validator(mode="after")
    def _mixed(self) -> "Workload":
        names = [each.name for each in self.classes]
        if len(set(names)) != len(names):
            raise ValueError(f"classes need names of their own, got {names}")
        for each, count in zip(self.classes, self.class_counts(), strict=True):
            if count == 0:
                raise ValueError(f"class {each.name} has no request among {self.num_requests}: raise num_requests or its share")
        return self

    def class_counts(self) -> list[int]:
        """Requests of each class, the same in every round: shares are rounded so that all are `num_requests`."""
        total = sum(each.share for each in self.classes)
        ends = [round(self.num_requests * share / total) for share in accumulate(each.share for each in self.classes)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    @model_validator(mode="after")
    def _lengths(self) -> "Workload":
        traced = isinstance(self.arrivals, Trace)
        if self.classes:
            if traced or self.prompt_tokens or self.output_tokens or self.reuse or self.num_prefixes > 1:
                raise ValueError(
                    "classes bring their own lengths and prefixes; leave out prompt_tokens, output_tokens, reuse, "
                    "num_prefixes and a trace"
                )
            return self
        given = self.prompt_tokens is not None and self.output_tokens is not None
        if traced and (self.prompt_tokens or self.output_tokens or self.reuse):
            raise ValueError("a trace brings its own lengths and prefixes; leave out prompt_tokens, output_tokens, reuse")
        if not traced and not given:
            raise ValueError("prompt_tokens and output_tokens are needed unless arrivals come from a trace")
        return self


class Price(Model):
    per_device_hour: float = Field(ge=0)
    currency: str = "USD"


class Topology(Model):
    """Where the workers of a server run, and what connects them.

    `workers` of one model, each with so many `threads` on a CPU, on so many `hosts`; `link`: backend of their collectives.
    None: what the server's options say.
    """

    hosts: int = Field(1, ge=1)
    workers: int | None = Field(None, ge=1)
    threads: int | None = Field(None, ge=1)
    link: str | None = None


class Contestant(Model):
    """One side of a comparison: a name, the options of the server and of component scenarios in which it differs, and, when
    its code is another one, the checkout whose environment (`.venv`) runs its server."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    server: dict[str, Any] = Field(default_factory=dict)
    components: dict[str, dict[str, Any]] = Field(default_factory=dict)
    checkout: Path | None = None


class BenchmarkConfig(Model):
    """A whole benchmark.

    `topology` names what the figures belong to; the servers' options must agree with it.
    `server` holds options of `sagellm.serve` (device, batch size, KV blocks, tiers, plug-ins, tensor parallelism ...).
    `sweep`: numbers of users to run the workload at, instead of the one of its closed loop.
    `rounds` are run on the same servers; the servers start `launches` times. Where a process finds its memory makes it
    faster or slower as long as it lives, which no number of rounds averages out.
    `components` names component scenarios that run besides, with their options. `peak_tflops` overrides the peak that MFU
    divides by; on a CPU it is measured when absent. `client_lag_limit` bounds the client's own lateness: in an open loop its
    mean over the mean gap between sends, in a closed one over the median time to the first token. `client_cpu_limit` bounds
    the share of a core that the client uses: beyond it answers wait for the client.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    topology: Topology = Topology()
    server: dict[str, Any] = Field(default_factory=dict)
    workload: Workload | None = None
    sweep: tuple[int, ...] = ()
    contestants: tuple[Contestant, ...] = (Contestant(name="head"),)
    components: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rounds: int = Field(5, ge=1)
    launches: int = Field(1, ge=1)
    seed: int = Field(0, ge=0)
    slo: Slo = Slo(ttft_s=1.0, tpot_s=0.1)
    price: Price = Price(per_device_hour=0.0)
    peak_tflops: float | None = Field(None, gt=0)
    client_lag_limit: float = Field(0.05, gt=0)
    client_cpu_limit: float = Field(0.8, gt=0)

    @model_validator(mode="after")
    def _whole(self) -> "BenchmarkConfig":
        if self.workload is None and not self.components:
            raise ValueError("nothing to run: give a workload, components, or both")
        if self.sweep and (self.workload is None or not isinstance(self.workload.arrivals, Closed)):
            raise ValueError("sweep needs a workload with closed arrivals")
        if any(users < 1 for users in self.sweep) or len(set(self.sweep)) != len(self.sweep):
            raise ValueError(f"sweep {self.sweep}: each must be at least 1, and stand there once")
        names = [contestant.name for contestant in self.contestants]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"contestants need names of their own, got {names}")
        for contestant in self.contestants:
            if unknown := sorted(set(contestant.components) - set(self.components)):
                raise ValueError(f"{contestant.name} has options of {unknown[0]}, which is not among the components")
            sage = self._checked(contestant)
            longest = self._longest()
            if longest and sage.context_length and longest > sage.context_length:
                raise ValueError(
                    f"a prompt and its answer may take {longest} tokens; the server's context_length is "
                    f"{sage.context_length}"
                )
        return self

    @model_validator(mode="after")
    def _topology_agrees(self) -> "BenchmarkConfig":
        """With the options that servers have in common; a contestant may differ."""
        found = {"workers": "tensor_parallel", "threads": "threads", "link": "comm_backend"}
        for part, option in found.items():
            has, told = self.server.get(option, SageConfig.model_fields[option].default), getattr(self.topology, part)
            if told is not None and has != told:
                raise ValueError(f"topology.{part} is {told}, and the server has {has}")
        return self

    def _checked(self, contestant: Contestant) -> SageConfig:
        try:
            return self.sage_config(contestant)
        except ValidationError as error:
            whose = "" if len(self.contestants) == 1 else f"{contestant.name}: "
            raise ValueError("; ".join(f"{whose}server.{line}" for line in _explain(error))) from None

    def sage_config(self, contestant: Contestant) -> SageConfig:
        """The server of one contestant. Raises pydantic's ValidationError."""
        return SageConfig(**{**self.server, **contestant.server})

    def _longest(self) -> int:
        workload = self.workload
        kinds = () if workload is None else workload.classes or (workload,)
        known = [of for of in kinds if of.prompt_tokens is not None and of.output_tokens is not None]
        return max([of.prompt_tokens.largest + of.output_tokens.largest for of in known], default=0)


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file. Raises BenchmarkError when it cannot be read or is no YAML."""
    try:
        return yaml.safe_load(file.read_text())
    except OSError as error:
        raise BenchmarkError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{file} is no YAML: {' '.join(str(error).split())}") from None


def load_config(file: Path) -> BenchmarkConfig:
    """Raises BenchmarkError, one line a mistake."""
    values = read_yaml(file)
    if not isinstance(values, dict):
        raise BenchmarkError(f"{file} holds {type(values).__name__}; it must hold keys and values")
    return make_config(values, str(file))


def make_config(values: dict[str, Any], source: str = "config") -> BenchmarkConfig:
    """Raises BenchmarkError, one line a mistake."""
    try:
        return BenchmarkConfig.model_validate(values)
    except ValidationError as error:
        raise BenchmarkError("\n".join(f"{source}: {line}" for line in _explain(error))) from None


def preset(name: str) -> BenchmarkConfig:
    """Raises BenchmarkError for an unknown name, listing the known ones."""
    known = preset_names()
    if name not in known:
        raise BenchmarkError(f"preset {name!r} is unknown; known are {', '.join(known)}")
    return load_config(CONFIGS / f"{name}.yaml")


def preset_names() -> list[str]:
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: unknown key")
        elif item["type"] == "value_error":
            lines.append(f"{name}: ".removeprefix(": ") + item["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{name}: {item['msg']}, got {item['input']!r}")
    return lines
