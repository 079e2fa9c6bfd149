"""The native index and its plain twin, driven in step: every answer equal, every block, after every step."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import TIERS, Namespace, PrefixMirror, PrefixReuseIndex, ReferencePrefixIndex, RemovalReason
from tests.prefix_reuse.cases import check_order, contents, mirrored, places, removed, rows, sequence, tree

NAMESPACES = ["", "a", Namespace(tenant="a")]
NUM_IDS = 16  # on a tier: few, so that ids run out and are taken already

letters = st.lists(st.integers(0, 2), max_size=5)
seldom = st.integers(0, 9).map(lambda number: number == 7)  # for what leaves little to test
namespaces = st.sampled_from(NAMESPACES)
tiers = st.sampled_from([tier.value for tier in TIERS])
ids = st.lists(st.integers(0, NUM_IDS - 1), max_size=5)


class InStep(RuleBasedStateMachine):
    block_size = 2
    locks = Bundle("locks")
    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.twin = ReferencePrefixIndex(self.block_size, event_capacity=100)
        self.native = PrefixReuseIndex(self.block_size, event_capacity=100)
        self.mirrors = PrefixMirror(self.block_size), PrefixMirror(self.block_size)
        self.age = 0  # what a restored or cleared index handed out before names nothing any more

    def both(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the answers of both indices; an argument that is a pair is split. An error must be of one type, which is then
        the answer. Blocks to evict may be wrong in two ways, and an index may report either."""
        answers = []
        for side, index in enumerate((self.twin, self.native)):
            own = [arg[side] if isinstance(arg, Pair) else arg for arg in args]
            named = {key: arg[side] if isinstance(arg, Pair) else arg for key, arg in kwargs.items()}
            try:
                answers.append(getattr(index, method)(*own, **named))
            except PrefixIndexError as error:
                answers.append(type(error))
        twin, native = answers
        if isinstance(twin, type) or isinstance(native, type):
            assert twin is native or (method == "evict" and isinstance(twin, type) and isinstance(native, type))
        return twin, native

    def tokens(self, path: list[int], rest: int) -> list[int]:
        return sequence(path, self.block_size, rest % self.block_size)

    def free_ids(self, number: int, tier: str) -> list[int]:
        taken = set(self.twin.blocks(tier).kv_block_ids.tolist())
        return [block_id for block_id in range(NUM_IDS + 24) if block_id not in taken][:number]

    def both_know(self, entry: "Pair") -> bool:
        """Whether an entry id still names something; the native one may forget it before the twin, but not remember longer."""
        if entry.age != self.age:
            return False
        known = []
        for index, entry_id in zip((self.twin, self.native), entry, strict=True):
            try:
                index.entry(entry_id)
                known.append(True)
            except PrefixIndexError:
                known.append(False)
        assert known != [False, True]
        return all(known)

    def same_entry(self, twin: Any, native: Any) -> Any:
        """A pair of ids for the bundle, or nothing."""
        if isinstance(twin, type):
            return multiple()
        for name in ("token_hash", "token_length", "metadata", "num_new_blocks"):
            assert getattr(twin, name) == getattr(native, name), name
        assert places(twin) == places(native) and removed(twin.replaced) == removed(native.replaced)
        assert (twin.entry_id == 0) == (native.entry_id == 0) == (twin.token_length == 0)
        return Pair(twin.entry_id, native.entry_id, self.age) if twin.entry_id else multiple()

    def same_hit(self, twin: Any, native: Any, named: bool) -> None:
        for name in ("matched_length", "remaining_tokens", "confidence"):
            assert getattr(twin, name) == getattr(native, name), name
        assert places(twin) == places(native)
        assert (twin.lock == 0) == (native.lock == 0)
        for hit, index in ((twin, self.twin), (native, self.native)):
            if hit.entry_id:
                assert places(index.entry(hit.entry_id)) == places(hit)
            else:
                assert not hit.matched_length or not named

    def same_removal(self, twin: Any, native: Any, before: dict) -> None:
        if isinstance(twin, type):
            return
        assert removed(twin) == removed(native)
        check_order(twin, before)
        check_order(native, before)

    @rule(target=entries, path=letters, rest=st.integers(0, 15), namespace=namespaces, tier=tiers, more=st.booleans(),
          metadata=st.sampled_from([None, None, {"turn": 1}, {}]))  # fmt: skip
    def insert(self, path, rest, namespace, tier, more, metadata):
        tokens = self.tokens(path, rest)
        new_ids = self.free_ids(len(path) + (more and len(tokens) % self.block_size > 0), tier)
        return self.same_entry(*self.both("insert", tokens, new_ids, namespace, tier=tier, metadata=metadata))

    @rule(paths=st.lists(letters, min_size=2, max_size=4), namespace=namespaces, tier=tiers)
    def insert_several(self, paths, namespace, tier):
        for path in paths:
            self.insert(path, 0, namespace, tier, False, None)

    @rule(target=entries, path=letters, any_ids=ids, namespace=namespaces, tier=tiers)
    def insert_any_ids(self, path, any_ids, namespace, tier):
        tokens = self.tokens(path[: len(any_ids)], 0)
        return self.same_entry(*self.both("insert", tokens, any_ids[: len(path)], namespace, tier=tier))

    @rule(
        target=entries, lock=locks, path=letters, rest=st.integers(0, 15), tier=tiers, fresh=st.booleans(), any_ids=ids
    )
    def extend(self, lock, path, rest, tier, fresh, any_ids):
        if not fresh:
            path = path[: len(any_ids)]
        new_ids = self.free_ids(len(path), tier) if fresh else any_ids[: len(path)]
        if lock.age != self.age:
            return multiple()
        return self.same_entry(*self.both("extend", lock, self.tokens(path, rest), new_ids, tier=tier))

    @rule(path=letters, rest=st.integers(0, 15), namespace=namespaces, touch=st.booleans())
    def lookup(self, path, rest, namespace, touch):
        twin, native = self.both("lookup", self.tokens(path, rest), namespace, touch=touch)
        self.same_hit(twin, native, named=touch)

    @rule(target=locks, path=letters, namespace=namespaces, touch=st.booleans())
    def lock(self, path, namespace, touch):
        twin, native = self.both("lookup", self.tokens(path, 0), namespace, touch=touch, lock=True)
        self.same_hit(twin, native, named=touch)
        return Pair(twin.lock, native.lock, self.age)

    @rule(path=letters, rest=st.integers(0, 15), namespace=namespaces)
    def lookup_tiers(self, path, rest, namespace):
        twin, native = self.both("lookup_tiers", self.tokens(path, rest), namespace)
        assert len(twin) == len(native)
        for pair in zip(twin, native, strict=True):
            self.same_hit(*pair, named=False)

    @rule(lock=consumes(locks))
    def unlock(self, lock):
        if lock.age == self.age:
            self.both("unlock", lock)

    @rule(lock=consumes(locks))
    def unlock_twice(self, lock):
        if lock.age == self.age:
            self.both("unlock", lock)
            assert isinstance(self.both("unlock", lock)[0], type)

    @rule(path=letters, rest=st.integers(0, 15), namespace=namespaces)
    def invalidate_sequence(self, path, rest, namespace):
        before = tree(self.twin)
        self.same_removal(*self.both("invalidate", self.tokens(path, rest), namespace), before)

    @rule(entry=entries)
    def invalidate_entry(self, entry):
        before = tree(self.twin)
        if self.both_know(entry):
            self.same_removal(*self.both("invalidate", entry_id=entry), before)

    @rule(any_ids=ids, tier=tiers)
    def invalidate_blocks(self, any_ids, tier):
        before = tree(self.twin)
        self.same_removal(*self.both("invalidate", kv_block_ids=any_ids, tier=tier), before)

    @rule(namespace=st.none() | namespaces, seldom=seldom)
    def invalidate_namespace(self, namespace, seldom):
        before = tree(self.twin)
        if seldom:
            self.same_removal(*self.both("invalidate", namespace=namespace), before)

    @rule(num_blocks=st.integers(1, 4), tier=tiers)
    def evict_lru(self, num_blocks, tier):
        before = tree(self.twin)
        twin, native = self.both("evict_lru", num_blocks, tier)
        self.same_removal(twin, native, before)
        assert twin.on(tier).tolist() == native.on(tier).tolist()

    @rule(num_blocks=st.integers(0, 4), tier=tiers, any_ids=ids, least_recent=st.booleans(),
          reason=st.sampled_from([RemovalReason.POLICY, RemovalReason.EVICTED]))  # fmt: skip
    def evict(self, num_blocks, tier, any_ids, least_recent, reason):
        before = tree(self.twin)
        chosen = self.twin.select_lru(num_blocks, tier) if least_recent else any_ids
        self.same_removal(*self.both("evict", chosen, tier, reason), before)

    @rule(any_ids=ids, src=tiers, dst=tiers, fresh=st.booleans(), new_ids=ids, cached=st.booleans())
    def move(self, any_ids, src, dst, fresh, new_ids, cached):
        chosen = [i for i in dict.fromkeys(any_ids) if self.twin.contains([i], src)[0]] if cached else any_ids
        new_ids = self.free_ids(len(chosen), dst) if fresh else new_ids
        twin, native = self.both("move", chosen, new_ids, src, dst)
        assert twin == native

    @rule(tier=tiers, order=st.permutations(range(6)))
    def trade_places(self, tier, order):
        cached = self.twin.blocks(tier).kv_block_ids.tolist()[:6]
        self.both("move", cached, [cached[row] for row in order if row < len(cached)], tier, tier)

    @rule(seldom=seldom)
    def clear(self, seldom):
        if seldom:
            self.both("clear")
            self.age += 1

    @rule(event_capacity=st.sampled_from([100, 100, 3]), seldom=seldom)
    def save_and_restore(self, event_capacity, seldom):
        if not seldom:
            return
        twin, native = self.both("snapshot")
        self.twin = ReferencePrefixIndex.restore(twin, event_capacity=event_capacity)
        self.native = PrefixReuseIndex.restore(native, event_capacity=event_capacity)
        assert self.both("snapshot") == (twin, native)
        self.age += 1

    @rule(entry=entries)
    def name(self, entry):
        if self.both_know(entry):
            self.same_entry(*self.both("entry", entry))
            twin, native = self.both("tokens", entry)
            assert twin.tolist() == native.tolist()

    @rule(tier=tiers, any_ids=ids, num_blocks=st.integers(0, 20))
    def ask(self, tier, any_ids, num_blocks):
        for question, *args in (("contains", any_ids, tier), ("select_lru", num_blocks, tier)):
            twin, native = self.both(question, *args)
            assert twin.tolist() == native.tolist()
        for unlocked in (False, True):
            assert rows(self.twin.blocks(tier, unlocked=unlocked)) == rows(self.native.blocks(tier, unlocked=unlocked))
        assert self.twin.num_blocks(tier) == self.native.num_blocks(tier)

    @rule()
    def listen(self):
        for mirror, index in zip(self.mirrors, (self.twin, self.native), strict=True):
            mirror.catch_up(index)
            assert mirrored(mirror, self.twin)

    @invariant()
    def nothing_differs(self):
        assert rows(self.twin.blocks()) == rows(self.native.blocks())
        self.twin.check()
        self.native.check()

    @invariant()
    def same_contents(self):
        assert contents(self.twin) == contents(self.native)
        twin, native = self.both("metrics")
        for ours in ("nodes", "memory_bytes", "latency_ns", "collisions"):
            del twin[ours], native[ours]
        assert twin == native


class Pair(tuple):
    """Ids of one thing in the twin and the native index. `age`: of the indexes that gave them."""

    def __new__(cls, twin: int, native: int, age: int) -> "Pair":
        pair = super().__new__(cls, (twin, native))
        pair.age = age
        return pair


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_in_step(block_size):
    machine = type(f"InStep{block_size}", (InStep,), {"block_size": block_size})
    case = machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True,
                             suppress_health_check=list(HealthCheck))  # fmt: skip
    case("runTest").runTest()
