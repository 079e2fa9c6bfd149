"""A flat tier without pins or parents, unless a test sets some, for questions by hand."""

from sagellm.kv_policy.base import CachedBlock, PolicyContext


class Flat:
    def __init__(self, policy):
        self.policy = policy
        self.pins = {}
        self.parents = {}

    def insert(self, *keys, **attributes):
        for key in keys:
            self.pins[key] = 0
            self.policy.on_insert(CachedBlock(key, **attributes))
        return self

    def hit(self, *keys):
        for key in keys:
            self.policy.on_hit(key)
        return self

    def remove(self, *keys, evicted=True):
        for key in keys:
            del self.pins[key]
            parent = self.parents.get(key)
            if parent in self.pins:
                self.pins[parent] -= 1
            self.policy.on_remove(key, evicted)
        return self

    def pin(self, *keys):
        for key in keys:
            self.pins[key] += 1
        return self

    def unpin(self, *keys):
        for key in keys:
            self.pins[key] -= 1
        return self

    def chain(self, *keys, root_first=False):
        """Inserts a sequence, root first in `keys`, as it is told: deepest first, unless it came block by block."""
        depths = range(1, len(keys) + 1)
        for depth in depths if root_first else reversed(depths):
            key = keys[depth - 1]
            self.parents[key] = keys[depth - 2] if depth > 1 else None
            self.pins[key] = int(depth < len(keys))
            self.policy.on_insert(CachedBlock(key, self.parents[key], depth))
        return self

    def ask(self, count=1, incoming=()):
        return self.policy.select_victims(PolicyContext(count, self, incoming=incoming))

    def victims(self, count=1, incoming=()):
        return list(self.ask(count, incoming).victims)

    def evict(self, count=1, incoming=()):
        victims = self.victims(count, incoming)
        self.remove(*victims)
        return victims

    def num_pins(self, key):
        return self.pins[key]

    def parent_of(self, key):
        return self.parents.get(key)
