"""Small policies of the tests' own: least recently used, first in first out, and some that break the contract."""

from sagellm.kv_policy.base import EvictionDecision, EvictionPolicy


class Recency(EvictionPolicy):
    """Least recently used."""

    name = "recency"

    def __init__(self, capacity, **options):
        super().__init__(capacity, **options)
        self.order = {}

    def on_insert(self, block):
        self.order[block.key] = None

    def on_hit(self, key, time_s=0.0):
        self.order[key] = self.order.pop(key)

    def on_remove(self, key, evicted=True):
        del self.order[key]

    def select_victims(self, context):
        context.take_in_order(self.order, lambda key: "least recently used")
        return context.decision()


class Arrival(Recency):
    """First in, first out."""

    name = "arrival"

    def on_hit(self, key, time_s=0.0):
        pass


class Lazy(Recency):
    """Gives one victim too few."""

    name = "lazy"

    def select_victims(self, context):
        context.count -= 1
        return super().select_victims(context)


class Foreign(Recency):
    """Names a block that is not on the tier."""

    name = "foreign"

    def select_victims(self, context):
        return EvictionDecision((2**63,), "odd")


class Greedy(Recency):
    """Names blocks that are held, the newest first."""

    name = "greedy"

    def select_victims(self, context):
        return EvictionDecision(tuple(reversed(self.order))[: context.count], "newest")


class Nothing(Recency):
    """Never gives anything up."""

    name = "nothing"

    def select_victims(self, context):
        return EvictionDecision(())
