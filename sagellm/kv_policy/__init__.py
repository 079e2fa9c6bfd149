"""Which cached blocks to give up, which to move between tiers, and how long each will be of use."""

from sagellm.kv_policy.base import (
    BlockKey,
    BlockView,
    CachedBlock,
    EvictionDecision,
    EvictionPolicy,
    LifetimePredictor,
    MigrationContext,
    MigrationDecision,
    MigrationEstimate,
    MigrationPolicy,
    MigrationPurpose,
    PolicyContext,
    PoolStats,
    Tier,
    check_decision,
)  # fmt: skip
from sagellm.kv_policy.contract.rules import ContractReport, check_policy
from sagellm.kv_policy.lifetime.base import Calibration, calibrate, calibration_error
from sagellm.kv_policy.migration.calibrate import calibrate_copies
from sagellm.kv_policy.migration.cost_model import CostBenefitModel, CostParameters, Link
from sagellm.kv_policy.object_cache import ReferenceObjectCache
from sagellm.kv_policy.registry import (
    find_lifetime_predictor,
    find_migration_policy,
    find_policy,
    lifetime_predictor_names,
    make_lifetime_predictor,
    make_migration_policy,
    make_policy,
    migration_policy_names,
    policy_names,
)  # fmt: skip

__all__ = [
    "BlockKey", "BlockView", "CachedBlock", "Calibration", "ContractReport", "CostBenefitModel", "CostParameters",
    "EvictionDecision", "EvictionPolicy", "LifetimePredictor", "Link", "MigrationContext", "MigrationDecision",
    "MigrationEstimate", "MigrationPolicy", "MigrationPurpose", "PolicyContext", "PoolStats", "ReferenceObjectCache", "Tier",
    "calibrate", "calibrate_copies", "calibration_error", "check_decision", "check_policy", "find_lifetime_predictor",
    "find_migration_policy", "find_policy", "lifetime_predictor_names", "make_lifetime_predictor", "make_migration_policy",
    "make_policy", "migration_policy_names", "policy_names",
]  # fmt: skip
