"""Which KV blocks hold the beginning of a request's tokens."""

from sagellm._core import IndexedPool
from sagellm.prefix_reuse.base import (
    TIERS,
    CachedBlocks,
    Namespace,
    PrefixEntry,
    PrefixEvent,
    PrefixEventKind,
    PrefixEvents,
    PrefixHit,
    PrefixIndex,
    PrefixRemoval,
    RemovalReason,
)
from sagellm.prefix_reuse.hashed import HashedPrefixIndex
from sagellm.prefix_reuse.matcher import PrefixMatcher, Verdict
from sagellm.prefix_reuse.metrics import PrefixReuseMetrics
from sagellm.prefix_reuse.mirror import EventGap, PrefixChanges, PrefixMirror, changes_of, snapshot_of
from sagellm.prefix_reuse.native import PrefixReuseIndex, prefix_hashes
from sagellm.prefix_reuse.pool import ReferenceIndexedPool
from sagellm.prefix_reuse.reference import ReferencePrefixIndex

__all__ = [
    "TIERS",
    "CachedBlocks",
    "EventGap",
    "HashedPrefixIndex",
    "IndexedPool",
    "Namespace",
    "PrefixChanges",
    "PrefixEntry",
    "PrefixEvent",
    "PrefixEventKind",
    "PrefixEvents",
    "PrefixHit",
    "PrefixIndex",
    "PrefixMatcher",
    "PrefixMirror",
    "PrefixRemoval",
    "PrefixReuseIndex",
    "PrefixReuseMetrics",
    "ReferenceIndexedPool",
    "ReferencePrefixIndex",
    "RemovalReason",
    "Verdict",
    "changes_of",
    "prefix_hashes",
    "snapshot_of",
]
