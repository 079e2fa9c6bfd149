"""A prefix index that keeps one 64-bit hash a block and no tokens: what a router knows of an engine's cache."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm._core import prefix_hashes
from sagellm.prefix_reuse import arguments
from sagellm.prefix_reuse.base import Namespace

__all__ = ["HashedPrefixIndex", "namespace_key"]


@lru_cache(maxsize=1024)
def namespace_key(namespace: str) -> np.uint64:
    """Return the number that a namespace's hashes are xored with; 0 for the empty namespace."""
    digest = blake2b(namespace.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little") if namespace else 0)


class HashedPrefixIndex:
    """Finds the longest cached prefix by the hash of each block's whole prefix. Not thread-safe.

    A wrong match needs two prefixes with one 64-bit hash. Use it where a wrong match costs time only.

    Args:
        block_size: tokens a block, 1 to 256.

    Raises:
        PrefixIndexError: the block size is invalid.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = arguments.block_size(block_size)
        self._hashes: set[int] = set()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._hashes)

    def __contains__(self, key: int) -> bool:
        return key in self._hashes

    def __iter__(self) -> Any:
        return iter(self._hashes)

    def hashes(self, tokens: Sequence[int] | NDArray[Any], namespace: str | Namespace = "") -> list[int]:
        """Return one hash for each full block of `tokens`."""
        key = namespace_key(arguments.namespace_key(namespace))
        return (prefix_hashes(arguments.int32_array(tokens, "tokens"), self.block_size) ^ key).tolist()

    def store(self, hashes: Iterable[int]) -> None:
        self._hashes.update(hashes)

    def remove(self, hashes: Iterable[int]) -> None:
        self._hashes.difference_update(hashes)

    def clear(self) -> None:
        self._hashes.clear()

    def match_hashes(self, hashes: Sequence[int]) -> int:
        """Return the tokens of the longest cached prefix whose block hashes begin `hashes`."""
        known, num = self._hashes, 0
        for key in hashes:
            if key not in known:
                break
            num += 1
        return num * self.block_size

    def match(self, tokens: Sequence[int] | NDArray[Any], namespace: str | Namespace = "") -> int:
        """Return how many of the first `tokens` are cached."""
        return self.match_hashes(self.hashes(tokens, namespace))
