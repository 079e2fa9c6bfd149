"""Measured points of engines under load as a file, what lies between them, and how far that is off.

A setup is a number of tensor-parallel workers and of guesses. A point of it is a number of requests and a length of prompts.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from sagellm.accel.speculative.planning.table import write_whole
from sagellm.core.config import Model
from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Phase
from sagellm.core.step_times import FEWEST_SAMPLES, FitError, decode_terms, fit_held_out

__all__ = ["FEWEST_POINTS", "Point", "SLAProfile", "Setup", "SetupCosts", "read_profile"]

FORMAT, VERSION = "sagellm sla profile", 1
FEWEST_POINTS = FEWEST_SAMPLES + 1  # each is left out once, and the others are fitted
NEAR = 0.05  # squared distance, in doublings, at which the weight of a point is half of that at the point itself

Setup = tuple[int, int]  # tensor-parallel workers, guesses a step


class Point(Model):
    """One measurement: `concurrency` prompts of `prompt_tokens` at once.

    Attributes:
        context_tokens: of each request, in the mean over the decode steps.
        step_s: median seconds from one decode step of a stream to its next, in the quickest round; without guesses the
            inter-token latency.
        mean_step_s: the mean over all rounds; None: not known.
        rounds: how many rounds these were.
        num_steps: steps that count.
        prefill_s: until the last of the prompts had its first token, without decode steps between; None: these took most of it.
        prefill_terms: steps, tokens and pairs of these prompts together.
    """

    tensor_parallel: int = Field(ge=1)
    lookahead: int = Field(ge=0)
    concurrency: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    context_tokens: float = Field(gt=0)
    step_s: float = Field(gt=0)
    num_steps: int = Field(ge=1)
    mean_step_s: float | None = Field(None, gt=0)
    rounds: int = Field(1, ge=1)
    prefill_s: float | None = Field(None, gt=0)
    prefill_terms: tuple[float, float, float]

    @property
    def setup(self) -> Setup:
        return self.tensor_parallel, self.lookahead

    @property
    def place(self) -> tuple[Setup, int, int]:
        """Return the place of the point in its grid."""
        return self.setup, self.concurrency, self.prompt_tokens

    @property
    def kv_tokens(self) -> float:
        """KV in use: tokens of all requests."""
        return self.concurrency * self.context_tokens

    @property
    def steps_per_s(self) -> float:
        """Steps of all streams in a second; without guesses the tokens."""
        return self.concurrency / self.step_s


class SetupCosts:
    """Seconds of steps of one setup: a fit, and between measured points what these are off from it.

    Args:
        points: of one setup, at least 5.
        tokens_of_step: tokens that a stream gets in a decode step on average.
        slowdown: times that all seconds are multiplied by, see `SLAProfile.slowdown`.

    Raises:
        ConfigError: too few points.
    """

    def __init__(self, points: Sequence[Point], tokens_of_step: float = 1.0, slowdown: float = 1.0) -> None:
        if len(points) < FEWEST_SAMPLES:
            raise ConfigError(f"a setup has {len(points)} points; measure at least {FEWEST_SAMPLES} of it.")
        rows = [(decode_terms(each.concurrency, each.kv_tokens), each.step_s) for each in points]
        self._decode, _ = fit_held_out("decode steps", rows)
        self._places = [_place(each.concurrency, each.kv_tokens) for each in points]
        self._off = [math.log(seconds / self._fitted(terms)) for terms, seconds in rows]
        prompts = [(each.prefill_terms, each.prefill_s) for each in points if each.prefill_s is not None]
        if len(prompts) < FEWEST_SAMPLES:
            raise ConfigError(f"a setup has {len(prompts)} points with timed prompts; measure at least {FEWEST_SAMPLES}.")
        self._prefill, _ = fit_held_out("prompts", prompts)
        self._tokens_of_step, self._slowdown = tokens_of_step, slowdown
        self.step_s = lru_cache(1 << 16)(self._step_s)

    def seconds(self, phase: Phase, num_requests: int, num_tokens: int, attention: float, now_s: float = 0.0) -> float:
        """Return the seconds of a step, as `StepCosts` of the virtual engine; a decode step: for each token of a stream."""
        if phase is Phase.PREFILL:
            return self.prefill_s((1.0, num_tokens, attention))
        return self.step_s(num_requests, round(attention / 64) * 64) / self._tokens_of_step

    def prefill_s(self, terms: Sequence[float]) -> float:
        """Return the seconds of prompts. `terms`: steps, tokens, pairs."""
        return self._slowdown * sum(each * term for each, term in zip(self._prefill, terms, strict=True))

    def _step_s(self, concurrency: int, kv_tokens: float) -> float:
        """Return the seconds from one decode step of a stream to the next."""
        place = _place(concurrency, kv_tokens)
        weights = [1 / (sum((a - b) ** 2 for a, b in zip(place, each, strict=True)) + NEAR) for each in self._places]
        off = sum(weight * each for weight, each in zip(weights, self._off, strict=True)) / sum(weights)
        return self._slowdown * self._fitted(decode_terms(concurrency, kv_tokens)) * math.exp(off)

    def _fitted(self, terms: Sequence[float]) -> float:
        return sum(each * term for each, term in zip(self._decode, terms, strict=True))


class SLAProfile(Model):
    """Points of engines of one model on one machine.

    Attributes:
        facts: model, machine and settings, the same for all points.
        errors: by setup and by decode or prefill, of points that were left out one by one.
    """

    format: str = FORMAT
    version: int = VERSION
    facts: dict[str, Any]
    points: tuple[Point, ...] = ()
    errors: dict[str, dict[str, FitError]] = Field(default_factory=dict)

    @property
    def setups(self) -> list[Setup]:
        return sorted({each.setup for each in self.points})

    @property
    def worst_error(self) -> float:
        """Largest of the median errors; NaN where none is known."""
        return max((error.median for each in self.errors.values() for error in each.values()), default=math.nan)

    @property
    def slowdown(self) -> float:
        """Return the mean over the points of their mean step over their quickest one: other users of a machine slow it down
        for seconds at a time. The quickest rounds give costs that can be compared; plans need the speed that there is."""
        ratios = [each.mean_step_s / each.step_s for each in self.points if each.mean_step_s is not None]
        return max(1.0, sum(ratios) / len(ratios)) if ratios else 1.0

    def costs(self, setup: Setup, tokens_of_step: float = 1.0) -> SetupCosts:
        """Return the seconds of steps of a setup at the speed that the machine had on average.

        Raises ConfigError: the setup has too few points.
        """
        return SetupCosts(self.of(setup), tokens_of_step, self.slowdown)

    def of(self, setup: Setup) -> list[Point]:
        return [each for each in self.points if each.setup == setup]

    def add(self, point: Point) -> "SLAProfile":
        """Return the profile with a point, and with new errors of its setup. If the point is there the quicker times count,
        since other processes only add time."""
        others = [each for each in self.points if each.place != point.place]
        for known in (each for each in self.points if each.place == point.place):
            both = (known, point)
            prefill_s = min((each.prefill_s for each in both if each.prefill_s is not None), default=None)
            rounds, mean_s = sum(each.rounds for each in both), None
            if known.mean_step_s is not None and point.mean_step_s is not None:
                mean_s = (known.rounds * known.mean_step_s + point.rounds * point.mean_step_s) / rounds
            best = min(both, key=lambda each: each.step_s)
            point = best.model_copy(update={"prefill_s": prefill_s, "mean_step_s": mean_s, "rounds": rounds})
        points = sorted((*others, point), key=lambda each: each.place)
        grown = self.model_copy(update={"points": tuple(points)})
        found = errors_of(grown.of(point.setup))
        return grown.model_copy(update={"errors": self.errors | {name_of(point.setup): found}}) if found else grown

    def write(self, path: Path) -> None:
        """In place of what was there, at once. Raises SpeculationError: the file cannot be written."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def name_of(setup: Setup) -> str:
    return f"tensor_parallel {setup[0]}, lookahead {setup[1]}"


def errors_of(points: Sequence[Point]) -> dict[str, FitError]:
    """Return the errors of each point as predicted by the others; nothing if these are too few."""
    if len(points) < FEWEST_POINTS:
        return {}
    found: dict[str, list[float]] = {"decode": [], "prefill": []}
    for left_out in points:
        try:
            costs = SetupCosts([each for each in points if each is not left_out])
        except ConfigError:
            continue  # too few timed prompts
        found["decode"].append(costs.step_s(left_out.concurrency, left_out.kv_tokens) / left_out.step_s - 1)
        if left_out.prefill_s is not None:
            found["prefill"].append(costs.prefill_s(left_out.prefill_terms) / left_out.prefill_s - 1)
    return {kind: _error(np.abs(errors), len(points)) for kind, errors in found.items() if errors}


def _error(errors: np.ndarray, num_samples: int) -> FitError:
    return FitError(
        num_samples=num_samples, num_held_out=len(errors), median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
    )  # fmt: skip


def _place(concurrency: float, kv_tokens: float) -> tuple[float, float]:
    """Return where a point lies, in doublings."""
    return math.log2(concurrency), math.log2(max(kv_tokens / concurrency, 1.0))


def read_profile(path: Path) -> SLAProfile:
    """Raises ConfigError: no such file, or no profile."""
    again = "measure it: sagellm profile sla MODEL --out FILE"
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
            raise ConfigError(f"{path} is no {FORMAT} of version {VERSION}; {again}.")
        return SLAProfile.model_validate(found)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}; {again}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}; {again}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); {again}.") from None
