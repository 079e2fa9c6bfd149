"""`EngineHandle` of TurboMind, one for each plug-in.

Python cannot reach the engine's block manager, which belongs to the engine's threads. A question carries what could be asked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sagellm.core.errors import PluginError
from sagellm.core.guard import PluginGuard
from sagellm.core.hooks import (
    AllocationResult,
    BlockCounts,
    BlockState,
    EvictionNotice,
    KVBlockInfo,
    MigrationPlan,
    MigrationResult,
    PrefixCandidate,
    Tier,
)

NO_HOST_TIER = "TurboMind's host tier is for native hooks alone (SageKvApi.migrate in sage_hooks.h); use --engine pytorch."


class Handle:
    """Works inside a hook only. `hooks` is the `TurboMindHooks` of the process."""

    def __init__(self, hooks: Any, guard: PluginGuard, block_bytes: int) -> None:
        self._hooks = hooks
        self._guard = guard
        self.block_bytes = block_bytes
        self.layout = ""

    @property
    def block_size(self) -> int:
        return self._hooks.block_size

    def block_counts(self) -> BlockCounts:
        """Raises PluginError outside `select_victims` and `schedule`."""
        question = self._ask("block counts", "select_victims", "schedule")
        if question.topic == "schedule":
            free, cached, active = question.free_blocks, question.cached_blocks, question.active_blocks
            return BlockCounts(free + cached + active, free, cached, active)
        if question.counts is None:
            raise PluginError("this engine does not tell how many blocks it has.")
        return BlockCounts(*(question.counts[name] for name in ("total", "free", "cached", "active")))

    def get_block_info(self, block_ids: Sequence[int] | None = None) -> list[KVBlockInfo]:
        """Information on candidates. Raises PluginError outside `select_victims`, and for any other block."""
        question = self._ask("block information", "select_victims")
        access = dict(zip(question.ids.tolist(), question.timestamps.tolist(), strict=True))
        ids = list(access) if block_ids is None else [int(block) for block in block_ids]
        if foreign := sorted(set(ids) - access.keys()):
            raise PluginError(f"blocks {foreign} are no candidates; TurboMind tells a plug-in of those alone.")
        return [KVBlockInfo(block, Tier.GPU, BlockState.CACHED, self.block_bytes, 0, access[block]) for block in ids]

    def allocate_blocks(self, count: int) -> AllocationResult:
        """Always raises: only the engine's threads can allocate."""
        raise PluginError("TurboMind's pool gives no blocks to plug-ins; use the PyTorch engine.")

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        raise PluginError("TurboMind's pool gives no blocks to plug-ins, so no block can be freed.")

    def get_utilization(self) -> float:
        """Raises PluginError outside `select_victims` and `schedule`."""
        counts = self.block_counts()
        return 1 - counts.free / counts.total

    def get_fragmentation(self) -> float:
        raise PluginError("TurboMind does not tell how many tokens its blocks hold; use the PyTorch engine.")

    def migrate_blocks(self, plan: MigrationPlan) -> MigrationResult:
        """Always raises: each rank must move its share of a block on its own thread, where no Python is."""
        raise PluginError("TurboMind's blocks are moved by native hooks alone (SageKvApi.migrate in sage_hooks.h).")

    def drop_blocks(self, block_ids: Sequence[int], reasons: Sequence[str] = ()) -> tuple[int, ...]:
        """Always raises: the blocks are in the hands of the engine's threads, which ask for victims when they need room."""
        raise PluginError("TurboMind gives up blocks only when it asks for victims; name them in select_victims.")

    def register_eviction_callback(self, callback: Callable[[EvictionNotice], None]) -> None:
        if not self._guard.is_calling:
            raise PluginError("the engine handle works inside a hook only, on the thread that runs the hook.")
        self._hooks.add_callback(self._guard.name, callback)

    @property
    def is_recording(self) -> bool:
        return bool(self._hooks.recorder.enabled)

    @property
    def num_lost_notices(self) -> int:
        return self._guard.num_lost

    def record(self, event: str, **fields: object) -> None:
        if not self._guard.is_calling:
            raise PluginError("the engine handle works inside a hook only, on the thread that runs the hook.")
        self._hooks.recorder.write(event, **fields)

    def prefix_candidates(self, token_ids: Sequence[int] | np.ndarray, namespace: str) -> list[PrefixCandidate]:
        raise PluginError("TurboMind looks prefixes up on its own threads; use the PyTorch engine.")

    def request_tokens(self, request_id: int) -> tuple[np.ndarray, str]:
        raise PluginError("TurboMind tells no tokens of requests that wait.")

    @property
    def checks_drafts(self) -> bool:
        return False

    @property
    def comm_backends(self) -> Mapping[str, tuple[str, ...]]:
        return {}  # its communicators take no rules

    def request_blocks(self, request_id: int) -> tuple[int, ...]:
        raise PluginError("TurboMind does not tell which blocks a request has; use the PyTorch engine.")

    def transfer_state(self, request_id: int) -> str:
        return ""  # it takes no part in prefill/decode groups

    def host_bytes(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        raise PluginError(NO_HOST_TIER)

    def unpin(self, block_ids: Sequence[int]) -> None:
        raise PluginError(NO_HOST_TIER)

    def reserve_host(self, count: int) -> tuple[list[int], list[np.ndarray]]:
        raise PluginError(NO_HOST_TIER)

    def adopt_host(self, block_ids: Sequence[int], token_ids: np.ndarray, namespace: str) -> tuple[int, ...]:
        raise PluginError(NO_HOST_TIER)

    def free_host(self, block_ids: Sequence[int]) -> None:
        raise PluginError(NO_HOST_TIER)

    def _ask(self, what: str, *topics: str) -> Any:
        question = self._hooks.question
        if not self._guard.is_calling or question is None or question.topic not in topics:
            raise PluginError(f"TurboMind tells {what} inside {' and '.join(topics)} only.")
        return question
