"""Find sparse policies by name: the files of `policies/`, installed packages, and `module:Class`."""

from typing import Any

from sagellm.accel.sparsity.base import SparsePolicy, wrong_kind
from sagellm.core.errors import SparsityError
from sagellm.core.registry import Registry

__all__ = ["SPARSITIES", "make_sparsity"]

SPARSITIES = Registry(
    "sparse policy", SparsePolicy, SparsityError, "sagellm.sparsity", folder="sagellm.accel.sparsity.policies"
)


def make_sparsity(name: str, **options: Any) -> SparsePolicy:
    """Return a policy. Raises SparsityError if it is unknown, its options are invalid, or its `per` and `weights` are."""
    policy = SPARSITIES.make(SPARSITIES.find(name), name, **options)
    if fault := wrong_kind(policy):
        raise SparsityError(f"sparse policy {name} {fault}.")
    return policy
