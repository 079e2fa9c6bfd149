"""The workload of the prefix benchmarks has the numbers it promises, and its blocks are those an engine would have."""

import io

import numpy as np
import pytest

from benchmarks.prefix.native import write_workload
from benchmarks.prefix.workload import DOCUMENTS_EACH, MAX_TOKENS, NUM_PAIRS, NUM_SYSTEMS, VOCABULARY, PrefixWorkload


@pytest.fixture(scope="module")
def full() -> PrefixWorkload:
    return PrefixWorkload(seed=3, block_size=16, num_sequences=10_000, num_lookups=2_000)


def test_promised_numbers(full: PrefixWorkload):
    inserted = np.array([len(sequence.tokens) for sequence in full.sequences()])
    lookups = np.array([len(full.lookup(number)) for number in range(2_000)])
    assert (NUM_SYSTEMS, DOCUMENTS_EACH, MAX_TOKENS) == (64, 8, 8_084)
    for lengths in (inserted, lookups):
        assert lengths.min() >= 1_024 and lengths.max() <= MAX_TOKENS
        assert lengths.mean() == pytest.approx(3_479, rel=0.005)
    assert inserted.sum() == full.num_tokens
    shared = [len(full.systems[pair // DOCUMENTS_EACH]) + len(text) for pair, text in enumerate(full.documents)]
    tokens_shared = sum(shared[full.lookup_pair(number)] for number in range(2_000))
    assert tokens_shared / lookups.sum() == pytest.approx(0.96, abs=0.002)
    full_blocks = sum(full.matched_tokens(number) for number in range(2_000))
    assert full_blocks == tokens_shared - sum(shared[full.lookup_pair(number)] % 16 for number in range(2_000))


def test_pairs_are_equally_frequent(full: PrefixWorkload):
    for pairs, count in (
        ([full.pair(i) for i in range(10_000)], 10_000),
        ([full.lookup_pair(i) for i in range(2_000)], 2_000),
    ):
        frequency = np.bincount(pairs, minlength=NUM_PAIRS)
        assert len(frequency) == NUM_PAIRS and set(frequency) <= {count // NUM_PAIRS, count // NUM_PAIRS + 1}


def test_arrays_are_contiguous_int32_in_the_vocabulary(full: PrefixWorkload):
    sequence = full.sequence(17)
    for array in (sequence.tokens, sequence.block_ids, full.lookup(17), full.matched_blocks(17)):
        assert array.dtype == np.int32 and array.flags.c_contiguous and array.ndim == 1
    tokens = np.concatenate([full.lookup(number) for number in range(50)])
    assert tokens.min() >= 0 and tokens.max() < VOCABULARY


def test_nothing_matches_by_chance(full: PrefixWorkload):
    for texts in (full.systems, full.documents):
        assert len({text[0] for text in texts}) == len(texts)
    tails = [full.tail(i)[0] for i in range(10_000)] + [full.lookup_tail(i)[0] for i in range(2_000)]
    assert len(set(tails)) == 12_000


def test_the_seed_decides_everything():
    one, same, other = (PrefixWorkload(seed, 16, 20, 8) for seed in (5, 5, 6))
    for number in range(8):
        assert np.array_equal(one.lookup(number), same.lookup(number))
        assert np.array_equal(one.sequence(number).tokens, same.sequence(number).tokens)
        assert not np.array_equal(one.lookup(number), other.lookup(number))


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_blocks_are_those_of_an_engine_that_looks_up_before_it_inserts(block_size: int):
    workload = PrefixWorkload(seed=1, block_size=block_size, num_sequences=150, num_lookups=40)
    cached: dict[tuple[int, bytes], int] = {}  # (block above, tokens) -> id

    def walk(tokens: np.ndarray) -> list[int]:
        path, above = [], -1
        for start in range(0, len(tokens) - block_size + 1, block_size):
            above = cached.get((above, tokens[start : start + block_size].tobytes()))
            if above is None:
                break
            path.append(above)
        return path

    for sequence in workload.sequences():
        found, ids = walk(sequence.tokens), sequence.block_ids.tolist()
        assert len(ids) == len(sequence.tokens) // block_size and sequence.num_cached == len(found)
        assert ids[: len(found)] == found
        assert ids[len(found) :] == list(range(len(cached), len(cached) + len(ids) - len(found)))
        for place, above in enumerate([-1, *ids[:-1]]):
            tokens = sequence.tokens[place * block_size : (place + 1) * block_size]
            cached.setdefault((above, tokens.tobytes()), ids[place])
    assert workload.num_blocks == len(cached) and workload.num_cached_tokens == len(cached) * block_size
    for number in range(40):
        found = walk(workload.lookup(number))
        assert found == workload.matched_blocks(number).tolist()
        assert workload.matched_tokens(number) == len(found) * block_size


@pytest.mark.parametrize("sizes", [(16, VOCABULARY, 1), (0, 10, 10), (513, 10, 10)])
def test_what_cannot_be_told_apart_is_refused(sizes: tuple[int, int, int]):
    with pytest.raises(ValueError, match="at most 131072|allowed are 1 to 512"):
        PrefixWorkload(1, *sizes)


def test_the_native_program_is_given_the_same_sequences():
    workload = PrefixWorkload(seed=2, block_size=32, num_sequences=30, num_lookups=5)
    file = io.BytesIO()
    write_workload(workload, file)
    numbers = iter(np.frombuffer(file.getvalue(), np.int32).tolist())

    def text() -> list[int]:
        return [next(numbers) for _ in range(next(numbers))]

    assert next(numbers) == 32
    systems = [text() for _ in range(next(numbers))]
    documents = [(next(numbers), text()) for _ in range(next(numbers))]

    def queries() -> list[list[int]]:
        rows = [(documents[next(numbers)], text()) for _ in range(next(numbers))]
        return [systems[system] + document + tail for (system, document), tail in rows]

    assert queries() == [sequence.tokens.tolist() for sequence in workload.sequences()]
    assert queries() == [workload.lookup(number).tolist() for number in range(5)]
    assert next(numbers, None) is None
