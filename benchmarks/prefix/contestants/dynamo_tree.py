"""Dynamo's radix tree of its router: which worker holds the beginning of a sequence. It knows hashes, not tokens."""

import json
from importlib.metadata import version

from benchmarks.prefix.contestants.base import Found

WORKER = 0


class DynamoContestant:
    """Every sequence is one event that stores all its blocks; a removed block must be named, so nothing is evicted here."""

    parts = ("lookup", "hashes ready")
    note = (
        "answers how many blocks a worker holds, not which; hashes are not verified; 'hashes ready' leaves out hashing"
    )

    def __init__(self, block_size: int, num_blocks: int) -> None:
        from dynamo._core import RadixTree, compute_block_hash_for_seq

        self.version = version("ai-dynamo-runtime")
        self._block_size = block_size
        self._tree, self._hashes = RadixTree(), compute_block_hash_for_seq
        self._num_events = 0

    def sequence(self, sequence):
        tokens = sequence.tokens[: len(sequence.block_ids) * self._block_size].tolist()
        hashes = self._hashes(tokens, self._block_size)
        blocks = [
            {"block_hash": int(block), "tokens_hash": value}
            for block, value in zip(sequence.block_ids, hashes, strict=True)
        ]
        self._num_events += 1
        event = {"event_id": self._num_events, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        return tokens, json.dumps(event).encode()

    def insert(self, sequences) -> None:
        """Writing the event is not timed, hashing the tokens is: both are needed, and one of them only for the transport."""
        hashes, apply, size = self._hashes, self._tree.apply_event, self._block_size
        for tokens, event in sequences:
            hashes(tokens, size)
            apply(WORKER, event)

    def query(self, tokens):
        values = tokens.tolist()
        return values, self._hashes(values, self._block_size)

    def run(self, part, queries) -> None:
        hashes, find, size = self._hashes, self._tree.find_matches, self._block_size
        if part == "lookup":
            for tokens, _ in queries:
                _ = find(hashes(tokens, size)).scores
        else:
            for _, ready in queries:
                _ = find(ready).scores

    def reset(self, prepared) -> None:
        pass

    def found(self, query) -> Found:
        scores = self._tree.find_matches(self._hashes(query[0], self._block_size)).scores
        return Found(max(scores.values(), default=0) * self._block_size, None)

    def evict(self, num_blocks: int) -> int:
        return -1

    def memory_bytes(self) -> None:
        return None
