"""Find sparse policies by name: the files of `policies/`, installed packages, and `module:Class`."""

from typing import Any

from sagellm.accel.sparsity.base import PER, WEIGHTS, SparsePolicy
from sagellm.core.errors import SparsityError
from sagellm.core.registry import Registry

__all__ = ["SPARSITIES", "make_sparsity"]

SPARSITIES = Registry(
    "sparse policy", SparsePolicy, SparsityError, "sagellm.sparsity", folder="sagellm.accel.sparsity.policies"
)


def make_sparsity(name: str, **options: Any) -> SparsePolicy:
    """Return a policy. Raises SparsityError if it is unknown, its options are invalid, or its `per` and `weights` are."""
    policy = SPARSITIES.make(SPARSITIES.find(name), name, **options)
    if policy.per not in PER or policy.weights not in WEIGHTS or (policy.per == "step" and policy.weights):
        raise SparsityError(
            f"sparse policy {name} has per {policy.per!r} and weights {policy.weights!r}; give per {', '.join(PER)}, and with "
            f"layer or head weights {', '.join(map(repr, WEIGHTS))}."
        )
    return policy
