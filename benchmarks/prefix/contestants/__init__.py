"""Contestants by name. A peer is imported only when its contestant is built, in its own process."""

import importlib

from benchmarks.prefix.contestants.base import Contestant

CONTESTANTS = {
    "sagellm": "sagellm_index:SageContestant",
    "sagellm, plain twin": "sagellm_index:TwinContestant",
    "LMDeploy BlockTrie": "lmdeploy_trie:LMDeployContestant",
    "SGLang RadixCache (Python)": "sglang_radix:SGLangPythonContestant",
    "SGLang tree core (Rust)": "sglang_radix:SGLangRustContestant",
    "Dynamo RadixTree (Rust)": "dynamo_tree:DynamoContestant",
    "vLLM KVCacheManager": "vllm_blocks:VLLMContestant",
}


def build(name: str, block_size: int, num_blocks: int) -> Contestant:
    """The contestant, empty, with room for at least `num_blocks` blocks. Raises ValueError for an unknown name."""
    if name not in CONTESTANTS:
        raise ValueError(f"contestant {name!r} is unknown; known are {', '.join(CONTESTANTS)}")
    module, _, cls = CONTESTANTS[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)(block_size, num_blocks)
