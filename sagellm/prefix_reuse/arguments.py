"""Checks of what callers give a prefix index. All raise `PrefixIndexError`."""

import json
import operator
from typing import Any

import numpy as np

from sagellm.core.errors import PrefixIndexError
from sagellm.core.hooks import Tier
from sagellm.prefix_reuse.base import MAX_BLOCK_SIZE, TIERS, Int32Array, Namespace, RemovalReason

MAX_INT32 = 2**31 - 1


def int32_array(values: Any, name: str) -> Int32Array:
    """`values` as contiguous int32 [n], in place where they are that already; `name` is for the message."""
    allowed = f"{name} must be one-dimensional integers from 0 to {MAX_INT32}"
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise PrefixIndexError(f"{allowed}, got a {type(values).__name__} that is no array of them.") from None
    if array.ndim != 1:
        raise PrefixIndexError(f"{allowed}, got {array.ndim} dimensions; pass one sequence a call.")
    if array.size == 0 and not isinstance(values, np.ndarray):  # numpy takes an empty list for float64
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise PrefixIndexError(f"{allowed}, got dtype {array.dtype}; convert them first.")
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > MAX_INT32:
            raise PrefixIndexError(f"{allowed}, got {low if low < 0 else high}.")
    return np.ascontiguousarray(array, dtype=np.int32)


def integer(value: Any, name: str, low: int = 0, high: int = 2**63 - 1) -> int:
    """Return an integer in a range; a bool is rejected."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not low <= number <= high:
        raise PrefixIndexError(f"{name} must be an integer from {low} to {high}, got {value!r}.")
    return number


def block_size(value: Any) -> int:
    return integer(value, "block_size", 1, MAX_BLOCK_SIZE)


def tier_place(tier: Tier | str) -> int:
    """Its place in `TIERS`."""
    try:
        return TIERS.index(Tier(tier))
    except (ValueError, TypeError):
        known = ", ".join(tier.value for tier in TIERS)
        raise PrefixIndexError(f"tier must be one of {known}, got {tier!r}.") from None


def removal_reason(reason: RemovalReason | str) -> RemovalReason:
    try:
        return RemovalReason(reason)
    except (ValueError, TypeError):
        raise PrefixIndexError(f"reason must be one of {', '.join(RemovalReason)}, got {reason!r}.") from None


def namespace_key(namespace: str | Namespace) -> str:
    parts = namespace if isinstance(namespace, Namespace) else (namespace,)
    if not all(isinstance(part, str) for part in parts):
        raise PrefixIndexError(f"namespace must be a string or a Namespace of strings, got {namespace!r}.")
    key = namespace.key if isinstance(namespace, Namespace) else str(namespace)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise PrefixIndexError(f"namespace must be writable as UTF-8, got {namespace!r}.") from None
    return key


def metadata_json(metadata: dict[str, Any] | None) -> str | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise PrefixIndexError(f"metadata must be a dict or None, got a {type(metadata).__name__}.")
    try:
        return json.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise PrefixIndexError(f"metadata must be writable as JSON: {error}.") from None
