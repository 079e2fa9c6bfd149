"""SGLang's radix caches: the Python one, and the tree core in Rust that newer versions use by default."""

import sys
import types
from array import array
from importlib.metadata import distribution, version

import numpy as np

from benchmarks.prefix.contestants.base import Found

# Modules that name types for annotations, or serve metrics that are off, and would import a GPU's worth of packages.
STOOD_IN = {
    "sglang.srt.mem_cache.memory_pool": ("ReqToTokenPool",),
    "sglang.srt.observability.metrics_collector": (
        "STAT_LOGGER_ROLE_RADIX_CACHE", "RadixCacheMetricsCollector", "radix_cache_metric_labels", "resolve_collector_class",
    ),
}  # fmt: skip


def _import_sglang() -> None:
    """Make `sglang.srt.mem_cache` importable where there is no GPU: without `sglang/__init__.py` and two modules."""
    package = types.ModuleType("sglang")
    package.__path__ = [str(distribution("sglang").locate_file("sglang"))]
    sys.modules["sglang"] = package
    for name, members in STOOD_IN.items():
        module = sys.modules[name] = types.ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), {}))
    import torch

    torch.set_num_threads(1)


class _NoPool:
    """Where freed slots would go; taking them costs nothing here."""

    device = "cpu"

    def free_segment(self, indices, start_pos=0) -> None:
        pass


class _SGLangContestant:
    """The page size is the block size. Values are slots of the KV pool, one int64 a token, as in the engine."""

    parts = ("lookup", "match only")
    note = "a slot for each token, not each block; 'match only' leaves out collecting them"

    def __init__(self, block_size: int, num_blocks: int) -> None:
        _import_sglang()
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.version = version("sglang")
        self._block_size = block_size
        self._key, self._match_params, self._insert_params = RadixKey, MatchPrefixParams, InsertParams
        self._evict_params = EvictParams

    def sequence(self, sequence):
        import torch

        num_tokens = len(sequence.block_ids) * self._block_size
        slots = sequence.block_ids.astype(np.int64).repeat(self._block_size) * self._block_size
        slots += np.arange(num_tokens) % self._block_size
        return self._insert_params(key=self._key(_array(sequence.tokens[:num_tokens])), value=torch.from_numpy(slots))

    def query(self, tokens):
        return self._match_params(key=self._key(_array(tokens)))

    def reset(self, prepared) -> None:
        pass

    def memory_bytes(self) -> None:
        return None

    def _found(self, num_tokens: int, slots) -> Found:
        assert len(slots) == num_tokens
        return Found(num_tokens, (slots.numpy()[:: self._block_size] // self._block_size).astype(np.int32))


class SGLangPythonContestant(_SGLangContestant):
    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, num_blocks)
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self._cache = RadixCache.create_simulated(mock_allocator=_NoPool(), page_size=block_size)

    def insert(self, sequences) -> None:
        insert = self._cache.insert
        for params in sequences:
            insert(params)

    def run(self, part, queries) -> None:
        match, slots = self._cache.match_prefix, self._cache.path_device_indices
        if part == "lookup":
            for params in queries:
                slots(match(params).last_device_node)
        else:
            for params in queries:
                match(params)

    def found(self, query) -> Found:
        result = self._cache.match_prefix(query)
        return self._found(result.device_prefix_len, self._cache.path_device_indices(result.last_device_node))

    def evict(self, num_blocks: int) -> int:
        params = self._evict_params(num_tokens=num_blocks * self._block_size)
        return self._cache.evict(params).num_tokens_evicted // self._block_size


class SGLangRustContestant(_SGLangContestant):
    """`RustUnifiedTreeCore`, the adapter that the engine's cache drives; 'binding only' calls what lies below it."""

    parts = ("lookup", "match only", "binding only")

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, num_blocks)
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self._full = ComponentType.FULL
        self._core = RustUnifiedTreeCore(
            CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=block_size,
                tree_components=(ComponentType.FULL,),
            )
        )  # fmt: skip

    def insert(self, sequences) -> None:
        begin, resume, end = self._core.begin_insert, self._core.resume_insert, self._core.end_insert
        for params in sequences:
            step = begin(params)
            while step.result is None:
                step = resume()
            end()

    def run(self, part, queries) -> None:
        core = self._core
        if part == "lookup":
            match, slots, root = core.match_prefix, core.collect_full_device_indices, core.root_node_handle
            for params in queries:
                slots(match(params).last_device_node, root())
        elif part == "match only":
            match = core.match_prefix
            for params in queries:
                match(params)
        else:
            match, make = core._binding.match_prefix, core._bindings.MatchParamsBinding
            for params in queries:
                match(make(key=params.key.token_ids, extra_key=None, cache_salt=None))

    def found(self, query) -> Found:
        result = self._core.match_prefix(query)
        slots = self._core.collect_full_device_indices(result.last_device_node, self._core.root_node_handle())
        return self._found(result.device_prefix_len, slots)

    def evict(self, num_blocks: int) -> int:
        """The loop of the engine's cache, which asks the core for one node after another and frees its slots."""
        core, full = self._core, self._full
        tracker = {full: 0}
        core.evict_device_start(full, num_blocks * self._block_size)
        try:
            while True:
                step = core.evict_device_next_node(full, tracker)
                tracker[full] += step.tracker.get(full, 0)
                step.device_frees.clear()
                if step.node_id is not None:
                    leaf = core.evict_device_leaf(step.node_id, False)
                    tracker[full] += leaf.tracker.get(full, 0)
                    leaf.device_frees.clear()
                elif not step.made_progress:
                    break
        finally:
            core.evict_device_end(full)
        return tracker[full] // self._block_size


def _array(tokens) -> array:
    made = array("q")
    made.frombytes(tokens.astype(np.int64).tobytes())
    return made
