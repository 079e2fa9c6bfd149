"""The native indices of n-grams and suffixes against their plain twins, and by themselves."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sagellm import _core
from sagellm.accel.speculative.reference import ReferenceNgramIndex, ReferenceSuffixHistory, ReferenceSuffixIndex


def words(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Random tokens, or a few that repeat."""
    if rng.random() < 0.7:
        return [rng.randrange(vocab_size) for _ in range(num_tokens)]
    base = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
    return (base * num_tokens)[:num_tokens]


def grown(rng: random.Random, text: list[int], vocab_size: int) -> list[int]:
    """Return the next tokens of a text: something new, or a copy of something before."""
    if text and rng.random() < 0.5:
        start = rng.randrange(len(text))
        return text[start : start + rng.randint(1, 12)]
    return words(rng, rng.randint(1, 6), vocab_size)


@pytest.mark.parametrize("seed", range(8))
def test_native_indices_guess_as_their_twins(seed: int):
    rng, num_guessed, num_by_history, num_branches = random.Random(seed), 0, 0, 0
    for _ in range(25):
        vocab_size, depth = rng.choice([1, 2, 3, 8, 40]), rng.choice([2, 3, 5, 8, 32])
        low, room = rng.randint(1, 3), rng.choice([0, 5, 30, 80])
        high = rng.randint(low, 6)
        ngrams, plain_ngrams = _core.NgramIndex(low, high), ReferenceNgramIndex(low, high)
        suffixes, plain_suffixes = _core.SuffixIndex(depth), ReferenceSuffixIndex(depth)
        history, plain_history = _core.SuffixHistory(depth, room), ReferenceSuffixHistory(depth, room)
        text: list[int] = []
        for _ in range(rng.randint(1, 25)):
            if rng.random() < 0.3:
                ended = words(rng, rng.randint(0, 40), vocab_size) + text[len(text) - rng.randint(0, 20) :]
                history.add(ended)
                plain_history.add(ended)
                assert len(history) == len(plain_history) <= room
            new = grown(rng, text, vocab_size)
            text = text + new
            if rng.random() < 0.05:
                text = words(rng, rng.randint(1, 20), vocab_size)  # another text than the one they were told
            elif rng.random() < 0.8:  # else the indices are not told
                for index in (ngrams, plain_ngrams, suffixes, plain_suffixes):
                    index.append(new)
            tokens, limit, least = np.array(text, np.int64), rng.choice([1, 2, 4, 8, 40]), rng.choice([0.0, 0.1, 0.2, 0.5])
            assert ngrams.propose(tokens, limit) == plain_ngrams.propose(tokens, limit)
            alone = suffixes.propose(tokens, limit, least)
            assert alone == plain_suffixes.propose(tokens, limit, least)
            both = suffixes.propose(tokens, limit, least, history)
            assert both == plain_suffixes.propose(tokens, limit, least, plain_history)
            for other in ((), (history, plain_history)):
                tree = suffixes.propose_tree(tokens, limit, least, *other[:1])
                assert tree == plain_suffixes.propose_tree(tokens, limit, least, *other[1:])
            num_branches += sum(map(bool, (parent != node - 1 for node, parent in enumerate(tree[1]))))
            num_guessed, num_by_history = num_guessed + bool(both), num_by_history + (both != alone)
        assert ngrams.tokens().tolist() == suffixes.tokens().tolist() == text and len(suffixes) == len(ngrams) == len(text)
        assert suffixes.tokens(len(text) - 1).tolist() == text[-1:]
    assert num_guessed > 100 and num_by_history > 10 and num_branches > 100


def test_memory_of_trees_is_bounded_by_tokens():
    rng = np.random.default_rng(0)
    history, most = _core.SuffixHistory(32, 4000), 0
    for vocab_size in (2, 40, 30_000):
        index = _core.SuffixIndex(32)
        index.append(rng.integers(0, vocab_size, 5000))
        assert index.num_bytes < 200 * 5000
        for _ in range(60):
            history.add(rng.integers(0, vocab_size, rng.integers(1, 900)))
            most = max(most, history.num_bytes)
    assert 3000 < len(history) <= 4000 and most < 200 * 4000


def test_bad_values_are_told():
    for make, what in [
        (lambda: _core.NgramIndex(0, 4), "min_n is 0; allowed are 1 to 32"),
        (lambda: _core.NgramIndex(3, 2), "max_n is 2; allowed are 3 to 32"),
        (lambda: _core.SuffixIndex(1), "max_depth is 1; allowed are 2 to 128"),
        (lambda: _core.SuffixHistory(8, -1), "max_tokens is -1; allowed are 0 to"),
        (lambda: _core.NgramIndex(1, 2).append([1, -1]), "token -1; allowed are 0 to 2147483647"),
        (lambda: _core.SuffixIndex(8).propose([2**31], 4, 0.1), "token 2147483648; allowed are 0 to 2147483647"),
        (lambda: _core.SuffixIndex(8).follow(np.zeros((2, 2), int)), "tokens of 2 dimensions"),
        (lambda: _core.SuffixIndex(8).tokens(1), "start is 1; allowed are 0 to 0"),
        (lambda: _core.NgramIndex(1, 2).propose([1], -1), "limit is -1; allowed are 0"),
    ]:
        with pytest.raises(ValueError, match=what):
            make()


def test_one_thread_at_a_time():
    """The others are told, and the index stays whole."""
    index, text = _core.SuffixIndex(32), np.random.default_rng(0).integers(0, 50, 100_000)

    def work(_: int) -> str:
        try:
            index.append(text)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as threads:
        seen = list(filter(None, threads.map(work, range(3))))
    assert all("another thread uses this index" in words for words in seen)
    assert len(index) == (3 - len(seen)) * len(text)
