"""This project's index, and its plain twin."""

from importlib.metadata import version

from benchmarks.prefix.contestants.base import Found


class SageContestant:
    """`PrefixReuseIndex` as it is after construction with nothing but a block size."""

    parts = ("lookup",)
    note = "every token compared; ids as an int32 array"

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.version = version("sagellm")
        self._index = self._make(block_size)

    def _make(self, block_size: int):
        from sagellm.prefix_reuse import PrefixReuseIndex

        return PrefixReuseIndex(block_size)

    def sequence(self, sequence):
        return sequence.tokens, sequence.block_ids

    def insert(self, sequences) -> None:
        insert = self._index.insert
        for tokens, block_ids in sequences:
            insert(tokens, block_ids)

    def query(self, tokens):
        return tokens

    def run(self, part, queries) -> None:
        lookup = self._index.lookup
        for tokens in queries:
            _ = lookup(tokens).kv_block_ids

    def reset(self, queries) -> None:
        pass

    def found(self, query) -> Found:
        hit = self._index.lookup(query)
        return Found(hit.matched_length, hit.kv_block_ids)

    def evict(self, num_blocks: int) -> int:
        return len(self._index.evict_lru(num_blocks).kv_block_ids)

    def memory_bytes(self) -> int:
        return self._index.memory_bytes()


class TwinContestant(SageContestant):
    """`ReferencePrefixIndex`, written to be read."""

    note = "the plain Python twin that tests compare with"

    def _make(self, block_size: int):
        from sagellm.prefix_reuse import ReferencePrefixIndex

        return ReferencePrefixIndex(block_size)
