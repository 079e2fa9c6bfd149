"""Costs of steps and transfers, fitted while the engines run.

Before anything is measured the defaults of `PDCosts` hold, those of a small model on a CPU. A prefill step takes 50 ms and 1
ms a token, a decode step 30 ms and 2 ms a request, a transfer 1 ms at 1 GB/s. They favour a split from some dozen tokens on,
so that transfers are tried and measured. An engine of which nothing is known yet has what was fitted over all engines.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from sagellm.comm_backend.group_messages import StepCost
from sagellm.core.errors import PlanError, PolicyError
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.scheduler_ir.pd_costs import PDCosts, fit_costs, fit_link

__all__ = ["OnlineCosts"]

FEWEST = 5  # samples that a fit needs
MAX_SAMPLES = 512  # of a kind, the latest
SPREAD = 2.0  # between the largest and the smallest sample, for a fit to tell a fixed time from one that grows
FITTED = {
    "prefill": ("prefill_step_s", "prefill_token_s", "prefill_pair_s"),
    "decode": ("decode_step_s", "decode_request_s", "decode_context_s"),
    "transfer": ("link",),
}


class OnlineCosts:
    """Samples by engine, and fits of them. Not thread-safe.

    Args:
        prior: what holds before anything is measured.
        refit_after: new samples of an engine and kind after which its fit is made anew; a fit takes some milliseconds.
    """

    def __init__(self, prior: PDCosts | None = None, refit_after: int = 32) -> None:
        self.prior = prior or PDCosts()
        self._refit_after = refit_after
        self._samples: dict[tuple[str, str], deque[StepCost]] = {}
        self._fresh: dict[tuple[str, str], int] = {}
        self._fits: dict[tuple[str, str], dict[str, Any]] = {}  # "" stands for all engines together

    def observe(self, engine_id: str, costs: Iterable[StepCost]) -> None:
        """Samples that no measurement has (no time, nothing done) are left out."""
        touched = set()
        for cost in costs:
            if not 0 < cost.seconds < 3600 or min(cost.num_tokens, cost.num_requests, cost.num_context, cost.num_bytes) < 0:
                continue
            if not (cost.num_bytes if cost.kind == "transfer" else cost.num_tokens + cost.num_requests):
                continue
            for who in (engine_id, ""):
                key = (who, cost.kind)
                self._samples.setdefault(key, deque(maxlen=MAX_SAMPLES)).append(cost)
                self._fresh[key] = self._fresh.get(key, 0) + 1
                touched.add(key)
        for key in sorted(touched):  # "" first, whose fit gives the others their shape
            num = len(self._samples[key])
            if num >= FEWEST and (key not in self._fits or self._fresh[key] >= min(self._refit_after, num)):
                self._fresh[key] = 0
                if (found := _fit(key[1], self._samples[key], self.of("") if key[0] else self.prior)) is not None:
                    self._fits[key] = found

    def of(self, engine_id: str) -> PDCosts:
        """Return the costs fitted to its own samples, else those fitted to all engines', else the prior."""
        found: dict[str, Any] = {}
        errors: dict[str, Any] = {}
        for kind in FITTED:
            fit = self._fits.get((engine_id, kind)) or self._fits.get(("", kind))
            if fit is not None:
                found |= {name: fit[name] for name in FITTED[kind]}
                errors |= fit["errors"]
        return self.prior.model_copy(update={**found, "errors": errors}) if found else self.prior

    def pair(self, prefill: str, decode: str, token_bytes: int = 1) -> PDCosts:
        """Prompts computed on one engine, tokens on the other, keys and values moved between them."""
        first, second = self.of(prefill), self.of(decode)
        return second.model_copy(
            update={name: getattr(first, name) for name in FITTED["prefill"]} | {"kv_bytes_per_token": max(1, token_bytes)}
        )

    def forget(self, engine_id: str) -> None:
        """It came back, perhaps as another; what all engines together have shown stays."""
        for kind in FITTED:
            for store in (self._samples, self._fresh, self._fits):
                store.pop((engine_id, kind), None)  # type: ignore[attr-defined]

    def report(self, engine_id: str) -> dict[str, Any]:
        """By kind: how many samples there are, where its figures come from, and the median error on samples not seen."""
        report = {}
        for kind in FITTED:
            is_own = (engine_id, kind) in self._fits
            fit = self._fits.get((engine_id, kind)) or self._fits.get(("", kind))
            error = fit["errors"].get(kind) if fit else None
            report[kind] = {
                "num_samples": len(self._samples.get((engine_id, kind), ())),
                "source": "measured" if is_own else "measured on all engines" if fit else "prior",
                "median_error": None if error is None else error.median,
            }
        return report


def _fit(kind: str, samples: Iterable[StepCost], prior: PDCosts) -> dict[str, Any] | None:
    """The fields of `PDCosts` that these samples tell, and "errors"; None where they tell nothing.

    Samples of about one size cannot tell the fixed time of a step from the time of a token. A fit would put it all into one of
    the two: a prompt whose prefix is cached would cost as much as a whole one. Then the prior, or the fit of all engines,
    keeps its shape, and is scaled to what was measured.
    """
    samples = list(samples)
    if not _is_spread(kind, samples):
        return _scaled(kind, samples, prior) | {"errors": {}}
    try:
        if kind == "transfer":
            link, error = fit_link([(one.num_bytes, one.seconds) for one in samples])
            return {"link": link, "errors": {} if error is None else {kind: error}}
        costs = fit_costs(
            {
                "phase": kind, "seconds": one.seconds, "tokens": one.num_tokens, "requests": one.num_requests,
                "context": one.num_context, "t_ns": 0,
            }
            for one in samples
        )  # fmt: skip
    except (PlanError, PolicyError):  # times that do not grow with the size
        return _scaled(kind, samples, prior) | {"errors": {}}
    return {name: getattr(costs, name) for name in FITTED[kind]} | {"errors": dict(costs.errors)}


def _is_spread(kind: str, samples: Sequence[StepCost]) -> bool:
    name = {"prefill": "num_tokens", "decode": "num_requests", "transfer": "num_bytes"}[kind]
    sizes = [max(1, getattr(one, name)) for one in samples]
    return max(sizes) >= SPREAD * min(sizes)


def _scaled(kind: str, samples: Sequence[StepCost], prior: PDCosts) -> dict[str, Any]:
    ratio = median(one.seconds / _predicted(one, prior) for one in samples)
    if kind == "transfer":
        return {"link": Link(latency_s=prior.link.latency_s * ratio, bytes_per_s=prior.link.bytes_per_s / ratio)}
    return {name: ratio * getattr(prior, name) for name in FITTED[kind]}


def _predicted(one: StepCost, costs: PDCosts) -> float:
    if one.kind == "transfer":
        seconds = costs.transfer_s("", "", one.num_bytes)
    elif one.kind == "prefill":
        seconds = costs.prefill_s(one.num_tokens, one.num_context // max(1, one.num_requests))
    else:
        seconds = costs.decode_s(one.num_requests, one.num_context)
    return max(seconds, 1e-9)
