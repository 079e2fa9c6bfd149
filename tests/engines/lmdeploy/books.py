"""Plug-ins that know the cache from notices alone, as one with a policy of its own does."""

import numpy as np

from sagellm.core.errors import PluginError
from sagellm.core.hooks import EvictionDecision, EvictionReason, MigrationPlan, Plugin, Tier
from sagellm.engines.lmdeploy.prefix_keys import namespace_key
from sagellm.prefix_reuse import prefix_hashes


class Books(Plugin):
    """Keeps who holds which block, and compares it with the engine's candidates whenever it is asked.

    It chooses the first blocks of its books that may go, or offloads them; `mismatches` are what it should not have seen.
    """

    def __init__(self, offload=False):
        self.offload = offload
        self.key_of = {}  # cached block -> key
        self.block_of = {}
        self.parent_of = {}  # key -> key
        self.held = {}  # request -> keys of its first blocks
        self.mismatches = []
        self.asked = self.shrunk = 0

    def attach(self, engine):
        self.engine = engine

    def on_prefix_matched(self, match):
        before = self.held.get(match.request_id, [])
        keys = match.block_hashes.tolist()
        held = keys[: len(before) + len(match.block_ids)]
        if before != held[: len(before)]:
            self.mismatches.append(f"request {match.request_id} held other blocks")
        if [self.block_of.get(key) for key in held[len(before) :]] != list(match.block_ids):
            self.mismatches.append(f"{match} names other blocks than were stored")
        if len(held) > match.limit or match.num_matched != len(match.block_ids) * self.engine.block_size:
            self.mismatches.append(f"{match} is above its limit")
        self.held[match.request_id] = held

    def on_prefix_stored(self, update):
        size, held = self.engine.block_size, self.held.setdefault(update.request_id, [])
        if len(held) * size != update.first_token or update.parent_hash != (held[-1] if held else None):
            self.mismatches.append(f"{update} does not go on where the request's blocks end")
        for key, block in zip(update.block_hashes.tolist(), update.block_ids, strict=True):
            self.add(key, block, held[-1] if held else None)
            held.append(key)

    def add(self, key, block, parent):
        if self.key_of.setdefault(block, key) != key or self.block_of.setdefault(key, block) != block:
            self.mismatches.append(f"block {block}, key {key:x}: stored twice without an eviction")
        self.parent_of[key] = parent

    def on_prefix_released(self, release):
        held = self.held.pop(release.request_id)
        if release.num_kept:
            self.shrunk += 1
            self.held[release.request_id] = held[: release.num_kept]

    def on_evicted(self, notice):
        if notice.reason is EvictionReason.PREFIX:
            for block in notice.block_ids:
                key = self.key_of.pop(block)
                del self.block_of[key], self.parent_of[key]

    def free_to_go(self):
        """Blocks, those further down first."""
        held = {key for keys in self.held.values() for key in keys}
        free = [key for key in self.block_of if key not in held]
        return [self.block_of[key] for key in sorted(free, key=self.depth, reverse=True)]

    def depth(self, key):
        return 1 + self.depth(self.parent_of[key]) if self.parent_of[key] is not None else 1

    def select_victims(self, request):
        self.asked += 1
        free = self.free_to_go()
        if sorted(free) != sorted(request.block_ids.tolist()):
            self.mismatches.append(f"asked for victims: {free} may go by the books, {request.block_ids} by the engine")
        if self.offload:
            plan = MigrationPlan(Tier.GPU, Tier.CPU, tuple(free[: request.count]))
            moved = self.engine.migrate_blocks(plan).moved
            return EvictionDecision([] if len(moved) == request.count else free[: request.count], "no room on the host")
        victims = free[: request.count]
        return EvictionDecision(victims, "deepest", [f"depth {self.depth(self.key_of[block])}" for block in victims])


class LeavesAChild(Plugin):
    """Offloads the last block of a prefix, and names the one above it without it."""

    def attach(self, engine):
        self.engine = engine

    def select_victims(self, request):
        last = request.depth.argmax()
        self.engine.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, (int(request.block_ids[last]),)))
        return [int(request.parent_ids[last])]


class DictTier(Books):
    """A third tier: a dictionary from a prefix to the bytes of its last block, filled from the host tier."""

    def __init__(self):
        super().__init__(offload=True)
        self.bytes_of = {}  # key -> bytes of the block
        self.saved = self.adopted = self.late = 0

    def admit(self, request):
        self.save()
        self.load(request.request_id)
        return True

    def on_step_end(self, result):
        self.save()

    def save(self):
        for block, key in list(self.key_of.items()):
            if key not in self.bytes_of:
                try:
                    (content,) = self.engine.host_bytes([block])
                except PluginError as error:
                    self.late += "still on its way" in str(error)
                    continue
                self.bytes_of[key] = content
                self.saved += 1
                self.engine.unpin([block])

    def load(self, request_id):
        tokens, namespace = self.engine.request_tokens(request_id)
        size = self.engine.block_size
        keys = (prefix_hashes(tokens, size) ^ namespace_key(namespace)).tolist()
        first = next((place for place, key in enumerate(keys) if key not in self.block_of), len(keys))
        wanted = keys[first:]
        while wanted and wanted[-1] not in self.bytes_of:
            wanted.pop()
        if not wanted or any(key not in self.bytes_of for key in wanted):
            return
        ids, buffers = self.engine.reserve_host(len(wanted))
        for key, buffer in zip(wanted, buffers, strict=False):
            buffer[:] = self.bytes_of[key]
        wanted = wanted[: len(ids)]
        taken = self.engine.adopt_host(ids, tokens[: (first + len(ids)) * size], namespace)
        if taken != tuple(ids):
            self.mismatches.append(f"{taken} of {ids} were taken")
        for place, (key, block) in enumerate(zip(wanted, taken, strict=True)):
            self.add(key, block, keys[first + place - 1] if first + place else None)
        self.adopted += len(taken)
        if np.any([self.engine.get_block_info([block])[0].tier is not Tier.CPU for block in taken]):
            self.mismatches.append("adopted on another tier")
