"""Settings that depend on the device of an engine: checks before anything is loaded, threads, and cores of workers."""

import os
from pathlib import Path

from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.collectives import GROUP
from sagellm.core.config import SageConfig
from sagellm.core.errors import CommError, ConfigError
from sagellm.engines.lmdeploy.comm_choice import AUTO

__all__ = [
    "check_comm_backend", "check_compute", "check_prefix_attention", "check_threads", "executor_of",
    "packed_weights_of", "set_threads",
]  # fmt: skip


def check_compute(config: SageConfig, device: str, dtype: str) -> None:
    """Raises ConfigError: a type of products that the device or the processor does not have."""
    if config.compute == "auto":
        return
    if device != "cpu":
        raise ConfigError(f"compute {config.compute} is a setting of the CPU device, and this engine is on {device}.")
    import torch

    from sagellm.engines.lmdeploy.cpu.compute import choose_isa

    choose_isa(config.compute, getattr(torch, dtype), default_cache_dir())


def check_comm_backend(config: SageConfig, device: str) -> None:
    """Raises ConfigError: one worker, or a backend that its processes cannot use here."""
    if config.comm_backend in (AUTO, GROUP) and not config.comm_options:
        return
    if config.comm_backend == GROUP:
        raise ConfigError(f"comm_options {config.comm_options}: LMDeploy's process group takes none; leave them out.")
    from sagellm.comm_backend.registry import find_backend

    if config.tensor_parallel == 1:
        raise ConfigError(f"comm_backend {config.comm_backend} is a setting of tensor_parallel above 1; give both, or neither.")
    try:
        kind = find_backend("shm" if config.comm_backend == AUTO else config.comm_backend)
    except CommError as error:
        raise ConfigError(str(error)) from None
    if device not in kind.device_types or "file" not in kind.schemes:
        raise ConfigError(
            f"comm_backend {config.comm_backend} works on {', '.join(kind.device_types)} with ranks that meet by "
            f"{', '.join(kind.schemes)}; workers are processes on {device}, which meet by a file. Use shm or gloo."
        )
    if missing := kind.missing():
        raise ConfigError(f"comm_backend {config.comm_backend}: {missing}")
    try:
        kind.check_options(config.comm_options)
    except CommError as error:
        raise ConfigError(str(error)) from None


def check_prefix_attention(config: SageConfig, device: str) -> None:
    """Raises ConfigError: a device without the kernel."""
    if config.prefix_attention != "off" and device not in ("cpu", "cuda"):
        raise ConfigError(
            f"prefix_attention {config.prefix_attention} runs on the CPU device and on cuda, and this engine is on {device}."
        )


def executor_of(config: SageConfig, device: str) -> str | None:
    """Return LMDeploy's name of the workers' kind; None leaves it to LMDeploy."""
    if config.tensor_parallel == 1:
        return None
    if config.distributed_executor_backend != "auto":
        return config.distributed_executor_backend
    return "mp" if device == "cpu" else None


def packed_weights_of(config: SageConfig, model: Path, device: str) -> Path:
    """Return the folder of a converted GGUF file whose weights can stay packed.

    Raises:
        ConfigError: another device.
        ModelError: another source, or workers that cannot share the blocks of its matrices.
    """
    from sagellm.models.folder import read_hf_config
    from sagellm.models.gguf_levels import GGUFLevels

    if device != "cpu":
        raise ConfigError(f"weights packed runs on the CPU device, and this engine is on {device}; use weights auto.")
    levels = GGUFLevels(model)
    if config.tensor_parallel > 1:
        levels.check_split(read_hf_config(model), config.tensor_parallel)
    return model


def check_threads(config: SageConfig, device: str) -> int:
    """Return the threads of each worker of a CPU engine.

    Raises:
        ConfigError: more threads than this process may use cores.
    """
    from sagellm.engines.lmdeploy.cpu.runtime import usable_cores

    cores = usable_cores()
    if device == "cpu" and config.threads is not None and config.threads > cores:
        raise ConfigError(f"threads is {config.threads}; this process may use {cores} cores. Use at most {cores} threads.")
    return config.threads or max(1, cores // config.tensor_parallel)


def set_threads(config: SageConfig, device: str) -> None:
    """Share the cores and NUMA nodes of this machine among the workers of a CPU engine; spawned processes inherit it."""
    if device != "cpu":
        return
    from sagellm.engines.lmdeploy.cpu.runtime import write_worker_cores

    threads = check_threads(config, device)
    write_worker_cores(config.tensor_parallel)
    # OpenMP reads it when a process first uses it, which for spawned workers is later than now.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from sagellm.engines.lmdeploy.cpu.device import CPU_DEVICE

    CPU_DEVICE.use_threads(threads)
