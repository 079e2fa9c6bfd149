"""Moves nothing."""

from sagellm.core.hooks import MigrationPlan
from sagellm.kv_policy.base import MigrationContext, MigrationDecision, MigrationPolicy

__all__ = ["Never"]


class Never(MigrationPolicy):
    """Victims are dropped, and what is not on the fast tier is computed again: the baseline without tiers."""

    name = "never"

    def plan(self, context: MigrationContext) -> MigrationDecision:
        return MigrationDecision(MigrationPlan(context.src_tier, context.dst_tier, ()), 0.0, "never")
