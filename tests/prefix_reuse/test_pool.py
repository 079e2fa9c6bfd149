"""`IndexedPool` and its plain twin, driven in step: every answer, every array and every block equal, after every call."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from sagellm.core.errors import LockError, PrefixIndexError
from sagellm.prefix_reuse import IndexedPool, PrefixReuseIndex, ReferenceIndexedPool, ReferencePrefixIndex
from tests.prefix_reuse.cases import rows

SIZE, NUM_BLOCKS, LONGEST = 2, 24, 8
KINDS = {"native": (IndexedPool, PrefixReuseIndex), "twin": (ReferenceIndexedPool, ReferencePrefixIndex)}


class World:
    """A pool, an index and sequences, as an engine has them."""

    def __init__(self, kind, num_slots=NUM_BLOCKS):
        pool_class, index_class = KINDS[kind]
        self.index = index_class(SIZE)
        self.arrays = SimpleNamespace(
            ref_count=np.zeros(NUM_BLOCKS, np.int64), access_time=np.zeros(NUM_BLOCKS, np.int64),
            is_cached=np.zeros(NUM_BLOCKS, bool), slots=np.arange(NUM_BLOCKS)[::-1].copy(),
            free_ids=np.arange(NUM_BLOCKS), free_slots=np.arange(NUM_BLOCKS)[::-1][:num_slots].copy(),
        )  # fmt: skip
        self.pool = pool_class(self.index, **vars(self.arrays))
        self.num_free = NUM_BLOCKS
        self.now = 0
        self.seqs = {}

    def tick(self):
        self.now += 1
        return self.now

    def freed(self, number):
        self.num_free += number
        return number

    def start(self, number, tokens, namespace):
        seq = SimpleNamespace(tokens=np.array(tokens), namespace=namespace, table=np.zeros(LONGEST, np.int64))
        seq.lock = seq.num_held = seq.num_real = 0
        self.seqs[number] = seq
        return self.match(number, len(tokens) // SIZE)

    def match(self, number, num_blocks):
        seq = self.seqs[number]
        args = seq.tokens, num_blocks, seq.namespace, seq.lock, seq.table, seq.num_held, self.tick()
        seq.lock, num_found, is_any_slower = self.pool.match(*args)
        seq.num_held = num_found
        seq.num_real = max(seq.num_real, num_found)
        return num_found, is_any_slower

    def allocate(self, number, num_blocks):
        """As LMDeploy's allocator; False if there is no room."""
        seq = self.seqs[number]
        wanted = num_blocks - seq.num_real
        if wanted > self.num_free:
            return False
        first = NUM_BLOCKS - self.num_free
        blocks = self.arrays.free_ids[first : first + wanted]
        self.arrays.slots[blocks] = self.arrays.free_slots[first : first + wanted]
        self.arrays.ref_count[blocks] = 1
        seq.table[seq.num_real : num_blocks] = blocks
        self.num_free -= wanted
        seq.num_real = num_blocks
        return True

    def publish(self, number, last):
        seq = self.seqs[number]
        doubles, replaced = self.pool.publish(seq.lock, seq.tokens, seq.table, seq.num_held, last)
        seq.num_held = last
        if doubles is not None:
            self.freed(self.pool.give_back(doubles, self.tick(), self.num_free, self.num_free))
        return plain(doubles), plain(replaced)

    def evict(self, number):
        gone = self.pool.evict_lru(number)
        return gone.tolist(), self.freed(self.pool.give_back(gone, self.tick(), self.num_free, self.num_free))

    def drop(self, number):
        return self.freed(self.pool.drop_lru(number, self.tick(), self.num_free, self.num_free))

    def leave(self, number):
        seq = self.seqs.pop(number)
        args = seq.lock, seq.table, seq.num_real, self.tick(), self.num_free, self.num_free
        return self.freed(self.pool.leave(*args))

    def state(self):
        tables = {number: (seq.table.tolist(), seq.num_held, seq.num_real) for number, seq in self.seqs.items()}
        arrays = {name: array.tolist() for name, array in vars(self.arrays).items()}
        blocks = sorted((*row[:3], *row[4:]) for row in rows(self.index.blocks()))  # stamps may differ
        return tables, arrays, blocks, self.num_free, self.index.metrics()["locks"]

    def check(self):
        """Recounted: who holds each block, and what is free."""
        a = self.arrays
        cached = self.index.blocks().kv_block_ids.tolist()
        assert np.flatnonzero(a.is_cached).tolist() == sorted(cached)
        holders = cached + [block for seq in self.seqs.values() for block in seq.table[: seq.num_real].tolist()]
        assert a.ref_count.tolist() == np.bincount(holders, minlength=NUM_BLOCKS).tolist()
        free = a.free_ids[NUM_BLOCKS - self.num_free :].tolist()
        assert sorted(free + sorted(set(holders))) == list(range(NUM_BLOCKS))
        assert sorted(a.free_slots[NUM_BLOCKS - self.num_free :].tolist()) == sorted(a.slots[free].tolist())


def plain(ids):
    return None if ids is None else ids.tolist()


def act(draw, world, in_use):
    """One random call, as (method, arguments). `in_use` numbers the sequences."""
    kind = draw.random()
    if kind < 0.3 and len(in_use) < 4:
        tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 2 * LONGEST))]
        return "start", (max(in_use, default=0) + 1, tokens, draw.choice(["", "", "a"]))
    if kind < 0.4 or not in_use:
        return draw.choice(["evict", "drop"]), (draw.randrange(5),)
    number = draw.choice(sorted(in_use))
    seq = world.seqs[number]
    if kind < 0.5:
        return "leave", (number,)
    num_blocks = len(seq.tokens) // SIZE
    if seq.num_real < num_blocks:
        if seq.num_real == seq.num_held and draw.random() < 0.4:
            return "match", (number, draw.randrange(seq.num_real, num_blocks + 1))
        return "allocate", (number, draw.randrange(seq.num_real + 1, num_blocks + 1))
    return "publish", (number, draw.randrange(seq.num_held, seq.num_real + 1))


@pytest.mark.parametrize("seed", range(30))
def test_in_step(seed):
    draw = random.Random(seed)
    native, twin = World("native"), World("twin")
    seen = set()
    for _ in range(150):
        method, args = act(draw, twin, twin.seqs)
        answers = [getattr(world, method)(*args) for world in (native, twin)]
        assert answers[0] == answers[1], method
        assert native.state() == twin.state(), method
        for world in (native, twin):
            world.check()
        seen.add((method, str(answers[0]) not in ("0", "False", "(None, None)", "([], 0)", "(0, False)")))
    assert len(seen) >= 10, f"the calls prove nothing: {sorted(seen)}"


@pytest.fixture(params=KINDS)
def world(request):
    return World(request.param)


def cached(world, tokens, number=0):
    """A sequence that has computed and published its blocks."""
    world.start(number, tokens, "")
    assert world.allocate(number, len(tokens) // SIZE)
    world.publish(number, len(tokens) // SIZE)
    return world.seqs[number]


def test_a_match_says_whether_any_of_the_new_blocks_is_slower(world):
    seq = cached(world, [1, 2, 3, 4])
    blocks = seq.table[:2].tolist()
    world.index.move(blocks[1:], blocks[1:], "gpu", "cpu")
    assert world.start(1, [1, 2], "") == (1, False)
    assert world.start(2, [1, 2, 3, 4], "") == (2, True)
    assert world.match(2, 2) == (2, False)  # it has them already
    assert world.arrays.ref_count[blocks].tolist() == [4, 3]


def test_publishing_takes_the_place_of_a_slower_block(world):
    world.start(1, [1, 2, 3, 4], "")
    assert world.allocate(1, 2)
    old = cached(world, [1, 2, 3, 4]).table[1]
    world.leave(0)
    world.index.move([old], [old], "gpu", "cpu")
    doubles, replaced = world.publish(1, 2)
    assert len(doubles) == 1 and replaced == [old]
    assert world.arrays.is_cached[old] and world.arrays.ref_count[old] == 1  # until it is given back
    world.freed(world.pool.give_back(np.array(replaced), world.tick(), world.num_free, world.num_free))
    world.check()


def test_a_block_with_another_holder_is_given_back_but_not_free(world):
    seq = cached(world, [1, 2, 3, 4])
    block = int(seq.table[1])
    world.index.unlock(seq.lock)
    gone = world.pool.evict_lru(1)
    assert gone.tolist() == [block]
    assert world.pool.give_back(gone, 9, world.num_free, world.num_free) == 0
    assert world.arrays.ref_count[block] == 1 and not world.arrays.is_cached[block]
    assert world.arrays.access_time[block] == 9


@pytest.mark.parametrize("dtype", [np.int32, np.int16, ">i8", list])
def test_tokens_of_any_kind(world, dtype):
    seq = cached(world, [1, 2, 3, 4])
    tokens = [1, 2, 3, 4, 5] if dtype is list else np.array([1, 2, 3, 4, 5]).astype(dtype)
    table = np.zeros(3, np.int64)
    lock, num_found, _ = world.pool.match(tokens, 2, "", 0, table, 0, 1)
    assert num_found == 2 and table.tolist() == [*seq.table[:2], 0]
    world.index.unlock(lock)


def test_numbers_of_numpy(world):
    """As they come out of what clients say about images."""
    seq = cached(world, [1, 2, 3, 4])
    lock, num_found, _ = world.pool.match(
        seq.tokens, np.int64(1), "", 0, np.zeros(1, np.int64), np.int32(0), np.int64(1)
    )
    assert num_found == 1
    world.index.unlock(lock)


def test_long_tokens(world):
    """Without the GIL."""
    tokens = np.arange(20_000) % 7
    table = np.zeros(10_000, np.int64)
    lock, num_found, _ = world.pool.match(tokens, 10_000, "", 0, table, 0, 1)
    assert num_found == 0
    with pytest.raises(PrefixIndexError):
        world.pool.publish(lock, tokens, table, 0, 10_000)  # names block 0 for all


BAD = {
    "match: tokens": lambda w, s: w.pool.match("ab", 1, "", 0, s.table, 0, 1),
    "match: more blocks than tokens": lambda w, s: w.pool.match(s.tokens, 3, "", 0, s.table, 0, 1),
    "match: negative blocks": lambda w, s: w.pool.match(s.tokens, -1, "", 0, s.table, 0, 1),
    "match: so many blocks": lambda w, s: w.pool.match(s.tokens, 2**62, "", 0, s.table, 0, 1),
    "match: namespace": lambda w, s: w.pool.match(s.tokens, 1, 7, 0, s.table, 0, 1),
    "match: unknown lock": lambda w, s: w.pool.match(s.tokens, 1, "", 2**40, s.table, 0, 1),
    "match: a lock of text": lambda w, s: w.pool.match(s.tokens, 1, "", "lock", s.table, 0, 1),
    "match: short table": lambda w, s: w.pool.match(s.tokens, 2, "", 0, np.zeros(1, np.int64), 0, 1),
    "match: table of int32": lambda w, s: w.pool.match(s.tokens, 2, "", 0, np.zeros(4, np.int32), 0, 1),
    "match: time": lambda w, s: w.pool.match(s.tokens, 2, "", 0, s.table, 0, -1),
    "match: held": lambda w, s: w.pool.match(s.tokens, 2, "", 0, s.table, -1, 1),
    "publish: no lock": lambda w, s: w.pool.publish(0, s.tokens, s.table, 0, 2),
    "publish: unknown lock": lambda w, s: w.pool.publish(2**40, s.tokens, s.table, 0, 2),
    "publish: backwards": lambda w, s: w.pool.publish(s.lock, s.tokens, s.table, 2, 1),
    "publish: beyond the tokens": lambda w, s: w.pool.publish(s.lock, s.tokens, s.table, 2, 3),
    "publish: beyond the table": lambda w, s: w.pool.publish(s.lock, [1] * 40, s.table, 8, 9),
    "publish: no block of the pool": lambda w, s: w.pool.publish(s.lock, [9, 9], np.array([NUM_BLOCKS]), 0, 1),
    "publish: negative block": lambda w, s: w.pool.publish(s.lock, [9, 9], np.array([-1]), 0, 1),
    "publish: huge block": lambda w, s: w.pool.publish(s.lock, [9, 9], np.array([2**40]), 0, 1),
    "publish: read-only table": lambda w, s: w.pool.publish(s.lock, [9, 9], read_only([5]), 0, 1),
    "publish: a block that is cached": lambda w, s: w.pool.publish(s.lock, [9, 9], s.table[:1].copy(), 0, 1),
    "evict_lru: negative": lambda w, s: w.pool.evict_lru(-1),
    "evict_lru: text": lambda w, s: w.pool.evict_lru("all"),
    "drop_lru: nothing is free": lambda w, s: w.pool.drop_lru(0, 1, NUM_BLOCKS + 1, 0),
    "give_back: free already": lambda w, s: w.pool.give_back([20], 1, 5, 5),
    "give_back: free after the first": lambda w, s: w.pool.give_back([s.table[0]] * 3, 1, 5, 5),
    "give_back: no block of the pool": lambda w, s: w.pool.give_back([NUM_BLOCKS], 1, 5, 5),
    "give_back: negative": lambda w, s: w.pool.give_back(np.array([-1]), 1, 5, 5),
    "give_back: floats": lambda w, s: w.pool.give_back([0.5], 1, 5, 5),
    "give_back: no room in the list": lambda w, s: w.pool.give_back([s.table[0]] * 2, 1, NUM_BLOCKS, 5),
    "give_back: no room for slots": lambda w, s: w.pool.give_back([s.table[0]] * 2, 1, 5, NUM_BLOCKS),
    "leave: more than the table": lambda w, s: w.pool.leave(0, s.table, LONGEST + 1, 1, 5, 5),
    "leave: unknown lock": lambda w, s: w.pool.leave(2**40, s.table, 1, 1, 5, 5),
    "leave: negative": lambda w, s: w.pool.leave(0, s.table, -1, 1, 5, 5),
}  # fmt: skip


def read_only(ids):
    array = np.array(ids)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_change_nothing(world, case):
    seq = cached(world, [1, 2, 3, 4])
    before = world.state()
    with pytest.raises(PrefixIndexError) as error:
        BAD[case](world, seq)
    assert isinstance(error.value, LockError) or not case.endswith(" lock")
    assert world.state() == before
    world.check()


@pytest.mark.parametrize("call", ["match", "evict_lru", "drop_lru"])
def test_an_index_that_knows_other_blocks(world, call):
    """Those that are in no pool, or are not marked as cached: an error, and nothing out of bounds is touched."""
    for block, message in ((NUM_BLOCKS + 5, "not.* in the pool"), (3, "is_cached is off|is free")):
        world.index.insert([7, block], [block])
        before = world.state()
        if call == "match":
            with pytest.raises(PrefixIndexError, match=message):
                world.pool.match([7, block], 1, "", 0, np.zeros(1, np.int64), 0, 1)
            assert world.state() == before
        elif call == "drop_lru":
            with pytest.raises(PrefixIndexError, match=message):
                world.pool.drop_lru(1, 1, 0, 0)
        else:
            assert world.pool.evict_lru(1).tolist() == [block]
        world.index.clear()


def test_blocks_outside_the_pools_slots(request):
    for kind in KINDS:
        world = World(kind, num_slots=4)
        world.arrays.ref_count[0] = 1
        world.arrays.slots[0] = 4
        before = world.state()
        with pytest.raises(PrefixIndexError, match="slot"):
            world.pool.give_back([0], 1, 5, 2)
        assert world.state() == before


@pytest.mark.parametrize("name", ["ref_count", "access_time", "is_cached", "slots", "free_ids", "free_slots"])
@pytest.mark.parametrize("bad", ["list", "dtype", "rank", "strided", "read-only", "length"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_cannot_be_used(kind, name, bad):
    arrays = vars(World(kind).arrays)
    array = arrays[name]
    if bad == "length" and name == "free_slots":
        pytest.skip("it may be shorter")
    arrays[name] = {
        "list": array.tolist(), "dtype": array.astype(np.int32), "rank": array[None], "length": array[:-1].copy(),
        "strided": np.repeat(array, 2)[::2], "read-only": read_only(array),
    }[bad]  # fmt: skip
    pool_class, index_class = KINDS[kind]
    with pytest.raises(PrefixIndexError):
        pool_class(index_class(SIZE), **arrays)


def test_only_the_native_index():
    with pytest.raises(PrefixIndexError, match="PrefixReuseIndex"):
        IndexedPool(ReferencePrefixIndex(SIZE), **vars(World("twin").arrays))


def test_what_it_was_given_stays_alive():
    world = World("native")
    pool, arrays = world.pool, vars(world.arrays)
    del world
    arrays.clear()
    table, tokens = np.array([3, 4]), [1, 2, 3, 4]
    lock, _, _ = pool.match(tokens, 2, "", 0, np.zeros(2, np.int64), 0, 1)
    pool.publish(lock, tokens, table, 0, 2)
    assert pool.match(tokens, 2, "", lock, table, 2, 2)[1] == 2


def test_wrong_number_of_arguments():
    pool = World("native").pool
    for method in ("match", "publish", "evict_lru", "give_back", "drop_lru", "leave"):
        with pytest.raises(TypeError, match=method):
            getattr(pool, method)()
