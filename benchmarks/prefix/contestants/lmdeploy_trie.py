"""LMDeploy's prefix cache on the PyTorch engine: `BlockTrie` with its own block manager and scheduler sequences."""

from importlib.metadata import version

import numpy as np

from benchmarks.prefix.contestants.base import CHUNK, Found
from benchmarks.prefix.workload import MAX_TOKENS


class LMDeployContestant:
    """The trie of the engine with no hook installed (`BlockTrie.sage` has no value).

    Sequences are the scheduler's own. `match` writes into the sequence it is given and counts references, which `reset`
    undoes. Nodes keep views of the token array of the sequence that stored them, so that array lives as long as any of them.
    """

    parts = ("lookup",)
    note = "nodes keep the whole int64 token array of the sequence that stored them"

    def __init__(self, block_size: int, num_blocks: int) -> None:
        from lmdeploy.pytorch.config import CacheConfig
        from lmdeploy.pytorch.messages import SchedulerSession, SequenceManager, SequenceMeta
        from lmdeploy.pytorch.paging.block_manager.default_block_manager import DefaultBlockManager
        from lmdeploy.pytorch.paging.block_trie import BlockTrie
        from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

        self.version = version("lmdeploy")
        # A sequence brings blocks of its own for what is cached too, and gives them back.
        room = num_blocks + CHUNK * (MAX_TOKENS // block_size + 1)
        config = CacheConfig(
            max_batches=1, block_size=block_size, num_cpu_blocks=0, num_gpu_blocks=room, enable_prefix_caching=True
        )
        self._manager = DefaultBlockManager(num_gpu_blocks=room, num_cpu_blocks=0)
        self._trie = BlockTrie(config, self._manager)
        assert self._trie.sage is None
        self._session = SchedulerSession(0, SequenceManager(SequenceMeta(block_size, strategy=ARSequenceStrategy())))

    def sequence(self, sequence):
        prepared = self.query(sequence.tokens)
        self._manager.allocate(prepared)
        return prepared

    def insert(self, sequences) -> None:
        store = self._trie.allocate
        for sequence in sequences:
            store(sequence)

    def query(self, tokens):
        sequence = self._session.add_sequence(tokens.astype(np.int64))
        self._session.remove_sequence(sequence)
        return sequence

    def run(self, part, queries) -> None:
        match = self._trie.match
        for sequence in queries:
            match(sequence)
            _ = sequence.logical_blocks.get_real_blocks()

    def reset(self, queries) -> None:
        for sequence in queries:
            if len(sequence.logical_blocks):
                self._manager.free(sequence)
            sequence.logical_blocks.reset()
            sequence.set_step(0)

    def found(self, query) -> Found:
        self.run("lookup", [query])
        num_tokens = query.num_history_ids
        self.reset([query])
        return Found(num_tokens, None)

    def evict(self, num_blocks: int) -> int:
        return self._trie.evict(num_blocks)

    def memory_bytes(self) -> None:
        return None
