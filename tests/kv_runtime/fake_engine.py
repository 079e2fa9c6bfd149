"""An engine's pool, host tier and prefix cache in plain Python, which tells and asks one plug-in as the contract says."""

from collections import deque
from itertools import count

import numpy as np

from sagellm.core.answers import check_victims
from sagellm.core.errors import PluginError
from sagellm.core.hooks import (
    BlockCounts,
    BlockState,
    EvictionNotice,
    EvictionReason,
    KVBlockInfo,
    MigrationResult,
    Phase,
    PrefixMatch,
    PrefixRelease,
    PrefixUpdate,
    RequestView,
    Tier,
    VictimRequest,
    overrides,
)
from sagellm.prefix_reuse import prefix_hashes


class Block:
    def __init__(self, block_id, path, parent, tier):
        self.id, self.path, self.parent, self.tier = block_id, path, parent, tier
        self.holders, self.last_access = set(), 0
        self.content = path  # what was computed, so that a wrong block is noticed
        self.is_settled = True


class FakeEngine:
    """`pool` and `host`: blocks of each tier. One request at a time holds blocks while it runs, or several.

    A path is (namespace, tokens up to the block's end). Host slots that a restore frees are free after `step`.
    """

    is_recording = True

    def __init__(self, plugin, pool=8, host=0, size=4, *, key_bits=64, layout="model, float32", lines=None):
        self.plugin, self.pool, self.host, self.block_size = plugin, pool, host, size
        self.block_bytes, self.layout = 64, layout
        self.lines = [] if lines is None else lines
        self.num_lost_notices = 0
        self.key_mask = 2**key_bits - 1
        self.blocks, self.cache, self.held = {}, {}, {}
        self.free_ids = deque(range(pool + host))
        self.late_slots, self.reserved = 0, {}
        self.posted, self.tick, self.time_s = [], count(1).__next__, 0.0
        self.refuse = lambda block: ""
        self.waiting = {}
        self.num_computed = self.num_matched = 0
        self.top_ups = 0
        self.lose = lambda hook: False
        self.dropped = []
        plugin.attach(self)

    # the handle

    def record(self, event, **fields):
        self.lines.append({"n": len(self.lines), "pid": 1, "event": event, **fields})

    def block_counts(self):
        cached = sum(b.tier is Tier.GPU and not b.holders for b in self.blocks.values())
        active = sum(b.tier is Tier.GPU and bool(b.holders) for b in self.blocks.values())
        used = sum(b.tier is Tier.CPU for b in self.blocks.values()) + self.late_slots + len(self.reserved)
        return BlockCounts(self.pool, self.pool - cached - active, cached, active, self.host, used)

    def get_block_info(self, block_ids=None):
        rows = []
        for block_id in self.blocks if block_ids is None else block_ids:
            b = self.blocks.get(block_id)
            state = BlockState.FREE if b is None else BlockState.ACTIVE if b.holders else BlockState.CACHED
            tier = b.tier if b else Tier.GPU
            rows.append(KVBlockInfo(block_id, tier, state, self.block_bytes, 1, b.last_access if b else 0))
        return rows

    def migrate_blocks(self, plan):
        moved, refused = [], {}
        for block_id in plan.block_ids:
            b = self.blocks[block_id]
            counts = self.block_counts()
            why = self.refuse(block_id) or ("in use" if b.holders else "")
            if plan.dst_tier is Tier.CPU:
                assert b.tier is Tier.GPU
                why = why or ("the host tier is full" if counts.host_used >= self.host else "")
            if why:
                refused[block_id] = why
            else:
                b.tier, b.is_settled = plan.dst_tier, False
                moved.append(block_id)
        return MigrationResult(tuple(moved), refused)

    def drop_blocks(self, block_ids, reasons=()):
        assert len(reasons) in (0, len(block_ids))
        gone = [block_id for block_id in block_ids if block_id in self.blocks and not self.blocks[block_id].holders]
        assert not any(b.parent in gone for b in self.blocks.values() if b.id not in gone), "a child would be left behind"
        self.forget(gone)
        self.dropped += gone
        return tuple(gone)

    def request_tokens(self, request_id):
        return self.waiting[request_id]

    def host_bytes(self, block_ids):
        out = []
        for block_id in block_ids:
            b = self.blocks[block_id]
            if b.tier is not Tier.CPU or not b.is_settled:
                raise PluginError(f"block {block_id} cannot be read")
            out.append(self.bytes_of(b.content))
        return out

    def bytes_of(self, path):
        seed = prefix_hashes(np.array(path[1], np.int32), self.block_size)[-1] ^ np.uint64(len(path[0]))
        return np.random.default_rng(int(seed)).integers(0, 256, self.block_bytes, np.uint8)

    def unpin(self, block_ids):
        pass

    def reserve_host(self, count):
        counts = self.block_counts()
        ids = [self.free_ids.popleft() for _ in range(min(count, counts.host_total - counts.host_used))]
        self.reserved.update({block_id: np.zeros(self.block_bytes, np.uint8) for block_id in ids})
        return ids, [self.reserved[block_id] for block_id in ids]

    def adopt_host(self, block_ids, token_ids, namespace):
        size, taken = self.block_size, []
        first = len(token_ids) // size - len(block_ids)
        for place, block_id in enumerate(block_ids, first):
            path = (namespace, tuple(token_ids[: (place + 1) * size].tolist()))
            parent = self.cache.get((namespace, path[1][:-size])) if place else -1
            if path in self.cache or parent is None:
                self.free_host([block_id])
                continue
            assert np.array_equal(self.reserved.pop(block_id), self.bytes_of(path)), "wrong bytes were adopted"
            b = self.blocks[block_id] = Block(block_id, path, parent, Tier.CPU)
            b.last_access, self.cache[path] = self.tick(), block_id
            taken.append(block_id)
        return tuple(taken)

    def free_host(self, block_ids):
        for block_id in block_ids:
            del self.reserved[block_id]
            self.free_ids.append(block_id)

    # telling and asking

    def post(self, hook, notice):
        if not self.lose(hook):
            self.posted.append((hook, notice))

    def call(self, hook, *args):
        posted, self.posted = self.posted, []
        for name, notice in posted:
            getattr(self.plugin, name)(notice)
        return getattr(self.plugin, hook)(*args) if hook else None

    def flush(self):
        self.call("")

    # requests

    def keys(self, tokens, namespace):
        hashes = prefix_hashes(np.array(tokens, np.int32), self.block_size)
        return (hashes ^ np.uint64(sum(namespace.encode()))) & np.uint64(self.key_mask)

    def admitted(self, request, tokens, namespace="", tries=1):
        """Ask for admission, `tries` times; the last answer."""
        self.waiting[request] = np.array(tokens, np.int64), namespace
        answer = True
        if overrides(self.plugin, "admit"):
            for _ in range(tries):
                answer = self.call("admit", RequestView(request, Phase.PREFILL, len(tokens), 0, 0, 0, 0.0))
                if answer:
                    break
        if answer:
            del self.waiting[request]
        return answer

    def start(self, request, tokens, namespace="", tenant=""):
        """Look the request up, compute the rest, publish it. False: there was no room; it holds nothing then."""
        tokens = list(tokens)
        self.time_s += 1
        size, keys = self.block_size, self.keys(tokens, namespace)
        limit = (len(tokens) - 1) // size
        found = []
        for place in range(limit):
            block_id = self.cache.get((namespace, tuple(tokens[: (place + 1) * size])))
            if block_id is None:
                break
            found.append(block_id)
        for block_id in reversed(found):
            self.blocks[block_id].holders.add(request)
            self.blocks[block_id].last_access = self.tick()
        self.record("lookup", request=request, matched=len(found) * size)
        self.held[request] = found
        self.post(
            "on_prefix_matched",
            PrefixMatch(
                request, len(tokens), len(found) * size, tuple(found), "lru", keys, limit, True, tenant, self.time_s
            ),
        )
        num_kept = self.bring_back(request)
        self.num_matched += num_kept
        full = len(tokens) // size
        if not self.room_for(full - num_kept):
            self.end(request)
            return False
        new = []
        for place in range(num_kept, full):
            path = (namespace, tuple(tokens[: (place + 1) * size]))
            twice = self.cache.get(path)
            if twice is not None and self.blocks[twice].tier is Tier.GPU:
                self.blocks[twice].holders.add(request)
                self.held[request].append(twice)
                new.append(twice)
                continue
            if twice is not None:  # one on the host: the new one takes its place
                self.give_up([twice], below=False)
            block_id = self.free_ids.popleft()
            b = self.blocks[block_id] = Block(block_id, path, -1, Tier.GPU)
            b.holders.add(request)
            b.last_access = self.tick()
            b.parent = (self.held[request] or [-1])[-1]
            for child in [c for c in self.blocks.values() if c.parent == twice and twice is not None]:
                child.parent = block_id
            self.cache[path] = block_id
            self.held[request].append(block_id)
            new.append(block_id)
            self.num_computed += 1
        if new:
            part = np.array(tokens[num_kept * size : full * size], np.int64)
            parent = int(keys[num_kept - 1]) if num_kept else None
            self.post(
                "on_prefix_stored",
                PrefixUpdate(
                    request,
                    namespace,
                    num_kept * size,
                    part,
                    tuple(new),
                    keys[num_kept:full],
                    parent,
                    tenant,
                    self.time_s,
                ),
            )
        for block_id in self.held[request]:
            b = self.blocks[block_id]
            assert b.content == b.path and b.tier is Tier.GPU
        return True

    def bring_back(self, request):
        held = self.held[request]
        away = sum(self.blocks[block_id].tier is Tier.CPU for block_id in held)
        if away:
            self.room_for(away)
        for place, block_id in enumerate(held):
            b = self.blocks[block_id]
            if b.tier is Tier.CPU:
                if not self.block_counts().free:
                    for lost in held[place:]:
                        self.blocks[lost].holders.discard(request)
                    self.held[request] = held[:place]
                    self.post("on_prefix_released", PrefixRelease(request, place, self.time_s))
                    return place
                b.tier, b.is_settled = Tier.GPU, False
                self.late_slots += 1
        return len(held)

    def end(self, request):
        for block_id in self.held.pop(request):
            self.blocks[block_id].holders.discard(request)
        self.post("on_prefix_released", PrefixRelease(request, 0, self.time_s))

    def serve(self, request, tokens, **kwargs):
        served = self.start(request, tokens, **kwargs)
        if served:
            self.end(request)
        self.step()
        return served

    def step(self):
        """A forward pass has made its copies."""
        self.late_slots = 0
        for b in self.blocks.values():
            b.is_settled = True

    # eviction

    def room_for(self, count):
        missing = count - self.block_counts().free
        if missing > 0:
            self.evict(missing)
        return self.block_counts().free >= count

    def evict(self, count):
        before = self.block_counts().free
        request = self.candidates(count)
        if len(request.block_ids):
            answer = self.call("select_victims", request)
            decision = check_victims(answer, self.candidates(count))  # blocks may have been dropped meanwhile
            self.reasons = dict(zip(decision.victims, decision.reasons, strict=True))
            self.give_up(decision.victims)
        missing = count - (self.block_counts().free - before)
        if missing > 0:
            victims = self.candidates(missing).leaf_first()
            self.top_ups += len(victims)
            self.give_up(victims)

    def candidates(self, count):
        rows = [b for b in self.blocks.values() if not b.holders]
        ids = {b.id for b in rows}
        parents = [b.parent if b.parent in ids else -1 for b in rows]
        depth = [len(b.path[1]) for b in rows]
        columns = [[b.id for b in rows], parents, [b.last_access for b in rows], depth]
        return VictimRequest(
            count,
            *(np.array(column, np.int64) for column in columns),
            np.array([b.tier is Tier.GPU for b in rows], bool),
        )

    def give_up(self, ids, below=True):
        if not len(ids):
            return
        self.call("on_evicted", EvictionNotice(tuple(ids), EvictionReason.PREFIX))
        self.forget(ids)
        if below:
            assert not any(b.parent in ids for b in self.blocks.values()), "a child was left behind"

    def forget(self, ids):
        for block_id in ids:
            b = self.blocks.pop(block_id)
            assert not b.holders, "a victim was in use"
            del self.cache[b.path]
            self.free_ids.append(block_id)

    # agreement

    def check(self):
        """The plug-in's books say what is here."""
        self.flush()
        self.plugin._catch_up()
        plugin, books = self.plugin, self.plugin._books
        books.check()
        for b in self.blocks.values():
            key = plugin._blocks.key_of.get(b.id)
            assert key is not None and books.fast_tier(key) is b.tier, f"block {b.id} is on {b.tier}"
            assert books.num_locks(key) == len(b.holders)
        assert set(plugin._blocks.key_of) == set(self.blocks)
        assert books.num_blocks(Tier.GPU) + books.num_blocks(Tier.CPU) == len(self.blocks)


def plugin_with(kind, make_policy, make_migration, **options):
    """A plug-in whose policies are those of the tests."""
    own = type(
        kind.__name__,
        (kind,),
        {"make_policy": staticmethod(make_policy), "make_migration": staticmethod(make_migration)},
    )
    return own(**options)
