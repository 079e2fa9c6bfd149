"""Machine and versions of a result, and the speed of its memory."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from sagellm.core.packages import version_of

PACKAGES = ("lmdeploy", "torch", "transformers", "numpy", "sagellm")


def describe() -> dict[str, Any]:
    """Processor, cores, versions and the commit of this checkout."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "commit": git(Path(__file__).parent, "rev-parse", "--short", "HEAD"),
        "load": os.getloadavg()[0],
    }


def read_bandwidth_gb_s(threads: int, size_bytes: int = 1 << 30, repeats: int = 5) -> float:
    """Best of several passes that read a buffer, larger than any cache, once. 10^9 bytes a second.

    The buffer lies in huge pages: with small ones the page tables are the limit, not the memory.
    """
    import torch

    from sagellm.engines.lmdeploy.cpu.runtime import use_huge_pages

    torch.set_num_threads(threads)
    buffer = torch.empty(size_bytes // 4, dtype=torch.float32)
    use_huge_pages(buffer.data_ptr(), size_bytes)
    buffer.fill_(1)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.dot(buffer, buffer)  # one stream: both operands are the same memory
        best = min(best, time.perf_counter() - start)
    return size_bytes / best / 1e9


def _processor() -> str:
    """Its name with family, model and stepping: a virtual machine may hide all but the maker in the name."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    if "model name" not in found:
        return platform.processor()
    numbers = [found[key] for key in ("cpu family", "model", "stepping") if key in found]
    return found["model name"] + (f" ({'-'.join(numbers)})" if numbers else "")


def git(checkout: Path, *words: str) -> str | None:
    """Return what git says of a checkout; None if it fails."""
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
