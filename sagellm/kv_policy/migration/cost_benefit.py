"""Moves what the cost model says is worth it."""

from collections.abc import Iterable
from pathlib import Path

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import MigrationPlan
from sagellm.kv_policy.base import (
    BlockKey,
    CachedBlock,
    LifetimePredictor,
    MigrationContext,
    MigrationDecision,
    MigrationPolicy,
    MigrationPurpose,
)  # fmt: skip
from sagellm.kv_policy.lifetime.history import HistoryLifetime
from sagellm.kv_policy.migration.cost_model import CostBenefitModel
from sagellm.kv_policy.registry import make_lifetime_predictor

__all__ = ["CostBenefit"]


class CostBenefit(MigrationPolicy):
    """Loads the first part of the blocks that saves most time, the longest of several such; nothing where none saves any.
    Demotes those victims that are expected to save more than their share of the move, if together they are worth one.

    Args:
        model: the cost model, or a file that `CostBenefitModel.to_json` was written to; default: the model's guesses.
        lifetime: predictor of whether a block is found again, if the model has no predictor, or its name; default:
            `HistoryLifetime`. It learns from `observe_use`; until then blocks have the model's `reuse`.

    Raises:
        PolicyError: a file that cannot be read or holds no model; an unknown predictor.
    """

    name = "cost"

    def __init__(
        self, model: CostBenefitModel | str | Path | None = None, lifetime: LifetimePredictor | str | None = None
    ) -> None:  # fmt: skip
        if isinstance(lifetime, str):
            lifetime = make_lifetime_predictor(lifetime)
        if not (lifetime is None or isinstance(lifetime, LifetimePredictor)):
            raise PolicyError(f"migration policy cost: lifetime={lifetime!r}; give a lifetime predictor or its name.")
        self.model = model if isinstance(model, CostBenefitModel) else _read(model)
        self._lifetime = self.model.lifetime or lifetime or HistoryLifetime()

    def observe_use(self, keys: Iterable[BlockKey], time_s: float) -> None:
        """These blocks were inserted or found at this moment."""
        for key in keys:
            self._lifetime.observe(key, time_s)
        self.model.lifetime = self._lifetime

    def plan(self, context: MigrationContext) -> MigrationDecision:
        if context.purpose is MigrationPurpose.LOAD:
            blocks, net_s, reason = self._loads(context)
        else:
            blocks, net_s, reason = self._demotions(context)
        keys = tuple(block.key for block in blocks)
        return MigrationDecision(MigrationPlan(context.src_tier, context.dst_tier, keys), net_s, reason)

    def _loads(self, context: MigrationContext) -> tuple[tuple[CachedBlock, ...], float, str]:
        estimates = self.model.evaluate_loads(context)
        if not estimates:
            return (), 0.0, "no blocks"
        best = max(range(len(estimates)), key=lambda place: (estimates[place].net_benefit_s, place))
        transfer_s, recompute_s, net_s = estimates[best]
        costs = f"{transfer_s:.3g} s to load, {recompute_s:.3g} s to compute"
        if net_s <= 0:
            return (), 0.0, costs
        return context.blocks[: best + 1], net_s, costs

    def _demotions(self, context: MigrationContext) -> tuple[tuple[CachedBlock, ...], float, str]:
        per_byte_s = self.model.per_byte_s(context.src_tier, context.dst_tier)
        worth = tuple(
            block for block in context.blocks
            if self.model.saved_later_s(context, block) > per_byte_s * block.size_bytes
        )  # fmt: skip
        transfer_s, _, net_s = self.model.evaluate_demotion(context, worth)
        costs = f"{transfer_s:.3g} s to keep, {net_s + transfer_s:.3g} s saved if found again"
        if not worth or net_s <= 0:
            return (), 0.0, costs
        return worth, net_s, costs


def _read(file: str | Path | None) -> CostBenefitModel:
    if file is None:
        return CostBenefitModel()
    try:
        return CostBenefitModel.from_json(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"cannot read the cost model {file} ({error}); write it with CostBenefitModel.to_json."
        ) from None
