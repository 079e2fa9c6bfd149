"""Eviction and migration policies of the tests, as small as they can be."""

from collections import OrderedDict

from sagellm.core.hooks import EvictionDecision, MigrationPlan
from sagellm.kv_policy.base import EvictionPolicy, MigrationDecision, MigrationPolicy


class Lru(EvictionPolicy):
    name = "lru"

    def __init__(self, capacity, **options):
        super().__init__(capacity, **options)
        self.order = OrderedDict()

    def on_insert(self, block):
        assert block.key not in self.order
        self.order[block.key] = None

    def on_hit(self, key, time_s=0.0):
        self.order.move_to_end(key)

    def on_remove(self, key, evicted=True):
        del self.order[key]

    def select_victims(self, context):
        context.take_in_order(self.order, lambda key: "least recently used")
        return context.decision()


class Fifo(Lru):
    name = "fifo"

    def on_hit(self, key, time_s=0.0):
        assert key in self.order

    def select_victims(self, context):
        context.take_in_order(self.order, lambda key: "inserted first")
        return context.decision()


class Newest(Lru):
    name = "newest"

    def select_victims(self, context):
        context.take_in_order(list(self.order)[::-1], lambda key: f"place {len(self.order)}")
        return context.decision()


class Lazy(Lru):
    """Never names a victim."""

    name = "lazy"

    def select_victims(self, context):
        return EvictionDecision(())


class Foreign(Lru):
    name = "foreign"

    def select_victims(self, context):
        return EvictionDecision((12345678,))


class Locked(Lru):
    """Names blocks whether or not they may go."""

    name = "locked"

    def select_victims(self, context):
        return EvictionDecision(tuple(list(self.order)[::-1][: context.count]))


class Raising(Lru):
    name = "raising"

    def select_victims(self, context):
        raise RuntimeError("no idea")


class Odd(Lru):
    name = "odd"

    def select_victims(self, context):
        return 17


POLICIES = {kind.name: kind for kind in (Lru, Fifo, Newest, Lazy, Foreign, Locked, Raising, Odd)}


def make_policy(name, capacity, **options):
    return POLICIES[name](capacity, **options)


class Chooses(MigrationPolicy):
    """Moves the blocks for which `is_worth` says so; of a load the first ones up to one that is not."""

    name = "chooses"

    def __init__(self, is_worth):
        self.is_worth = is_worth

    def plan(self, context):
        keys = []
        for block in context.blocks:
            if self.is_worth(block.key):
                keys.append(block.key)
            elif context.purpose.value == "load":
                break
        return MigrationDecision(
            MigrationPlan(context.src_tier, context.dst_tier, tuple(keys)), float(len(keys)), "as told"
        )


class KeepsEven(Chooses):
    name = "even"

    def __init__(self):
        super().__init__(lambda key: key % 2 == 0)


def make_migration(name, **options):
    return None if name == "always" else {"even": KeepsEven}[name](**options)
