"""Changes of the books, each told to the tier's policy and to the quotas; and blocks that are on their way to a tier."""

from collections.abc import MutableMapping, Sequence

from sagellm.core.hooks import Tier
from sagellm.kv_policy.base import AccessHistory, BlockKey, CachedBlock, EvictionPolicy
from sagellm.kv_runtime.blocks import BlockManager
from sagellm.kv_runtime.quota import QuotaManager

__all__ = ["Placement"]


class Placement:
    """Keeps books, policies and quotas in step. O(1) a block, plus what the policies take.

    Attributes:
        arriving: blocks that are being saved or loaded, and to where.
        num_arriving: how many these are, by tier.
        history: accesses of the blocks of each tier, once a policy has asked.
    """

    def __init__(self, books: BlockManager, policies: MutableMapping[Tier, EvictionPolicy], quota: QuotaManager) -> None:
        self._books = books
        self._policies = policies
        self._quota = quota
        self.arriving: dict[BlockKey, tuple[Tier, CachedBlock]] = {}
        self.num_arriving = dict.fromkeys(Tier, 0)
        self.history = {tier: AccessHistory() for tier in Tier}

    def insert(self, block: CachedBlock, tier: Tier) -> None:
        """The block is on the tier now."""
        self._books.add(block, tier)
        self._policies[tier].on_insert(block)
        self._quota.charge(block.tenant_id, tier)

    def remove(self, key: BlockKey, tier: Tier, *, evicted: bool) -> None:
        """The block is not on the tier any more. `evicted`: to make room."""
        tenant = self._books.block(key).tenant_id
        self._books.remove(key, tier)
        self._policies[tier].on_remove(key, evicted)
        if self.history[tier].is_kept:
            self.history[tier].forget(key)
        self._quota.release(tenant, tier)

    def shift(self, key: BlockKey, src: Tier, dst: Tier, *, evicted: bool = False) -> None:
        """The block went from gpu to cpu or back. `evicted`: to make room."""
        block = self._books.block(key)
        self._books.move(key, src, dst)
        self._policies[src].on_remove(key, evicted)
        if self.history[src].is_kept:
            self.history[src].forget(key)
        self._policies[dst].on_insert(block)
        self._quota.release(block.tenant_id, src)
        self._quota.charge(block.tenant_id, dst)

    def hit(self, key: BlockKey, tier: Tier, time_s: float) -> None:
        """The block of the tier is used."""
        self._policies[tier].on_hit(key, time_s)
        self._books.touch(key)
        if self.history[tier].is_kept:
            self.history[tier].note(key, time_s)

    def exchange_policy(self, tier: Tier, policy: EvictionPolicy, time_s: float) -> EvictionPolicy:
        """Let another policy choose on the tier; return the former one.

        The new policy gets `on_insert` for each block of the tier, least recently used first.
        """
        for key in self._books.recency(tier):
            policy.on_insert(self._books.block(key)._replace(time_s=time_s))
        former, self._policies[tier] = self._policies[tier], policy
        return former

    def begin_arrival(self, key: BlockKey, tier: Tier) -> None:
        """A copy of the block is on its way to the tier; of two ways the first counts."""
        if key not in self.arriving:
            self.arriving[key] = tier, self._books.block(key)
            self.num_arriving[tier] += 1

    def end_arrival(self, key: BlockKey) -> CachedBlock:
        """The copy has arrived, or never will. Raises KeyError: none was on its way."""
        tier, block = self.arriving.pop(key)
        self.num_arriving[tier] -= 1
        if tier is not Tier.NVME:
            self._books.end_read(key)
        return block

    def arrive(self, keys: Sequence[BlockKey], tier: Tier) -> None:
        """Those of these that were on their way to the tier are there."""
        for key in reversed(keys):
            if self.arriving.get(key, (None,))[0] is tier:
                block = self.end_arrival(key)
                is_there = self._books.is_on(key, tier) or (tier is Tier.CPU and self._books.fast_tier(key) is not None)
                if not is_there and not self._books.collides(block):
                    self.insert(block, tier)
