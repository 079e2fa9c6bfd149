"""The prefix cache of LMDeploy's PyTorch engine: hooks before a lookup and after a store."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sagellm.core.hooks import PrefixMatch, PrefixQuery, PrefixUpdate
from sagellm.core.host import Nonsense, PluginHost
from sagellm.engines.lmdeploy.kv_manager import BUILT_IN, KVManager


@dataclass
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
    """`trie` is LMDeploy's `BlockTrie`, `seq` its `SchedulerSequence`."""

    def __init__(self, host: PluginHost, kv: KVManager) -> None:
        self._host = host
        self._kv = kv
        self.first = LookupCounts()
        self.retries = LookupCounts()
        self._counted: set[int] = set()  # requests whose first lookup was counted
        self._again: set[int] = set()  # requests that lost their blocks since the last lookup that was counted

    def lookup(self, trie: Any, seq: Any) -> bool:
        """Before LMDeploy's own lookup; True if there is nothing left for it to look up."""
        node = seq.logical_blocks.last_shared_node
        num_shared = 0 if node is None else node.num_matched // trie.block_size
        if seq.num_blocks > num_shared:
            # Sent back with its blocks: LMDeploy would append a match behind blocks that the request computed itself.
            return True
        if not self._host.decides("lookup_prefix") or seq.num_blocks:
            return False
        tokens = _read_only(seq.valid_ids)
        query = PrefixQuery(seq.session_id, tokens, _namespace(seq), trie.block_size)
        decided = self._host.decide("lookup_prefix", query, lambda answer: self._check(trie, seq, tokens, answer))
        if decided is None or decided[1] is None:
            return False
        name, nodes = decided
        blocks = np.array([node.block for node in nodes], np.int64)
        if nodes:
            trie.allocator.update_access_time(blocks)
            trie.allocator.add_ref_count(blocks, 1)
            seq.logical_blocks.append(blocks)
            seq.set_step(nodes[-1].num_matched)
        seq.logical_blocks.last_shared_node = nodes[-1] if nodes else trie.get_root(seq.adapter_name)
        self.matched(trie, seq, blocks, source=name)
        return True

    def _check(self, trie: Any, seq: Any, tokens: np.ndarray, answer: Sequence[int] | None) -> list[Any] | None:
        """The trie nodes of the answered blocks; their tokens are compared, so a wrong answer cannot corrupt output."""
        if answer is None:
            return None
        nodes, parent = [], trie.get_root(seq.adapter_name)
        for block in answer[: len(tokens) // trie.block_size]:
            node = self._kv.nodes.get(int(block))
            end = parent.num_matched + trie.block_size
            if node is None:
                raise Nonsense(f"block {block} is not cached")
            if node.parent is not parent or not np.array_equal(node.tokens, tokens[end - trie.block_size : end]):
                raise Nonsense(f"block {block} does not hold tokens {end - trie.block_size} to {end} of the request")
            if end >= len(tokens):  # one token must be left to compute, or there is nothing to sample from
                break
            nodes.append(node)
            parent = node
        return nodes

    def matched(self, trie: Any, seq: Any, blocks: Sequence[int], source: str = BUILT_IN) -> None:
        """After a lookup that added `blocks` to the request, or none."""
        block_ids = [int(block) for block in blocks]
        if block_ids and self._kv.is_offloaded(block_ids).any():
            block_ids = self._keep(trie, seq, block_ids, self._kv.bring_back(block_ids))
        first = seq.seq_id not in self._counted
        if not (first or block_ids or seq.seq_id in self._again):
            return
        num_matched = len(block_ids) * trie.block_size
        if first:
            self._counted.add(seq.seq_id)
            self.first.add(seq.num_valid_ids, num_matched, trie.block_size)
        elif seq.seq_id in self._again:
            self.retries.add(seq.num_valid_ids, num_matched, trie.block_size)
        self._again.discard(seq.seq_id)
        if self._host.recorder.enabled:
            self._host.recorder.write(
                "lookup", request=seq.session_id, tokens=seq.num_valid_ids, matched=num_matched, blocks=block_ids,
                source=source, first=first, namespace=_namespace(seq),
                hashes=prefix_hashes(seq.valid_ids, trie.block_size, _namespace(seq)),
            )  # fmt: skip
        if self._host.listens("on_prefix_matched"):
            self._host.post(
                "on_prefix_matched",
                PrefixMatch(seq.session_id, seq.num_valid_ids, num_matched, tuple(block_ids), source),
            )

    def _keep(self, trie: Any, seq: Any, block_ids: list[int], num_kept: int) -> list[int]:
        """Undo the match from block `num_kept` on: its bytes are on the host and the pool has no room for them."""
        lost = block_ids[num_kept:]
        if lost:
            node = seq.logical_blocks.last_shared_node
            for _ in lost:
                node = node.parent
            trie.allocator.free(np.array(lost, np.int64))
            seq.logical_blocks.resize(len(seq.logical_blocks) - len(lost))
            seq.logical_blocks.last_shared_node = node
            seq.set_step(node.num_matched)
        return block_ids[:num_kept]

    def stored(self, trie: Any, seq: Any, blocks: Sequence[int]) -> None:
        """After `blocks` of the request were published."""
        node = seq.logical_blocks.last_shared_node
        end = node.num_matched
        for _ in blocks:
            self._kv.add_node(node)
            node = node.parent
        # LMDeploy gave up the request's own copy of a block that was cached already. If that one lies on the host it must
        # come back before the request reads it; the slot of the copy just given up has room for it.
        if blocks and self._kv.is_offloaded(blocks).any():
            self._kv.bring_back(blocks)
        first = end - len(blocks) * trie.block_size
        if self._host.recorder.enabled:
            self._host.recorder.write(
                "store", request=seq.session_id, first_token=first, blocks=list(map(int, blocks)),
                namespace=_namespace(seq),
            )  # fmt: skip
        if self._host.listens("on_prefix_stored"):
            tokens = _read_only(seq.valid_ids[first:end])
            update = PrefixUpdate(seq.session_id, _namespace(seq), first, tokens, tuple(map(int, blocks)))
            self._host.post("on_prefix_stored", update)

    def lost_blocks(self, seq_id: int) -> None:
        """The next lookup of this request is a retry."""
        if seq_id in self._counted:
            self._again.add(seq_id)

    def forget(self, seq_id: int) -> None:
        self._counted.discard(seq_id)
        self._again.discard(seq_id)


def prefix_hashes(tokens: np.ndarray, block_size: int, namespace: str) -> list[str]:
    """One hash a full block, of the whole prefix up to its end: equal hashes mean equal prefixes (64 bits of BLAKE2b)."""
    hashes, state = [], hashlib.blake2b(namespace.encode(), digest_size=8)
    for end in range(block_size, len(tokens) + 1, block_size):
        state.update(np.ascontiguousarray(tokens[end - block_size : end]).tobytes())
        hashes.append(state.copy().hexdigest())
    return hashes


def _namespace(seq: Any) -> str:
    return seq.adapter_name or ""


def _read_only(tokens: np.ndarray) -> np.ndarray:
    copy = np.array(tokens, np.int64)
    copy.flags.writeable = False
    return copy
