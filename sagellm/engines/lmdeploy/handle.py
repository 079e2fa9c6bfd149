"""`EngineHandle` of LMDeploy's PyTorch engine, one for each plug-in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from sagellm.core.errors import PluginError
from sagellm.core.events import Recorder
from sagellm.core.guard import PluginGuard
from sagellm.core.hooks import (
    AllocationResult,
    BlockCounts,
    EvictionNotice,
    KVBlockInfo,
    MigrationPlan,
    MigrationResult,
    PrefixCandidate,
    Tier,
)
from sagellm.engines.lmdeploy.kv_manager import KVManager

OUTSIDE = "the engine handle works inside a hook only, on the thread that runs the hook."


class Requests(Protocol):
    """Questions of a handle about requests; each raises PluginError for one that is unknown."""

    def tokens_of(self, request_id: int) -> tuple[np.ndarray, str]: ...

    def blocks_of(self, request_id: int) -> tuple[int, ...]: ...

    def transfer_of(self, request_id: int) -> str: ...

    def checks_drafts(self) -> bool: ...

    def comm_backends(self) -> Mapping[str, tuple[str, ...]]: ...


class Handle:
    """Works inside a hook only. Each request runs to its end before the engine goes on, even after an overrun."""

    def __init__(
        self, kv: KVManager, guard: PluginGuard, recorder: Recorder, requests: Requests, layout: str = ""
    ) -> None:
        self._kv = kv
        self._guard = guard
        self._recorder = recorder
        self._requests = requests
        self.layout = layout
        self.block_size = kv.block_size

    @property
    def block_bytes(self) -> int:
        return self._kv.block_bytes

    def block_counts(self) -> BlockCounts:
        return self._ask(self._kv.counts)

    def get_block_info(self, block_ids: Sequence[int] | None = None) -> list[KVBlockInfo]:
        return self._ask(self._kv.info, None if block_ids is None else self._plain(block_ids))

    def allocate_blocks(self, count: int) -> AllocationResult:
        return self._ask(self._kv.pool.allocate, int(count), self._guard.name)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        self._ask(self._kv.pool.free, self._plain(block_ids), self._guard.name)

    def get_utilization(self) -> float:
        return self._ask(self._kv.pool.get_utilization)

    def get_fragmentation(self) -> float:
        return self._ask(self._kv.pool.get_fragmentation)

    def migrate_blocks(self, plan: MigrationPlan) -> MigrationResult:
        plan = MigrationPlan(Tier(plan.src_tier), Tier(plan.dst_tier), tuple(self._plain(plan.block_ids)))
        return self._ask(self._kv.migrate, plan, self._guard.name)

    def drop_blocks(self, block_ids: Sequence[int], reasons: Sequence[str] = ()) -> tuple[int, ...]:
        ids, why = self._plain(block_ids), [str(reason) for reason in reasons]
        if why and len(why) != len(ids):
            raise PluginError(f"{len(why)} reasons for {len(ids)} blocks; give one for each, or none.")
        return self._ask(self._kv.drop, ids, why, self._guard.name)

    def register_eviction_callback(self, callback: Callable[[EvictionNotice], None]) -> None:
        self._ask(self._kv.add_callback, self._guard.name, callback)

    @property
    def is_recording(self) -> bool:
        return self._recorder.enabled

    @property
    def num_lost_notices(self) -> int:
        return self._guard.num_lost

    def record(self, event: str, **fields: object) -> None:
        if not self._guard.is_calling:
            raise PluginError(OUTSIDE)
        self._recorder.write(event, **fields)

    def prefix_candidates(self, token_ids: Sequence[int] | np.ndarray, namespace: str) -> list[PrefixCandidate]:
        return self._ask(self._kv.prefix_candidates, np.array(token_ids, np.int64), str(namespace))

    def request_tokens(self, request_id: int) -> tuple[np.ndarray, str]:
        return self._ask(self._requests.tokens_of, int(request_id))

    @property
    def checks_drafts(self) -> bool:
        return self._ask(self._requests.checks_drafts)

    @property
    def comm_backends(self) -> Mapping[str, tuple[str, ...]]:
        return self._ask(self._requests.comm_backends)

    def request_blocks(self, request_id: int) -> tuple[int, ...]:
        return self._ask(self._requests.blocks_of, int(request_id))

    def transfer_state(self, request_id: int) -> str:
        return self._ask(self._requests.transfer_of, int(request_id))

    def host_bytes(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        return self._ask(self._kv.host_bytes, self._plain(block_ids))

    def unpin(self, block_ids: Sequence[int]) -> None:
        pass  # what `host_bytes` gave are copies

    def reserve_host(self, count: int) -> tuple[list[int], list[np.ndarray]]:
        return self._ask(self._kv.host_blocks.reserve, int(count), self._guard.name)

    def adopt_host(self, block_ids: Sequence[int], token_ids: np.ndarray, namespace: str) -> tuple[int, ...]:
        tokens = np.array(token_ids, np.int64)
        return self._ask(self._kv.adopt, self._plain(block_ids), tokens, str(namespace), self._guard.name)

    def free_host(self, block_ids: Sequence[int]) -> None:
        self._ask(self._kv.host_blocks.free, self._plain(block_ids), self._guard.name)

    def _plain(self, block_ids: Iterable[int]) -> list[int]:
        """Numbers of our own, made before the engine's state is taken hold of: reading an argument may run any code.

        Raises:
            PluginError: more ids than there are blocks.
        """
        ids = [int(block) for block in islice(block_ids, self._kv.num_blocks + 1)]
        if len(ids) > self._kv.num_blocks:
            raise PluginError(f"more than {self._kv.num_blocks} block ids; the engine has no more blocks.")
        return ids

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._guard.engine_access:
            if not self._guard.is_calling:
                raise PluginError(OUTSIDE)
            return function(*args)
