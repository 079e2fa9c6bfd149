"""Eviction and migration policies of the tests, as small as they can be."""

from sagellm.core.hooks import EvictionDecision, MigrationPlan
from sagellm.kv_policy.base import MigrationDecision, MigrationPolicy
from sagellm.kv_policy.eviction.fifo import Fifo
from sagellm.kv_policy.eviction.lru import Lru


class Newest(Lru):
    name = "newest"

    def select_victims(self, context):
        context.take_in_order(list(self._queue)[::-1], lambda key: f"place {len(self._queue)}")
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
        return EvictionDecision(tuple(list(self._queue)[::-1][: context.count]))


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
