"""A hashed index finds the longest cached prefix, by namespace."""

import numpy as np
import pytest

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import HashedPrefixIndex, prefix_hashes
from tests.prefix_reuse.cases import sequence

BLOCK = 16


def test_it_finds_what_is_stored_and_forgets_what_is_removed():
    index, tokens = HashedPrefixIndex(BLOCK), sequence([1, 2, 3], BLOCK, num_rest=5)
    keys = index.hashes(tokens)
    assert keys == prefix_hashes(tokens, BLOCK).tolist() and len(keys) == 3
    index.store(keys)
    assert index.match(tokens) == index.match(np.array(tokens)) == 48 and len(index) == 3 and keys[2] in index
    assert index.match(sequence([1, 2, 9], BLOCK)) == 32 and index.match(sequence([2], BLOCK)) == index.match([]) == 0
    index.remove(keys[1:2])
    assert index.match(tokens) == 16  # the third block cannot be reached
    index.clear()
    assert (index.match(tokens), len(index)) == (0, 0)


def test_namespaces_share_nothing():
    index, tokens = HashedPrefixIndex(BLOCK), sequence([1, 2], BLOCK)
    index.store(index.hashes(tokens, "a"))
    assert (index.match(tokens, "a"), index.match(tokens, "b"), index.match(tokens)) == (32, 0, 0)


@pytest.mark.parametrize("size", [0, 257, "16"])
def test_bad_sizes_are_refused(size):
    with pytest.raises(PrefixIndexError, match="block_size"):
        HashedPrefixIndex(size)


def test_bad_tokens_are_refused():
    with pytest.raises(PrefixIndexError, match="tokens"):
        HashedPrefixIndex(BLOCK).match("text")
