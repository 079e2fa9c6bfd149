"""The policies in C++ behind the contract: pins, ghosts, reasons, and what is refused."""

from collections.abc import Iterable

import pytest

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.native import NATIVE
from tests.kv_policy.native_books import Books


class Tier:
    """A policy and the books of its tier, told alike."""

    def __init__(self, name: str, capacity: int, **options) -> None:
        self.policy: EvictionPolicy = NATIVE[name](capacity, **options)
        self.books = Books()

    def insert(self, *keys: int, parent: int | None = None, depth: int = 1, **facts) -> None:
        for key in keys:
            self.policy.on_insert(CachedBlock(BlockKey(key), parent, depth, **facts))
            self.books.parents[key] = parent

    def hit(self, *keys: int) -> None:
        for key in keys:
            self.policy.on_hit(BlockKey(key))

    def hold(self, *keys: int) -> None:
        self.books.holders.update(keys)

    def ask(self, count: int = 1, incoming: Iterable[int] = ()) -> list[tuple[int, str]]:
        decision = self.policy.select_victims(PolicyContext(count, self.books, incoming=[*incoming]))
        return list(zip(decision.victims, decision.reasons, strict=True))

    def evict(self, count: int = 1, incoming: Iterable[int] = ()) -> list[int]:
        victims = [key for key, _ in self.ask(count, incoming)]
        for key in victims:
            self.remove(key)
        return victims

    def remove(self, key: int, evicted: bool = True) -> None:
        self.policy.on_remove(BlockKey(key), evicted)
        del self.books.parents[key]


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "belady"])
def test_held_blocks_are_passed_over_and_a_parent_follows_its_last_child(name: str):
    tier = Tier(name, 10)
    tier.insert(3, parent=2, depth=3)
    tier.insert(2, parent=1, depth=2)
    tier.insert(1)
    tier.insert(4, 5)
    tier.hold(4)
    assert {key for key, _ in tier.ask(9)} == {1, 2, 3, 5}
    order = [key for key, _ in tier.ask(9)]
    assert order.index(3) < order.index(2) < order.index(1)
    tier.hold(5, 3)
    assert tier.ask(9) == []
    tier.books.holders.clear()
    assert len(tier.ask(9)) == 5 and len(tier.ask(2)) == 2 and tier.ask(0) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fifo", [(1, "inserted first"), (2, "inserted first"), (3, "inserted first")]),
        ("lru", [(2, "least recently used"), (3, "least recently used"), (1, "least recently used")]),
        ("lfu", [(2, "used 1 times"), (3, "used 2 times"), (1, "used 3 times")]),
        (
            "arc",
            [(2, "recent list, target 0.000"), (3, "frequent list, target 0.000"), (1, "frequent list, target 0.000")],
        ),
        ("s3fifo", [(2, "small queue"), (3, "small queue"), (1, "main queue")]),
        ("sieve", [(2, "not visited"), (1, "not visited"), (3, "not visited")]),
        ("twoq", [(1, "A1in"), (2, "A1in"), (3, "A1in")]),
        ("slru", [(2, "probation"), (3, "protected"), (1, "protected")]),
        ("wtinylfu", [(2, "probation, estimate 1"), (3, "probation, estimate 2"), (1, "protected, estimate 3")]),
        ("gdsf", [(2, "priority 1"), (3, "priority 2"), (1, "priority 3")]),
        ("prefix_lru", [(2, "oldest leaf"), (3, "oldest leaf"), (1, "oldest leaf")]),
        ("prefix_depth", [(2, "depth 1"), (3, "depth 1"), (1, "depth 1")]),
        ("prefix_reuse", [(2, "score 0.1"), (3, "score 1.20087"), (1, "score 1.77193")]),
    ],
)
def test_victims_and_their_reasons(name: str, expected: list[tuple[int, str]]):
    """Blocks 1, 2, 3 come; 1 is hit, 3 is hit, 1 is hit again."""
    tier = Tier(name, 30, **({"half_life": 20} if name == "prefix_reuse" else {}))
    tier.insert(1, 2, 3)
    tier.hit(1, 3, 1)
    assert tier.ask(3) == expected


def test_gdsf_ages_by_its_victims():
    tier = Tier("gdsf", 9)
    tier.insert(1, size_bytes=4, cost_s=2.0)  # 0.5
    tier.insert(2, size_bytes=0)  # a size of 1, a cost of 1
    tier.insert(3, size_bytes=8, cost_s=2.0)
    tier.hit(3)  # 0.5, computed later than that of 1
    assert tier.ask(1) == [(1, "priority 0.5")]
    tier.hit(3)  # 0.5 + 3 * 0.25
    assert tier.ask(3) == [(1, "priority 0.5"), (2, "priority 1"), (3, "priority 1.25")]


def test_belady_says_when_a_block_is_used_next():
    tier = Tier("belady", 3, future=[7, 8, 9, 8, 7])
    tier.insert(7, 8, 9)
    assert tier.ask(3) == [(9, "never used again"), (7, "next use 4"), (8, "next use 3")]
    with pytest.raises(PolicyError, match="event 3 is of key 9, foreseen was key 8"):
        tier.hit(9)


def test_what_a_question_passed_over_keeps_its_state():
    tier = Tier("sieve", 4)
    tier.insert(1, 2, 3, 4)
    tier.hit(1, 2)
    tier.hold(1)
    assert tier.ask() == [(3, "not visited")]  # 2 is forgiven on the way, 1 is not
    tier.books.holders.clear()
    tier.remove(3)
    assert [key for key, _ in tier.ask(3)] == [4, 2, 1]
    tier = Tier("s3fifo", 40)
    tier.insert(1, 2, 3)
    tier.hit(1, 1)
    tier.hold(1)
    assert tier.ask() == [(2, "small queue")]
    tier.books.holders.clear()
    assert tier.ask(3) == [(2, "small queue"), (3, "small queue"), (1, "main queue")]


def test_prefix_lru_renews_what_a_new_block_continues():
    tier = Tier("prefix_lru", 9)
    tier.insert(1, 2)
    tier.insert(3, parent=1, depth=2)
    tier.remove(3, evicted=False)
    assert tier.evict(2) == [2, 1]


@pytest.mark.parametrize(("name", "reason"), [("arc", "frequent list"), ("s3fifo", "main queue"), ("twoq", "Am")])
def test_ghosts_come_back_to_a_better_place_if_they_were_evicted(name: str, reason: str):
    """Noticed in a question, or without one; not after an invalidation."""
    for evicted, asked in ((True, True), (True, False), (False, True)):
        tier = Tier(name, 30, **({"in_ratio": 0.0} if name == "twoq" else {}))
        tier.insert(1, 2, 3)
        tier.hit(3)
        tier.remove(1, evicted)
        if asked:
            tier.ask(1, incoming=[1])
        tier.insert(1)
        reasons = dict(tier.ask(3))
        assert reasons[1].startswith(reason) == evicted, (evicted, asked)


def test_arc_adapts_once_to_a_ghost():
    tier = Tier("arc", 3)
    tier.insert(1, 2, 3)
    tier.hit(3)
    assert tier.evict(1, [4]) == [1]
    tier.insert(4)
    assert tier.ask(1, [1]) == [(2, "recent list, target 1.000")]
    assert tier.ask(1, [1]) == [(2, "recent list, target 1.000")]
    tier.remove(2)
    tier.insert(1)
    assert tier.ask(1, [9]) == [(3, "frequent list, target 1.000")]


def test_wtinylfu_keeps_the_block_that_was_used_more():
    tier = Tier("wtinylfu", 4)
    tier.insert(1, 2, 3, 4)
    assert tier.ask() == [(4, "window, estimate 1")]
    tier.hit(4, 4)
    assert tier.ask() == [(1, "probation, estimate 1")]  # and 4 has left the window
    assert tier.ask(4)[-1] == (4, "probation, estimate 3")


def test_bad_events_are_refused_and_change_nothing():
    tier = Tier("lru", 3)
    tier.insert(1, 2)
    with pytest.raises(PolicyError, match="block 1 is on the tier already; tell on_remove"):
        tier.policy.on_insert(CachedBlock(BlockKey(1)))
    for event in (tier.policy.on_hit, tier.policy.on_remove):
        with pytest.raises(PolicyError, match="block 9 is not on the tier; tell on_insert"):
            event(BlockKey(9))
    del tier.books.parents[1]
    with pytest.raises(KeyError):  # the owner says that it has not what it told
        tier.ask()
    tier.books.parents[1] = None
    tier.hold(2)
    assert tier.ask(2) == [(1, "least recently used")]
    with pytest.raises(PolicyError, match="capacity True"):
        NATIVE["lru"](True)


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "belady"])
@pytest.mark.parametrize("asked", ["is_evictable", "take"])
def test_nothing_is_told_or_asked_while_a_question_is_open(name: str, asked: str):
    tier = Tier(name, 10)
    tier.insert(*range(10))
    tier.hit(0, 1, 1)
    calls = [
        lambda: tier.policy.select_victims(PolicyContext(2, tier.books)),
        lambda: tier.policy.on_remove(BlockKey(5)),
        lambda: tier.policy.on_hit(BlockKey(5)),
        lambda: tier.policy.on_insert(CachedBlock(BlockKey(99))),
    ]

    class Nosy(PolicyContext):
        def is_evictable(self, key):
            if asked == "is_evictable":
                refused_all()
            return super().is_evictable(key)

        def take(self, key, reason):
            if asked == "take":
                refused_all()
            return super().take(key, reason)

    def refused_all() -> None:
        for call in calls:
            with pytest.raises(PolicyError, match="has a question open"):
                call()

    victims = tier.policy.select_victims(Nosy(3, tier.books)).victims
    assert len(victims) == 3 and {key for key, _ in tier.ask(10)} == set(range(10))
