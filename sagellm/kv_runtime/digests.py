"""Which tokens a block holds, as 16 bytes: what a file has beside the key of its block, which is short enough to collide."""

import hashlib
from collections.abc import Sequence

import numpy as np

from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.hierarchy import HierarchyManager

__all__ = ["Digests", "token_digests"]


def token_digests(tokens: np.ndarray, namespace: str, block_size: int, before: bytes = b"") -> list[bytes]:
    """For each full block 16 bytes that stand for the namespace and every token up to its end.

    `before`: the digest of the block before the first of `tokens`; none at the start of a sequence. With blake2b no
    other sequence with the same digest can be built, as it could with the 64-bit keys.
    """
    digest = before or _digest(b"sagellm kv\0" + namespace.encode())
    data = np.ascontiguousarray(tokens, np.int64).tobytes()
    size = block_size * 8
    digests = []
    for start in range(0, len(data) - size + 1, size):
        digest = _digest(digest + data[start : start + size])
        digests.append(digest)
    return digests


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class Digests:
    """One digest a key and one key a digest, as long as the block is on any tier or on its way to one.

    A block of gpu or cpu is `told` while the engine has said, since the block has its name, which tokens it holds.
    """

    def __init__(self, manager: HierarchyManager) -> None:
        self._manager = manager
        self._digest_of: dict[BlockKey, bytes] = {}
        self._key_of: dict[bytes, BlockKey] = {}
        self._told: set[BlockKey] = set()

    def of(self, key: BlockKey) -> bytes:
        """Raises KeyError: no digest is known."""
        return self._digest_of[key]

    def key_of(self, digest: bytes) -> BlockKey | None:
        return self._key_of.get(digest)

    def is_told(self, key: BlockKey | None) -> bool:
        return key in self._told

    def told(self, key: BlockKey | None) -> bytes | None:
        """The digest of what a block of gpu or cpu holds; None where the engine has not told that."""
        return self._digest_of.get(key) if key in self._told else None

    def is_other(self, key: BlockKey, digest: bytes) -> bool:
        """Whether the key stands for other tokens than those of this digest."""
        known = self._digest_of.get(key)
        return bool(known and digest and known != digest)

    def bind(self, key: BlockKey, digest: bytes) -> None:
        """The key stands for these tokens."""
        self._digest_of[key] = digest
        self._key_of[digest] = key

    def tell(self, key: BlockKey) -> None:
        """The block of gpu or cpu holds the tokens that its key stands for."""
        self._told.add(key)

    def untell(self, keys: Sequence[BlockKey]) -> None:
        """Forget the contents of these blocks of gpu or cpu."""
        self._told.difference_update(keys)

    def untell_all(self) -> None:
        self._told.clear()

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks that are on no tier and on their way to none."""
        for key in keys:
            if key not in self._manager.books and not self._manager.is_arriving(key):
                digest = self._digest_of.pop(key, None)
                if digest is not None and self._key_of.get(digest) == key:
                    del self._key_of[digest]
