"""Whether the books agree with the engine, and what is done where they do not: the engine has the last word."""

from sagellm.core.hooks import BlockCounts, BlockState, MigrationPlan, MigrationResult, Tier, VictimRequest
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.base import RoomDecision
from sagellm.kv_runtime.engine_blocks import EngineBlocks

__all__ = ["Agreement"]


class Agreement:
    """Compares books and engine before an answer: as a whole, O(1), and the blocks of the answer, O(those)."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._engine, self._manager, self._books = blocks.engine, blocks.manager, blocks.books
        self._num_lost = 0  # notices, when the books were put right
        self._num_unlinked = 0  # blocks whose place among the others is not known yet

    def is_in_step(self, counts: BlockCounts) -> bool:
        """Return whether the engine and the books count equally many unheld blocks of the pool."""
        is_even = counts.cached == self._books.num_unlocked(Tier.GPU)
        return is_even and not self._num_unlinked and self._engine.num_lost_notices == self._num_lost

    def is_stale(self, room: RoomDecision, asked: Tier) -> bool:
        """Whether a block that is to leave the pool or the host tier is not there, or in use. `asked`: the victims' tier."""
        wanted: dict[BlockKey, Tier] = {key: asked for key, _ in room.victims}
        wanted.update((BlockKey(key), plan.src_tier) for plan in room.demote for key in plan.block_ids)
        wanted.update((key, tier) for tier, key, _ in room.drop if tier is not Tier.NVME)
        ids = [self._blocks.id_of.get(key) for key in wanted]
        if None in ids:
            return True
        infos = self._engine.get_block_info(ids)
        return any(
            info.state is not BlockState.CACHED or info.tier is not tier
            for info, tier in zip(infos, wanted.values(), strict=True)
        )

    def put_right(self, request: VictimRequest, now_s: float) -> None:
        """Make the books agree with the candidates. O(all blocks)."""
        blocks, block_size = self._blocks, self._engine.block_size
        blocks.counts["resynchronised"] += 1
        on_device = dict(zip(request.block_ids.tolist(), request.on_device.tolist(), strict=True))
        self._check_known(on_device, now_s)
        rows = zip(request.depth.tolist(), request.block_ids.tolist(), request.parent_ids.tolist(), strict=True)
        self._num_unlinked = 0
        for num_tokens, block_id, parent_id in sorted(rows):
            if block_id not in blocks.key_of:
                parent = blocks.key_of.get(parent_id)
                if parent is None and num_tokens > block_size:
                    self._num_unlinked += 1  # somebody holds the block before it, so that it is no candidate
                    continue
                key = blocks.foreign_key()
                tier = Tier.GPU if on_device[block_id] else Tier.CPU
                self._manager.adopted([blocks.block(key, parent, num_tokens // block_size, "", now_s)], tier, now_s)
                blocks.name(block_id, key)
        self._num_lost = self._engine.num_lost_notices

    def _check_known(self, on_device: dict[int, bool], now_s: float) -> None:
        """Return places of the known blocks, and whether requests hold them."""
        infos = self._engine.get_block_info(list(self._blocks.key_of))
        locked, unlocked = [], []
        for info in infos:
            key = self._blocks.key_of[info.block_id]
            if info.state is BlockState.FREE:
                self._blocks.forget(info.block_id)
                continue
            here = self._books.fast_tier(key)
            if here is not info.tier:
                plan = MigrationPlan(here, info.tier, (key,))
                self._manager.moved(plan, MigrationResult((key,), {}), now_s)
            is_held = self._books.num_locks(key) > 0
            if is_held and info.block_id in on_device:
                unlocked.append(key)
            elif not is_held and info.block_id not in on_device:
                locked.append(key)
        if locked or unlocked:
            self._manager.corrected(locked, unlocked, now_s)
