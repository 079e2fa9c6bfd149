"""The books, sentence by sentence, and driven at random against a plain twin."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime.blocks import BlockManager
from tests.kv_runtime.workload import chain

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME


@pytest.fixture
def books():
    books = BlockManager()
    for block in chain(1, 2, 3, tenant="a"):
        books.add(block, GPU)
    yield books
    books.check()


def test_pins_on_gpu_are_locks_and_children_there(books):
    assert [books.num_pins(key, GPU) for key in (1, 2, 3)] == [1, 1, 0]
    books.lock(7, 0, [1, 2])
    assert [books.num_pins(key, GPU) for key in (1, 2, 3)] == [2, 2, 0]
    books.move(3, GPU, CPU)
    assert [books.num_pins(key, GPU) for key in (1, 2)] == [2, 1], "a child on cpu may stay below"
    with pytest.raises(KeyError):
        books.num_pins(3, GPU)


def test_pins_on_cpu_are_locks_and_children_on_either(books):
    for key in (2, 3):
        books.move(key, GPU, CPU)
    assert books.num_pins(2, CPU) == 1 and books.num_pins(3, CPU) == 0
    books.add(chain(4, parent=3, depth=4)[0], GPU)
    assert books.num_pins(3, CPU) == 1


def test_pins_on_nvme_are_children_there_and_reads(books):
    for key in (1, 2):
        books.add(books.block(key), NVME)
    books.lock(7, 0, [1, 2])
    assert books.num_pins(1, NVME) == 1 and books.num_pins(2, NVME) == 0, "locks are none of a file's business"
    books.begin_read(2)
    assert books.num_pins(2, NVME) == 1
    books.end_read(2)
    books.end_read(2)
    assert books.num_pins(2, NVME) == 0


def test_a_block_is_on_gpu_or_cpu_and_its_file_beside(books):
    with pytest.raises(PolicyError, match="on gpu or on cpu"):
        books.add(books.block(1), CPU)
    books.add(books.block(1), NVME)
    books.add(books.block(1), NVME)
    assert books.fast_tier(1) is GPU and books.is_on(1, NVME) and books.num_blocks(NVME) == 1
    books.remove(1, GPU)
    assert books.fast_tier(1) is None and 1 in books
    books.remove(1, NVME)
    assert 1 not in books
    with pytest.raises(KeyError):
        books.remove(1, NVME)


def test_another_block_of_the_same_key_is_refused(books):
    other = chain(2, parent=9, depth=2)[0]
    assert books.collides(other) and not books.collides(books.block(2))
    with pytest.raises(PolicyError, match="continues another block"):
        books.add(other, GPU)


def test_locks_by_place_and_their_release(books):
    books.lock(7, 0, [1, 2])
    books.lock(7, 2, [3])
    books.lock(8, 0, [1])
    assert books.num_unlocked(GPU) == 0 and books.held(7) == [1, 2, 3] and books.held_at(7, 2) == 3
    assert books.release(7, 1) == [2, 3]
    assert books.release(7, 1) == [], "let go twice"
    assert books.release(99) == [], "an unknown request"
    assert books.num_held(7) == 1 and books.num_unlocked(GPU) == 2
    books.release(7)
    assert books.num_pins(1, GPU) == 2 and books.requests() == [8]


def test_what_goes_is_taken_from_those_who_hold_it(books):
    books.lock(7, 0, [1, 2, 3])
    books.remove(3, GPU)
    assert books.held(7) == [1, 2, None]
    books.add(chain(3, parent=2, depth=3)[0], GPU)
    assert books.num_pins(3, GPU) == 0, "a later block of this key is not theirs"
    assert books.release(7) == [1, 2]


def test_a_block_locked_that_is_not_there(books):
    books.lock(7, 0, [1, 77])
    assert books.held(7) == [1, None]


def test_what_continues_a_block_on_a_tier(books):
    for key in (2, 3):
        books.move(key, GPU, CPU)
    books.add(chain(5, parent=2, depth=3)[0], CPU)
    assert books.below(1, CPU) == [5, 3, 2] or books.below(1, CPU) == [3, 5, 2]
    assert books.below(1, GPU) == [] and books.below(77, CPU) == []


def test_recency_by_tier_and_tenant(books):
    books.add(chain(9, tenant="b")[0], GPU)
    books.touch(1)
    assert list(books.recency(GPU)) == [2, 3, 9, 1]
    assert list(books.recency(GPU, "a")) == [2, 3, 1] and list(books.recency(CPU)) == []
    assert books.tenants(GPU) == {"a": 3, "b": 1}
    assert books.num_bytes(GPU) == 40


def test_how_many_of_a_sequence_are_resident(books):
    books.move(2, GPU, CPU)
    assert books.num_resident([1, 2, 3, 4]) == 3 and books.num_resident([4, 1]) == 0
    books.remove(2, CPU)
    assert books.num_resident([1, 2, 3]) == 1


class Books(RuleBasedStateMachine):
    """Any order of calls keeps the invariants, and the pins are those that a count of everything gives."""

    keys = st.integers(0, 30)

    def __init__(self):
        super().__init__()
        self.books = BlockManager()

    def path(self, key):
        return [] if key == 0 else [*self.path((key - 1) // 2), key]

    def block(self, key):
        above = self.path(key)[:-1]
        return chain(key, parent=above[-1] if above else None, depth=len(above) + 1, tenant="ab"[key % 2])[0]

    @rule(key=st.integers(1, 30), tier=st.sampled_from(Tier))
    def add(self, key, tier):
        if tier is NVME or self.books.fast_tier(key) is None:
            self.books.add(self.block(key), tier)

    @precondition(lambda self: len(self.books))
    @rule(key=keys, tier=st.sampled_from(Tier))
    def remove(self, key, tier):
        if self.books.is_on(key, tier):
            self.books.remove(key, tier)

    @rule(key=keys)
    def move(self, key):
        tier = self.books.fast_tier(key)
        if tier is not None:
            self.books.move(key, tier, CPU if tier is GPU else GPU)

    @rule(request=st.integers(0, 4), key=st.integers(1, 30), first=st.integers(0, 2))
    def lock(self, request, key, first):
        self.books.lock(request, first, self.path(key)[first:])

    @rule(request=st.integers(0, 4), kept=st.integers(-1, 3))
    def release(self, request, kept):
        self.books.release(request, kept)

    @rule(key=keys)
    def touch(self, key):
        if key in self.books:
            self.books.touch(key)

    @invariant()
    def agrees(self):
        self.books.check()
        for tier in Tier:
            for key in self.books.recency(tier):
                on = (GPU, CPU) if tier is CPU else (tier,)
                children = [
                    child for child in (2 * key + 1, 2 * key + 2) if any(self.books.is_on(child, t) for t in on)
                ]
                locks = (
                    sum(key in self.books.held(request) for request in self.books.requests()) if tier is not NVME else 0
                )
                assert self.books.num_pins(key, tier) == len(children) + locks


Books.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
