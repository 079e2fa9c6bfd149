"""Random requests over trees of blocks, run through the books and the backend in memory as an engine would."""

import random

from sagellm.core.hooks import MigrationPlan, Tier
from sagellm.kv_policy.base import CachedBlock
from sagellm.kv_runtime.hierarchy import HierarchyManager
from sagellm.kv_runtime.simulated_backend import SimulatedBackend
from sagellm.kv_runtime.tier_spec import TierSpec
from tests.kv_runtime.policies import make_policy


def chain(*keys, parent=None, depth=1, tenant="", size=10, tokens=4):
    """Blocks that continue one another."""
    blocks = []
    for place, key in enumerate(keys):
        blocks.append(CachedBlock(key, parent, depth + place, tokens, size, 0.0, tenant, 0.0))
        parent = key
    return blocks


def manager_of(policy="lru", gpu=8, cpu=0, nvme=0, *, fault=None, **options):
    """A manager with a backend in memory; tiers of no blocks are left out."""
    sizes = {Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: nvme}
    tiers = [TierSpec(tier, blocks, policy) for tier, blocks in sizes.items() if blocks]
    backend = SimulatedBackend({spec.tier: spec.capacity for spec in tiers}, block_bytes=10, fault=fault)
    return HierarchyManager(tiers, backend, **{"make_policy": make_policy, **options})


class Engine:
    """Serves requests one after another or several at once, all blocks through the manager's decisions."""

    def __init__(self, manager, num_running=2):
        self.manager = manager
        self.num_running = num_running
        self.running = []
        self.time_s = 0.0
        self.num_hits = 0

    def serve(self, request, keys, tenant=""):
        manager, books, backend = self.manager, self.manager.books, self.manager.backend
        self.time_s += 1.0
        while len(self.running) >= self.num_running:
            self.end()
        keys = keys[: backend.capacity(Tier.GPU)]
        self.load(request, keys)
        resident = manager.looked_up(request, keys, len(keys), self.time_s)
        self.num_hits += resident
        self.running.append(request)
        away = [key for key in keys[:resident] if books.fast_tier(key) is Tier.CPU]
        if away:
            self.make_room(len(away))
            room = backend.num_free(Tier.GPU)
            plan = MigrationPlan(Tier.CPU, Tier.GPU, tuple(away[:room]))
            result = backend.migrate(plan)
            manager.moved(plan, result, self.time_s)
            if len(result.moved) < len(away):
                resident = keys.index(away[len(result.moved)])
                manager.released(request, resident, self.time_s)
        new = keys[resident:]
        self.make_room(len(new), new[::-1])
        fits = new[: backend.num_free(Tier.GPU)]
        twice = [key for key in fits if backend.holds(Tier.CPU, key)]
        if twice:  # computed again, where bringing it back stopped short
            backend.drop(Tier.CPU, twice)
        backend.put(fits)
        parent = keys[resident - 1] if resident else None
        manager.stored(request, chain(*fits, parent=parent, depth=resident + 1, tenant=tenant), self.time_s)

    def make_room(self, count, incoming=()):
        while self.manager.backend.num_free(Tier.GPU) < count:
            missing = count - self.manager.backend.num_free(Tier.GPU)
            room = self.manager.make_room(Tier.GPU, missing, incoming, self.time_s)
            self.manager.carry_out(room, self.time_s)
            if len(room.victims) < missing:
                if len(self.running) < 2:
                    return
                self.end()

    def load(self, request, keys):
        manager, backend = self.manager, self.manager.backend
        resident = manager.books.num_resident(keys)
        fetch = manager.fetch(request, keys, resident, self.time_s, len(self.running))
        if not backend.capacity(Tier.CPU):
            return
        wanted = [key for key, tier in zip(fetch.keys, fetch.tiers, strict=True) if tier is Tier.NVME]
        if wanted:
            manager.loading(wanted, self.time_s)
            short = -manager.num_free(Tier.CPU)
            if short > 0:
                manager.carry_out(manager.make_room(Tier.CPU, short, (), self.time_s), self.time_s)
            result = backend.load(wanted, Tier.CPU, 1.0).result()
            manager.loaded(backend.commit_loads(), self.time_s)
            manager.failed(list(result.refused), "refused", self.time_s)

    def end(self):
        self.manager.released(self.running.pop(0), 0, self.time_s)

    def check(self):
        books, backend = self.manager.books, self.manager.backend
        books.check()
        for tier in Tier:
            if backend.capacity(tier):
                assert books.num_blocks(tier) <= backend.capacity(tier)
                assert set(books.recency(tier)) == set(backend._held[tier])
                assert books.num_blocks(tier) == sum(self.manager.quota._usage[t, tier] for t in books.tenants(tier))
        for key in books.recency(Tier.GPU):
            parent = books.block(key).parent
            assert parent is None or books.is_on(parent, Tier.GPU)
        for key in books.recency(Tier.CPU):
            parent = books.block(key).parent
            assert parent is None or books.fast_tier(parent) is not None, "nobody can find this block"


def requests(seed, count, num_prefixes=4, depth=4):
    """(request, keys, tenant): a shared beginning and a tail of its own or of others; equal keys are equal prefixes."""
    rng = random.Random(seed)
    for request in range(count):
        path = [rng.randrange(num_prefixes)]
        for _ in range(rng.randrange(depth + 1)):
            path.append(rng.randrange(3))
        keys, name = [], 1
        for step in path:
            name = name * 8 + step + 1
            keys.append(name)
        yield request, keys, "ab"[path[0] % 2]
