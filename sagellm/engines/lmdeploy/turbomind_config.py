"""From a `SageConfig` to LMDeploy's `TurbomindEngineConfig`; what TurboMind does not have is refused by name."""

from typing import Any

from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.sizing import Sizes

MIN_SHARED_BLOCK = 64  # tokens; its kernels read whole tiles of a block


def check_settings(config: SageConfig) -> None:
    """Raises ConfigError for each setting at once, one line each, that TurboMind does not have."""
    wrong = [
        f"{name} {value}: {reason}."
        for name, value, reason in (
            ("device", config.device, "TurboMind runs on cuda"),
            ("dtype", config.dtype, "TurboMind computes in float16 or bfloat16"),
            ("host_kv_blocks", config.host_kv_blocks, "TurboMind's host tier is for native hooks (SageKvApi.migrate)"),
            ("kv", config.kv and config.kv.policy, "TurboMind does not tell when a request lets go of its cached blocks"),
            ("threads", config.threads, "these are compute threads of a CPU worker"),
            ("weights", config.weights if config.weights == "packed" else None, "packed weights run on the CPU device"),
            ("compute", config.compute if config.compute != "auto" else None, "that is a setting of the CPU device"),
            ("decode_round", config.decode_round, "TurboMind looks at its queue in every step"),
            ("role", config.pd and config.pd.role, "its blocks cannot be read by others; leave out --engine turbomind"),
            ("pd_key_file", _feed_key(config), "TurboMind does not tell which prefixes it has cached"),
            ("speculative", config.speculative, "guesses are checked in steps of the PyTorch engine alone"),
            ("block_size", config.block_size, f"TurboMind's blocks have {MIN_SHARED_BLOCK} tokens or more"),
        )
        if _is_wrong(name, value)
    ]
    if wrong:
        raise ConfigError("--engine turbomind cannot have\n" + "\n".join(wrong))


def _feed_key(config: SageConfig) -> Any:
    return config.pd.key_file if config.pd is not None and config.pd.role is None else None


def _is_wrong(name: str, value: Any) -> bool:
    if name == "device":
        return value not in ("auto", "cuda")
    if name == "dtype":
        return value == "float32"
    if name == "block_size":
        return value < MIN_SHARED_BLOCK
    return bool(value)


def build_turbomind_config(config: SageConfig, sizes: Sizes) -> Any:
    """`sizes` as `size_engine` answers for a CUDA device."""
    from lmdeploy.messages import TurbomindEngineConfig

    options: dict[str, Any] = {}
    if config.kv_blocks is not None:
        options["cache_max_entry_count"] = config.kv_blocks  # from 1 on it is a number of blocks
    elif config.kv_memory_share is not None:
        options["cache_max_entry_count"] = config.kv_memory_share
    if sizes.max_batch_size is not None:
        options["max_batch_size"] = sizes.max_batch_size
    if config.max_prefill_tokens is not None:
        options["max_prefill_token_num"] = config.max_prefill_tokens
    return TurbomindEngineConfig(
        dtype=sizes.dtype,
        tp=config.tensor_parallel,
        session_len=sizes.context_length,
        cache_block_seq_len=config.block_size,
        enable_prefix_caching=config.prefix_caching,
        quant_policy=sizes.quant_policy,
        **options,
    )
