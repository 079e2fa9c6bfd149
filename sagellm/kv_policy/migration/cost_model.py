"""Cost of moving blocks between tiers, and of computing them again."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field, ValidationError

from sagellm.core.config import Model
from sagellm.core.errors import PolicyError
from sagellm.core.step_times import FitError, fit_held_out, num_pairs
from sagellm.kv_policy.base import (
    CachedBlock,
    LifetimePredictor,
    MigrationContext,
    MigrationEstimate,
    MigrationPurpose,
    Tier,
)  # fmt: skip
from sagellm.kv_policy.lifetime.base import GapPredictor, reuse_probability

__all__ = ["PREFILL", "CostBenefitModel", "CostParameters", "FitError", "Link", "link_name"]

PREFILL = "prefill"
LARGEST_CORRECTION = 100.0
FEW_GAPS = 20  # of which nothing can be learned yet
SPREAD = 2.0  # between the largest and the smallest sample, for a fit to tell a fixed time from one that grows


class Link(Model):
    """Seconds to move n bytes = latency_s + n / bytes_per_s."""

    latency_s: float = Field(ge=0, allow_inf_nan=False)
    bytes_per_s: float = Field(gt=0, allow_inf_nan=False)


GUESSED_LINKS = {
    "gpu->cpu": Link(latency_s=1e-4, bytes_per_s=3e9),
    "cpu->gpu": Link(latency_s=1e-4, bytes_per_s=3e9),
    "cpu->nvme": Link(latency_s=2e-3, bytes_per_s=3e8),
    "nvme->cpu": Link(latency_s=1e-3, bytes_per_s=5e8),
}


class CostParameters(Model):
    """Everything that is measured. The defaults are a small CPU machine's, to be replaced by `CostBenefitModel.fit`.

    Attributes:
        links: by `link_name`; "nvme->gpu" goes by way of cpu where it is not given, and so back.
        prefill_step_s: of a prefill step, whatever its length.
        prefill_token_s, prefill_token_context_s: a and b of seconds a token = a + b * tokens before it.
        errors: relative errors of the fits on samples they had not seen, by `link_name` and "prefill".
    """

    links: dict[str, Link] = Field(default_factory=lambda: dict(GUESSED_LINKS))
    prefill_step_s: float = Field(0.05, ge=0, allow_inf_nan=False)
    prefill_token_s: float = Field(1e-3, ge=0, allow_inf_nan=False)
    prefill_token_context_s: float = Field(1e-7, ge=0, allow_inf_nan=False)
    errors: dict[str, FitError] = Field(default_factory=dict)


def link_name(source: Tier, target: Tier) -> str:
    """For example "cpu->nvme"."""
    return f"{source.value}->{target.value}"


class CostBenefitModel:
    """Load against recompute, and keep against drop, in seconds.

    Time to move is that of the link, behind the bytes that are queued there. Time to compute counts each token at its place in
    the sequence, but no step of its own, since a request whose prefix is loaded has a prefill step to run all the same. While
    `num_running` requests share the engine, computing delays all of them: it counts 1 + `load_weight` * (num_running - 1)
    times. Corrections learned from `observe` multiply both.

    Args:
        parameters: measured; `fit` makes them.
        lifetime: predicts whether a block is found again; without one, or while it has seen next to nothing, `reuse` is
            the probability for each.
        horizon_s: a block that is kept is expected to stay this long.
        reuse: see `lifetime`; 0 to 1.
        load_weight: see above; 0 to 1.
        smoothing: weight of one observation in the corrections, above 0, at most 1.
    """

    def __init__(
        self,
        parameters: CostParameters | None = None,
        *,
        lifetime: LifetimePredictor | None = None,
        horizon_s: float = 600.0,
        reuse: float = 0.5,
        load_weight: float = 1.0,
        smoothing: float = 0.1,
    ) -> None:
        for name, value, low, high in (
            ("horizon_s", horizon_s, 0, math.inf), ("reuse", reuse, 0, 1), ("load_weight", load_weight, 0, 1),
            ("smoothing", smoothing, 1e-6, 1),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise PolicyError(f"cost model: {name}={value!r}; give a number from {low:g} to {high:g}.")
        self.parameters = parameters or CostParameters()
        self.lifetime = lifetime
        self.horizon_s = horizon_s
        self.reuse = reuse
        self.load_weight = load_weight
        self.smoothing = smoothing
        self._corrections: dict[str, float] = {}

    @classmethod
    def fit(
        cls,
        prefill: Sequence[tuple[int, int, float]] = (),
        copies: Mapping[str, Sequence[tuple[int, float]]] | None = None,
        **options: object,
    ) -> "CostBenefitModel":
        """A model of measured times, by least squares of the relative error with no negative coefficient. Every fifth sample
        is held out, and the error there is reported in `parameters.errors`. Parameters without samples keep their defaults.

        Samples of about one size cannot tell what a step or a move costs by itself from what each token or byte costs, nor a
        token from those before it: all is then the token's, or the byte's. Where times do not grow with the
        size at all, the cost of a token or a byte keeps its default too, since nothing is moved or computed in no time. The
        errors reported are then those of the fitted constant.

        Args:
            prefill: (tokens, tokens before them, seconds) of prefill steps.
            copies: by `link_name`, (bytes, seconds) of moves.
            options: of the model.

        Raises:
            PolicyError: fewer than 5 samples of a kind, all of nothing, or one that is no measurement.
        """
        values = CostParameters().model_dump()
        errors: dict[str, FitError] = {}
        if prefill:
            found, errors[PREFILL] = _fit_prefill(prefill)
            if not any(found[1:]):
                found[1] = values["prefill_token_s"]
            values |= dict(zip(("prefill_step_s", "prefill_token_s", "prefill_token_context_s"), found, strict=True))
        for name, samples in (copies or {}).items():
            has_latency = _spread(num_bytes for num_bytes, _ in samples)
            rows = [((has_latency, num_bytes), seconds) for num_bytes, seconds in samples]
            found, errors[name] = fit_held_out(name, rows)
            guess = values["links"].get(name, GUESSED_LINKS["cpu->nvme"].model_dump())["bytes_per_s"]
            bytes_per_s = 1 / max(found[1], 1e-15) if found[1] > 0 else guess
            values["links"][name] = {"latency_s": found[0], "bytes_per_s": bytes_per_s}
        return cls(CostParameters(**values | {"errors": errors}), **options)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Parameters and corrections; `from_json` reads them."""
        return json.dumps({"parameters": self.parameters.model_dump(), "corrections": self._corrections}, indent=1)

    @classmethod
    def from_json(cls, text: str, **options: object) -> "CostBenefitModel":
        """Raises PolicyError: the text is not what `to_json` writes."""
        try:
            document = json.loads(text)
            if unknown := sorted(set(document) - {"parameters", "corrections"}):
                raise ValueError(f"it has {unknown}")
            model = cls(CostParameters(**document["parameters"]), **options)  # type: ignore[arg-type]
            model._corrections = {str(name): float(factor) for name, factor in document.get("corrections", {}).items()}
            for name, factor in model._corrections.items():
                if name != PREFILL and name not in model.parameters.links:
                    raise ValueError(f"it corrects {name}, which it has not")
                if not 1 / LARGEST_CORRECTION <= factor <= LARGEST_CORRECTION:
                    raise ValueError(f"its correction of {name} is {factor}, not from .01 to 100")
        except (ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
            raise PolicyError(f"this is no cost model ({error}); give what CostBenefitModel.to_json writes.") from None
        return model

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds of a prefill step of so many tokens behind `num_before` others."""
        return self.parameters.prefill_step_s * self._correction(PREFILL) + self._marginal_s(num_tokens, num_before)

    def transfer_s(self, source: Tier, target: Tier, num_bytes: int, queued_bytes: int = 0) -> float:
        """Seconds until so many bytes have moved behind those that are queued.

        Raises:
            PolicyError: no link, direct or by way of cpu.
        """
        links = self.parameters.links
        names = [link_name(source, target)]
        if names[0] not in links:
            names = [link_name(source, Tier.CPU), link_name(Tier.CPU, target)]
        if not all(name in links for name in names):
            raise PolicyError(
                f"no link {link_name(source, target)}; known are: {', '.join(links)}. Measure and fit it."
            )
        total_bytes = num_bytes + queued_bytes
        return sum(
            self._correction(name) * (links[name].latency_s + total_bytes / links[name].bytes_per_s) for name in names
        )

    def evaluate_migration(self, context: MigrationContext) -> MigrationEstimate:
        """The estimate for all blocks of the context together. Raises PolicyError: no such link."""
        if context.purpose is MigrationPurpose.LOAD:
            estimates = self.evaluate_loads(context)
            return estimates[-1] if estimates else MigrationEstimate(0.0, 0.0, 0.0)
        return self.evaluate_demotion(context, context.blocks)

    def evaluate_loads(self, context: MigrationContext) -> list[MigrationEstimate]:
        """For each length of the first part of the blocks, 1 to all of them: what loading that part saves. O(blocks).

        Where others leave for them, those are wanted again with probability `reuse`, and are loaded then in their turn.
        """
        estimates = []
        num_before, num_bytes, recompute_s, leaving_s = context.num_tokens_before, 0, 0.0, 0.0
        byte_s = self.per_byte_s(context.src_tier, context.dst_tier)
        for block in context.blocks:
            own_s = block.cost_s if block.cost_s > 0 else self._marginal_s(block.num_tokens, num_before)
            recompute_s += own_s * self._load(context)
            num_before += block.num_tokens
            num_bytes += block.size_bytes
            if context.num_free is not None and len(estimates) >= context.num_free:
                leaving_s += self.reuse * byte_s * block.size_bytes
            transfer_s = self.transfer_s(context.src_tier, context.dst_tier, num_bytes, context.queued_bytes) + leaving_s
            estimates.append(MigrationEstimate(transfer_s, recompute_s, recompute_s - transfer_s))
        return estimates

    def evaluate_demotion(self, context: MigrationContext, blocks: Sequence[CachedBlock]) -> MigrationEstimate:
        """Estimate the saving of keeping these blocks on the slower tier.

        For each block: the probability that it is found again, times the saving of a load over computing it. The time to
        move all of them now is subtracted.
        """
        if not blocks:
            return MigrationEstimate(0.0, 0.0, 0.0)
        num_bytes = sum(block.size_bytes for block in blocks)
        transfer_s = self.transfer_s(context.src_tier, context.dst_tier, num_bytes, context.queued_bytes)
        saved_s = sum(self.saved_later_s(context, block) for block in blocks)
        recompute_s = sum(self._block_s(block) for block in blocks)
        return MigrationEstimate(transfer_s, recompute_s, saved_s - transfer_s)

    def saved_later_s(self, context: MigrationContext, block: CachedBlock) -> float:
        """Return the expected saving of keeping a block that is found again; the load's fixed time counts for other blocks."""
        probability = self.reuse
        lifetime = self.lifetime
        if lifetime is not None and not (isinstance(lifetime, GapPredictor) and lifetime.num_gaps < FEW_GAPS):
            probability = reuse_probability(lifetime, block.key, context.time_s, self.horizon_s)
        back_s = self.per_byte_s(context.dst_tier, context.src_tier) * block.size_bytes
        return probability * max(0.0, self._block_s(block) - back_s)

    def per_byte_s(self, source: Tier, target: Tier) -> float:
        """Seconds that each further byte takes."""
        return (self.transfer_s(source, target, 2**30) - self.transfer_s(source, target, 0)) / 2**30

    def observe(self, kind: str, predicted_s: float, measured_s: float) -> None:
        """Learn from one outcome. `kind`: "prefill" or a `link_name`. Times that are not positive teach nothing.

        The correction is a moving geometric mean of measured / predicted, between 1/100 and 100.

        Raises:
            PolicyError: an unknown kind.
        """
        if kind != PREFILL and kind not in self.parameters.links:
            raise PolicyError(f"unknown kind {kind!r}; known are: {PREFILL}, {', '.join(self.parameters.links)}.")
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            return
        corrected = self._correction(kind) * (measured_s / predicted_s) ** self.smoothing
        self._corrections[kind] = min(max(corrected, 1 / LARGEST_CORRECTION), LARGEST_CORRECTION)

    def _correction(self, kind: str) -> float:
        return self._corrections.get(kind, 1.0)

    def _load(self, context: MigrationContext) -> float:
        return 1.0 + self.load_weight * max(0, context.num_running - 1)

    def _block_s(self, block: CachedBlock) -> float:
        if block.cost_s > 0:
            return block.cost_s
        return self._marginal_s(block.num_tokens, (block.depth - 1) * block.num_tokens)

    def _marginal_s(self, num_tokens: int, num_before: int) -> float:
        parameters = self.parameters
        context_s = parameters.prefill_token_context_s * num_pairs(num_tokens, num_before)
        return (parameters.prefill_token_s * num_tokens + context_s) * self._correction(PREFILL)


def _fit_prefill(samples: Sequence[tuple[int, int, float]]) -> tuple[list[float], FitError]:
    has_step = _spread(tokens for tokens, _, _ in samples)
    has_context = _spread(before + tokens / 2 for tokens, before, _ in samples)
    rows = [
        ((has_step, tokens, has_context * num_pairs(tokens, before)), seconds) for tokens, before, seconds in samples
    ]
    return fit_held_out(PREFILL, rows)


def _spread(sizes: Iterable[float]) -> float:
    """1.0 if the largest is far from the smallest, else 0.0, a term of which least squares make nothing."""
    known = sorted(sizes)
    return float(bool(known) and known[-1] >= SPREAD * known[0] and known[-1] > 0)
