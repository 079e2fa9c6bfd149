"""Measures what copies cost on this machine."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sagellm.core.errors import TierError
from sagellm.kv_policy.base import Tier
from sagellm.kv_policy.migration.cost_model import link_name

__all__ = ["calibrate_copies"]

SIZES = tuple(2**power for power in range(16, 25, 2))  # 64 KiB to 16 MiB


def calibrate_copies(
    folder: Path | None = None, *, sizes: Sequence[int] = SIZES, repeats: int = 5
) -> dict[str, list[tuple[int, float]]]:
    """Samples for `CostBenefitModel.fit`: (bytes, seconds) by `link_name`.

    Memory is copied from a buffer to another, as between pools of one host. With a folder, files there are written and
    brought to the medium, dropped from the page cache as far as the system does that, and read.

    Raises:
        TierError: the folder cannot be written or read.
    """
    memory = [(size, seconds) for size in sizes for seconds in _time_copies(size, repeats)]
    samples = {link_name(Tier.GPU, Tier.CPU): memory, link_name(Tier.CPU, Tier.GPU): list(memory)}
    if folder is not None:
        try:
            pairs = [(size, *_time_file(Path(folder), size)) for size in sizes for _ in range(repeats)]
        except OSError as error:
            raise TierError(
                f"cannot measure {folder}: {error.strerror or error}; name one that can be written."
            ) from error
        samples[link_name(Tier.CPU, Tier.NVME)] = [(size, write_s) for size, write_s, _ in pairs]
        samples[link_name(Tier.NVME, Tier.CPU)] = [(size, read_s) for size, _, read_s in pairs]
    return samples


def _time_copies(size: int, repeats: int) -> list[float]:
    # Several sources, so that what is read was not just written and still lies in the processor's cache.
    sources = [np.full(size, number, dtype=np.uint8) for number in range(4)]
    target = np.zeros(size, dtype=np.uint8)
    seconds = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        np.copyto(target, sources[repeat % len(sources)])
        seconds.append(time.perf_counter() - start)
    return seconds[1:]  # the first one also pays for the pages


def _time_file(folder: Path, size: int) -> tuple[float, float]:
    content = memoryview(os.urandom(min(size, 2**16)) * (size // min(size, 2**16)))
    path = folder / f".sagellm-calibration-{os.getpid()}"
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            opened = time.perf_counter()
            while file.read(2**20):
                pass
            read = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    return written - start, read - opened
