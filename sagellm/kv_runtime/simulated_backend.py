"""An engine's tiers without an engine: which blocks are where. No bytes are kept."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from sagellm.core.errors import CapacityError, TierError
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.base import TieredBackendProtocol

__all__ = ["SimulatedBackend"]

Fault = Callable[[str, BlockKey], str | None]


class SimulatedBackend(TieredBackendProtocol):
    """Holds keys by tier, with the capacities, refusals and futures of a real backend.

    Every move is done when its call returns. A save or a load whose deadline has passed is refused.

    Args:
        capacities: tier -> blocks.
        fault: asked with ("migrate", "save" or "load", key) for a reason to refuse; None lets it pass.
    """

    def __init__(
        self, capacities: dict[Tier, int], *, block_size: int = 1, block_bytes: int = 1,
        fault: Fault | None = None,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.moved_bytes: Counter[tuple[Tier, Tier]] = Counter()
        self._capacities = {Tier(tier): blocks for tier, blocks in capacities.items()}
        self._fault = fault or (lambda call, key: None)
        self._held: dict[Tier, dict[BlockKey, None]] = {tier: {} for tier in self._capacities}
        self._reserved: Counter[Tier] = Counter()
        self._loaded: list[tuple[BlockKey, Tier]] = []

    # what there is

    def capacity(self, tier: Tier) -> int:
        return self._capacities.get(tier, 0)

    def num_free(self, tier: Tier) -> int:
        return self.capacity(tier) - len(self._held.get(tier, ())) - self._reserved[tier]

    def holds(self, tier: Tier, key: BlockKey) -> bool:
        return key in self._held.get(tier, ())

    def put(self, keys: Sequence[BlockKey], tier: Tier = Tier.GPU) -> None:
        """Blocks were computed. Raises CapacityError: the tier has no room for them."""
        new = [key for key in dict.fromkeys(keys) if key not in self._on(tier)]
        if len(new) > self.num_free(tier):
            raise CapacityError(
                f"{len(new)} blocks for {self.num_free(tier)} free ones of tier {tier.value}; make room first."
            )
        self._held[tier].update(dict.fromkeys(new))

    # the protocol

    def migrate(self, plan: MigrationPlan) -> MigrationResult:
        """Raises TierError: not between gpu and cpu, or one of them does not exist."""
        if {plan.src_tier, plan.dst_tier} != {Tier.GPU, Tier.CPU}:
            pair = f"{plan.src_tier.value} -> {plan.dst_tier.value}"
            raise TierError(f"cannot migrate {pair}; allowed: gpu -> cpu, cpu -> gpu. Others: save and load.")
        src, dst = self._on(plan.src_tier), self._on(plan.dst_tier)
        moved: list[int] = []
        refused: dict[int, str] = {}
        for key in map(BlockKey, plan.block_ids):
            why = self._fault("migrate", key)
            if key not in src:
                why = "not on the tier"
            elif self.num_free(plan.dst_tier) < 1:
                why = "no free block on the other tier"
            if why:
                refused[key] = why
                continue
            del src[key]
            dst[key] = None
            moved.append(key)
            self.moved_bytes[plan.src_tier, plan.dst_tier] += self.block_bytes
        return MigrationResult(tuple(moved), refused)

    def drop(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        held = self._on(tier)
        for key in keys:
            held.pop(key, None)

    def save(self, keys: Sequence[BlockKey], tier: Tier, deadline_s: float) -> Future[MigrationResult]:
        source = next(
            (on for on in (Tier.GPU, Tier.CPU) if any(key in self._held.get(on, ()) for key in keys)), Tier.CPU
        )
        return self._copy("save", keys, source, Tier(tier), deadline_s)

    def load(self, keys: Sequence[BlockKey], tier: Tier, deadline_s: float) -> Future[MigrationResult]:
        return self._copy("load", keys, Tier.NVME, Tier(tier), deadline_s)

    def commit_loads(self) -> tuple[BlockKey, ...]:
        loaded, self._loaded = self._loaded, []
        for key, tier in loaded:
            self._reserved[tier] -= 1
            self._on(tier)[key] = None
        return tuple(key for key, _ in loaded)

    def _copy(
        self, call: str, keys: Sequence[BlockKey], src: Tier, dst: Tier, deadline_s: float
    ) -> Future[MigrationResult]:
        held = self._on(dst)
        moved: list[int] = []
        refused: dict[int, str] = {}
        for key in keys:
            sources = (Tier.GPU, Tier.CPU) if call == "save" else (Tier.NVME,)
            if why := self._why_not(call, key, sources, dst) or ("deadline" if deadline_s < 0 else ""):
                refused[key] = why
                continue
            moved.append(key)
            if call == "load":  # found after `commit_loads` only; the room is taken
                self._reserved[dst] += 1
                self._loaded.append((key, dst))
            else:
                held[key] = None
        self.moved_bytes[src, dst] += len(moved) * self.block_bytes
        done: Future[MigrationResult] = Future()
        done.set_result(MigrationResult(tuple(moved), refused))
        return done

    def _why_not(self, call: str, key: BlockKey, sources: Sequence[Tier], dst: Tier) -> str | None:
        if not any(key in self._held.get(tier, ()) for tier in sources):
            return "not on the tier"
        if key in self._on(dst):
            return "there already"
        if self.num_free(dst) < 1:
            return "no free block on the other tier"
        return self._fault(call, key)

    def _on(self, tier: Tier) -> dict[BlockKey, None]:
        if tier not in self._held:
            raise TierError(
                f"there is no tier {tier.value} here; there are {', '.join(on.value for on in self._held)}."
            )
        return self._held[tier]


MemoryBackend = SimulatedBackend  # the name of earlier versions, which `comm_backend` has for another thing
