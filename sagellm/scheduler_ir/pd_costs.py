"""Costs of prefill, decode and transfers of keys and values, and their measurement."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field, ValidationError

from sagellm.core.config import Model
from sagellm.core.errors import PlanError
from sagellm.core.step_times import FitError, decode_terms, fit_held_out, num_pairs, prefill_terms
from sagellm.kv_policy.migration.cost_model import Link

__all__ = ["PDCosts", "fit_costs", "fit_link", "read_steps"]

NS = 1e-9


class PDCosts(Model):
    """Everything that is measured; `fit_costs` makes it. The defaults are guesses for a small model on a CPU.

    Attributes:
        prefill_step_s, prefill_token_s, prefill_pair_s: seconds of a prefill step = a + b * tokens + c * pairs, the pairs of a
            token and one before it that attention sees.
        decode_step_s, decode_request_s, decode_context_s: seconds of a decode step = a + b * requests + c * tokens before.
        interference: of a prefill step's seconds, the share by which the next token of each stream on its instance is late.
        link: from an instance to another, where `links` has none for the pair ("p0->d0").
        kv_bytes_per_token: keys and values of all layers.
        logits_bytes: of one token's.
        errors: relative errors of the fits on samples that they had not seen, by "prefill", "decode" and "transfer".
    """

    prefill_step_s: float = Field(0.05, ge=0)
    prefill_token_s: float = Field(1e-3, ge=0)
    prefill_pair_s: float = Field(1e-7, ge=0)
    decode_step_s: float = Field(0.03, ge=0)
    decode_request_s: float = Field(2e-3, ge=0)
    decode_context_s: float = Field(1e-7, ge=0)
    interference: float = Field(1.0, ge=0)
    link: Link = Link(latency_s=1e-3, bytes_per_s=1e9)
    links: dict[str, Link] = Field(default_factory=dict)
    kv_bytes_per_token: int = Field(12288, ge=1)
    logits_bytes: int = Field(4 * 151_936, ge=1)
    errors: dict[str, FitError] = Field(default_factory=dict)

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """One step: so many tokens of one prompt behind `num_before` others."""
        pairs = num_pairs(num_tokens, num_before)
        return self.prefill_step_s + self.prefill_token_s * num_tokens + self.prefill_pair_s * pairs

    def decode_s(self, num_requests: int, num_context: int = 0) -> float:
        """One step. `num_context`: tokens before, summed over the requests."""
        return self.decode_step_s + self.decode_request_s * num_requests + self.decode_context_s * num_context

    def transfer_s(self, source: str, target: str, num_bytes: int) -> float:
        link = self.links.get(f"{source}->{target}", self.link)
        return link.latency_s + num_bytes / link.bytes_per_s

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str) -> "PDCosts":
        """Raises PlanError: a field that is unknown or out of range, by name, or no JSON."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise PlanError(f"costs: {where}: {first['msg']}; give what PDCosts.to_json writes.") from None


def read_steps(path: Path | str) -> list[dict[str, Any]]:
    """The `step` lines of an event log, in its order. Raises PlanError: no file, or none of them."""
    try:
        with Path(path).open() as file:
            lines = [line for line in file if '"step"' in line]
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}; give an event log.") from None
    steps = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line of a process that was killed
        if isinstance(event, dict) and event.get("event") == "step":
            steps.append(event)
    if not steps:
        raise PlanError(f"{path} has no line of a step; record a run with `record` in the configuration.")
    return steps


def fit_costs(
    steps: Iterable[dict[str, Any]], transfers: Sequence[tuple[int, float]] | float = (), **known: Any
) -> PDCosts:
    """Costs from the `step` lines of one engine. A cost with too few samples keeps its default.

    Args:
        steps: as `read_steps` gives them; such with no `seconds` are left out.
        transfers: (bytes, seconds), such as `KVMigrator.samples`, or bytes per second.
        known: other fields of `PDCosts`.

    Raises:
        PlanError: a line without its fields, or a field that is out of range.
        PolicyError: samples of sizes or times that no measurement has.
    """
    steps = list(steps)
    rows: dict[str, list[tuple[tuple[float, ...], float]]] = {"prefill": [], "decode": []}
    try:
        for step in steps:
            if step["seconds"] > 0:
                tokens, requests, context = step["tokens"], max(1, step["requests"]), step["context"]
                is_prefill = step["phase"] == "prefill"
                terms = prefill_terms(tokens, context, requests) if is_prefill else decode_terms(requests, context)
                rows[step["phase"]].append((terms, step["seconds"]))
        shares = _shares(steps)
    except (KeyError, TypeError) as error:
        raise PlanError(f"a line of a step has no {error}; give lines of an engine's event log.") from None
    found: dict[str, Any] = {"errors": {}}
    for kind, names in (
        ("prefill", ("prefill_step_s", "prefill_token_s", "prefill_pair_s")),
        ("decode", ("decode_step_s", "decode_request_s", "decode_context_s")),
    ):
        if len(rows[kind]) >= 5:
            coefficients, found["errors"][kind] = fit_held_out(kind, rows[kind])
            found |= dict(zip(names, coefficients, strict=True))
    if shares:
        found["interference"] = max(0.0, median(shares))
    if transfers:
        found["link"], error = fit_link(transfers)
        if error is not None:
            found["errors"]["transfer"] = error
    try:
        return PDCosts(**(found | known))
    except ValidationError as error:
        raise PlanError(f"costs: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}.") from None


def fit_link(samples: Sequence[tuple[int, float]] | float) -> tuple[Link, FitError | None]:
    """Latency and bandwidth of a transfer. Return a link with a bandwidth only: no latency, and no known error.

    Raises:
        PolicyError: fewer than 5 samples, or such that no measurement has.
        PlanError: times that do not grow with the bytes, or a bandwidth that is not above 0.
    """
    if isinstance(samples, (int, float)):
        if not samples > 0:
            raise PlanError(f"bandwidth {samples!r}; give bytes per second above 0.")
        return Link(latency_s=0.0, bytes_per_s=float(samples)), None
    (latency_s, byte_s), error = fit_held_out("transfers", [((1.0, size), seconds) for size, seconds in samples])
    if not byte_s > 0:
        raise PlanError("the transfers take the same time whatever their size; measure larger ones.")
    return Link(latency_s=latency_s, bytes_per_s=1 / byte_s), error


def _shares(steps: Sequence[dict[str, Any]]) -> list[float]:
    """Between two decode steps with prefill steps between them: by how much the second was late, over these steps' seconds."""
    shares = []
    last_ns, prefill_s = None, 0.0
    for step in steps:
        if step["phase"] == "prefill":
            prefill_s += step["seconds"]
            continue
        if last_ns is not None and prefill_s > 0 and step["seconds"] > 0:
            shares.append(((step["t_ns"] - last_ns) * NS - step["seconds"]) / prefill_s)
        last_ns, prefill_s = step["t_ns"], 0.0
    return shares
