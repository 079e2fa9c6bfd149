"""Follows a room decision on a backend at once: drops, then moves, then tells the books what has happened."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.base import RoomDecision

if TYPE_CHECKING:
    from sagellm.kv_runtime.hierarchy import HierarchyManager


def carry_out(manager: "HierarchyManager", room: RoomDecision, time_s: float, deadline_s: float) -> None:
    """Raises RuntimeError: the manager was built without a backend."""
    if manager.backend is None:
        raise RuntimeError("a decision is carried out on a backend; this manager was built without one")
    for tier, drops in groupby(room.drop, key=lambda each: each[0]):
        _drop(manager, tier, [key for _, key, _ in drops], time_s)
    for plan in room.demote:
        if plan.dst_tier is Tier.NVME:
            _save(manager, plan, time_s, deadline_s)
        else:
            result = manager.backend.migrate(plan)
            manager.moved(plan, result, time_s)
            # What hangs below a block that goes for good goes with it; its own children came before it.
            for key in (BlockKey(key) for key in result.refused):
                below = manager.books.below(key, plan.dst_tier)
                _drop(manager, plan.dst_tier, below, time_s)
                _drop(manager, plan.src_tier, [key], time_s)


def _drop(manager: "HierarchyManager", tier: Tier, keys: Sequence[BlockKey], time_s: float) -> None:
    if keys:
        manager.backend.drop(tier, keys)
        manager.dropped(tier, keys, time_s)


def _save(manager: "HierarchyManager", plan: MigrationPlan, time_s: float, deadline_s: float) -> None:
    keys = [BlockKey(key) for key in plan.block_ids]
    manager.saving(keys, time_s)
    result: MigrationResult = manager.backend.save(keys, plan.dst_tier, deadline_s).result()
    manager.saved([BlockKey(key) for key in result.moved], time_s)
    for key, reason in result.refused.items():
        manager.failed([BlockKey(key)], reason, time_s)
    _drop(manager, plan.src_tier, keys, time_s)
