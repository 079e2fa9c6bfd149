"""Moves whatever could be moved."""

from sagellm.core.hooks import MigrationPlan
from sagellm.kv_policy.base import MigrationContext, MigrationDecision, MigrationPolicy

__all__ = ["Always"]


class Always(MigrationPolicy):
    """Every victim is kept on the slower tier, and every block found there is loaded."""

    name = "always"

    def plan(self, context: MigrationContext) -> MigrationDecision:
        keys = tuple(block.key for block in context.blocks)
        return MigrationDecision(MigrationPlan(context.src_tier, context.dst_tier, keys), 0.0, "always")
