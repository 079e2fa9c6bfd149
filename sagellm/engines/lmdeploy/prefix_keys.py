"""64-bit names of cached blocks, for plug-ins and the record: of the prefix up to a block's end and of its namespace."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.engines.lmdeploy.prefix_cache import namespace_of, num_shareable
from sagellm.prefix_reuse import prefix_hashes
from sagellm.prefix_reuse.hashed import namespace_key
from sagellm.prefix_reuse.matcher import extended_hash

Keys = NDArray[np.uint64]

# One block in Python costs some 10 us; the native function starts from the first token, at some GB/s.
MAX_ONE_BY_ONE = 4


class PrefixKeys:
    """`seq` is LMDeploy's `SchedulerSequence`. Keys of tokens that others cannot share (`num_shareable`) are not made."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[int, list[int]] = {}  # seq id -> hashes of its first blocks, without the namespace

    def of_all(self, seq: Any) -> Keys:
        """uint64 [full blocks of its tokens], made anew. O(tokens)."""
        hashes = self._hashed(seq, num_shareable(seq) // self._block_size)
        self._chains[seq.seq_id] = hashes.tolist()
        return hashes ^ namespace_key(namespace_of(seq))

    def of_blocks(self, seq: Any, first: int, last: int) -> tuple[Keys, int | None]:
        """(uint64 [last - first], the key of the block before them) of computed blocks of a sequence.

        O(new blocks) where the sequence was asked for before: the tokens of a computed block do not change.
        """
        chain = self._chains.setdefault(seq.seq_id, [])
        if last - len(chain) > MAX_ONE_BY_ONE or not chain:
            chain[:] = self._hashed(seq, last).tolist()
        tokens, size = seq.history_cache._token_ids, self._block_size
        for block in range(len(chain), last):
            chain.append(extended_hash(chain[-1], tokens[block * size : (block + 1) * size].tolist()))
        mixed_in = namespace_key(namespace_of(seq))
        parent = int(mixed_in) ^ chain[first - 1] if first else None
        return np.array(chain[first:last], np.uint64) ^ mixed_in, parent

    def forget(self, seq_id: int) -> None:
        self._chains.pop(seq_id, None)

    def _hashed(self, seq: Any, num_blocks: int) -> Keys:
        return prefix_hashes(seq.history_cache._token_ids[: num_blocks * self._block_size], self._block_size)


def hexadecimal(keys: Keys) -> list[str]:
    """As the record has them: JSON readers take large numbers for fractions."""
    return [f"{key:016x}" for key in keys.tolist()]
