"""The prefix cache of LMDeploy's PyTorch engine: what is looked up, what is published, and who is told."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sagellm.core.hooks import PrefixMatch, PrefixQuery, PrefixRelease, PrefixUpdate
from sagellm.core.host import Nonsense, PluginHost
from sagellm.engines.lmdeploy.kv_manager import BUILT_IN, KVManager
from sagellm.engines.lmdeploy.pooling import needs_every_token
from sagellm.engines.lmdeploy.prefix_cache import BlockIds, PrefixCache, namespace_of, num_shareable
from sagellm.engines.lmdeploy.prefix_keys import PrefixKeys, hexadecimal
from sagellm.engines.lmdeploy.requests import tenant_of


@dataclass(slots=True)
class LookupCounts:
    """Tokens and whole blocks that lookups asked for, and that they found as a contiguous prefix."""

    query_tokens: int = 0
    hit_tokens: int = 0
    query_blocks: int = 0
    hit_blocks: int = 0

    def add(self, query_tokens: int, hit_tokens: int, block_size: int) -> None:
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens
        self.query_blocks += query_tokens // block_size
        self.hit_blocks += hit_tokens // block_size


class PrefixHooks:
    """`seq` is LMDeploy's `SchedulerSequence`.

    Listeners get a change before any question that depends on it. `_told` is what listeners and the record know
    of who holds what: so each request that they were told of lets go of exactly that, once, also where it is nothing.
    """

    def __init__(self, host: PluginHost, kv: KVManager, cache: PrefixCache, num_whole: Callable[[Any], int]) -> None:
        self._host = host
        self._kv = kv
        self._cache = cache
        self._num_whole = num_whole
        self.num_fresh = 1  # tokens of a prompt that are always computed: there must be one to sample from
        self._block_size = cache.block_size
        self.first = LookupCounts()
        self.retries = LookupCounts()
        self._counted: set[int] = set()  # requests whose first lookup was counted
        self._again: set[int] = set()  # requests that lost their blocks since the last lookup that was counted
        heard = ("on_prefix_matched", "on_prefix_stored", "on_prefix_released")
        self._is_heard = host.recorder.enabled or any(host.listens(hook) for hook in heard)
        self._keys = PrefixKeys(cache.block_size)
        self._told: dict[int, tuple[int, int]] = {}  # seq id -> request id, how many of its first blocks it holds

    # ---- lookup

    def lookup(self, seq: Any) -> None:
        """Before a request may start: share the cached blocks that hold the beginning of its tokens."""
        cache, num_blocks, num_done = self._cache, len(seq.logical_blocks), seq.num_history_ids
        if num_blocks > cache.num_held(seq):
            return  # sent back with its blocks: a match would be appended behind blocks that it computed itself
        try:
            limit = min(num_shareable(seq), max(0, seq.num_valid_ids - self.num_fresh)) // self._block_size
            if seq.return_logits or needs_every_token(seq):  # cached tokens are not computed
                limit = 0
            source = BUILT_IN
            if self._host.plugins and not num_blocks and (answer := self._ask(seq)):
                source, limit = answer[0], min(limit, answer[1])
            num_found, is_any_away = cache.match(seq, limit)
            is_worth_telling = num_found > num_blocks or seq.seq_id not in self._counted or seq.seq_id in self._again
            if self._is_heard and is_worth_telling:
                self._tell_matched(seq, num_blocks, num_found, limit, source)
            num_kept = self._bring_back(seq, num_blocks) if is_any_away else num_found
            self._count(seq, max(num_kept - num_blocks, 0))
        except Exception:
            cache.undo(seq, num_blocks, num_done)
            raise

    def _ask(self, seq: Any) -> tuple[str, int] | None:
        """(plug-in, number of blocks that it found); None if there is no plug-in, or it leaves the lookup to the engine."""
        if not self._host.decides("lookup_prefix"):
            return None
        query = PrefixQuery(seq.session_id, _read_only(seq.valid_ids), namespace_of(seq), self._block_size)
        decided = self._host.decide("lookup_prefix", query, lambda answer: self._check(query, answer))
        return None if decided is None or decided[1] is None else decided

    def _check(self, query: PrefixQuery, answer: Sequence[int] | None) -> int | None:
        """How many blocks were answered. They must be those of the index, so a wrong answer cannot corrupt output."""
        if answer is None:
            return None
        size = self._block_size
        answered = [int(block) for block in answer[: len(query.token_ids) // size]]
        path = self._cache.path(query.token_ids, query.namespace).tolist()
        for place, block in enumerate(answered):
            if place < len(path) and block == path[place]:
                continue
            if not self._cache.holds(block):
                raise Nonsense(f"block {block} is not cached")
            raise Nonsense(f"block {block} does not hold tokens {place * size} to {(place + 1) * size} of the request")
        return len(answered)

    def _bring_back(self, seq: Any, first: int) -> int:
        """How many blocks of a request, of which those from `first` on were just matched, have their bytes on the device now.

        The match is undone for the others.
        """
        num_kept = first + self._kv.bring_back(seq.logical_blocks[first:].copy())
        if num_kept < seq.num_blocks:
            self._cache.cut(seq, num_kept)
            self._tell_released(seq.seq_id, num_kept)
        return num_kept

    def _tell_matched(self, seq: Any, before: int, num_found: int, limit: int, source: str) -> None:
        """After a lookup that made `num_found` blocks the request's first ones; it had `before`."""
        num_added = max(num_found - before, 0)
        num_matched, first = num_added * self._block_size, seq.seq_id not in self._counted
        blocks, keys = seq.logical_blocks[before : before + num_added], self._keys.of_all(seq)
        self._told[seq.seq_id] = seq.session_id, num_found
        if self._host.recorder.enabled:
            self._host.recorder.write(
                "lookup", request=seq.session_id, tokens=seq.num_valid_ids, matched=num_matched, limit=limit, blocks=blocks,
                source=source, first=first, retry=seq.seq_id in self._again, namespace=namespace_of(seq),
                hashes=hexadecimal(keys),
            )  # fmt: skip
        if self._host.listens("on_prefix_matched"):
            keys.flags.writeable = False
            match = PrefixMatch(
                seq.session_id, seq.num_valid_ids, num_matched, tuple(blocks.tolist()), source, keys, limit, first,
                tenant_of(seq), time.monotonic(),
            )  # fmt: skip
            self._host.post("on_prefix_matched", match)

    def _count(self, seq: Any, num_blocks: int) -> None:
        """A lookup gave the request `num_blocks` blocks that it can use, or none."""
        seq_id, num_matched = seq.seq_id, num_blocks * self._block_size
        if seq_id not in self._counted:
            self._counted.add(seq_id)
            self.first.add(seq.num_valid_ids, num_matched, self._block_size)
        elif seq_id in self._again:
            self.retries.add(seq.num_valid_ids, num_matched, self._block_size)
        self._again.discard(seq_id)

    # ---- store

    def publish(self, running: Sequence[Any]) -> None:
        """After a step of these requests: cache the full blocks that it completed.

        The keys and values of the first `num_history_ids` tokens are computed, whatever became of a request while its
        step was on the way; one that lost its blocks meanwhile holds none.
        """
        size, num_held = self._block_size, self._cache.num_held
        for seq in running:
            first, num_computed = num_held(seq), seq.num_history_ids // size
            if num_computed > first:
                num_blocks = min(num_computed, self._num_whole(seq), num_shareable(seq) // size)
                if num_blocks > first:
                    self._publish(seq, first, num_blocks)

    def _publish(self, seq: Any, first: int, num_blocks: int) -> None:
        replaced = self._cache.publish(seq, num_blocks)
        if replaced is not None:
            self._kv.give_up(replaced, BUILT_IN, "computed again on the device")
        if (tenant := tenant_of(seq)) or self._kv.tenant_of:
            self._kv.note_tenant(seq.logical_blocks[first:num_blocks].tolist(), tenant)
        if self._is_heard:
            self._tell_stored(seq, first, seq.logical_blocks[first:num_blocks])

    def _tell_stored(self, seq: Any, first: int, blocks: BlockIds) -> None:
        last, first_token = first + len(blocks), first * self._block_size
        keys, parent = self._keys.of_blocks(seq, first, last)
        self._told[seq.seq_id] = seq.session_id, last
        if self._host.recorder.enabled:
            self._host.recorder.write(
                "store", request=seq.session_id, first_token=first_token, blocks=blocks, namespace=namespace_of(seq),
                hashes=hexadecimal(keys), parent=None if parent is None else f"{parent:016x}",
            )  # fmt: skip
        if self._host.listens("on_prefix_stored"):
            keys.flags.writeable = False
            tokens = _read_only(seq.all_ids[first_token : last * self._block_size])
            update = PrefixUpdate(
                seq.session_id, namespace_of(seq), first_token, tokens, tuple(blocks.tolist()), keys, parent,
                tenant_of(seq), time.monotonic(),
            )  # fmt: skip
            self._host.post("on_prefix_stored", update)

    # ---- loss and end

    def lost_blocks(self, seq_id: int) -> None:
        """The next lookup of this request is a retry."""
        self._cache.release(seq_id)
        self._tell_released(seq_id, 0)
        if seq_id in self._counted:
            self._again.add(seq_id)

    def ended(self, seq: Any) -> None:
        self._counted.discard(seq.seq_id)
        self._again.discard(seq.seq_id)
        self._cache.ended(seq)
        self._tell_released(seq.seq_id, 0)
        self._keys.forget(seq.seq_id)

    def lost_cache(self) -> None:
        """Report the release of all blocks: the cache is off."""
        for seq_id in list(self._told):
            self._tell_released(seq_id, 0)

    def _tell_released(self, seq_id: int, num_kept: int) -> None:
        if seq_id not in self._told:
            return
        request_id, num_held = self._told.pop(seq_id)
        if num_kept:
            self._told[seq_id] = request_id, min(num_kept, num_held)
            if num_kept >= num_held:
                return
        self._host.recorder.write("release", request=request_id, kept=num_kept)
        if self._host.listens("on_prefix_released"):
            release = PrefixRelease(request_id, num_kept, time.monotonic())
            self._host.post("on_prefix_released", release)


def _read_only(tokens: np.ndarray) -> np.ndarray:
    copy = np.array(tokens, np.int64)
    copy.flags.writeable = False
    return copy
