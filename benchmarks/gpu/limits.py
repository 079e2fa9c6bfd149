"""Prints what a GPU is, and how fast it copies and multiplies, as JSON. Needs nothing but torch."""

import json
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Mean of one call, after three calls to warm up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / repeats


def main() -> None:
    about = torch.cuda.get_device_properties(0)
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = {
        "model": about.name, "memory_gib": about.total_memory / 2**30, "processors": about.multi_processor_count,
        "capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda,
        "copy_gb_s": 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e9,
        "host_copy_gb_s": host.nbytes / seconds(lambda: source[: host.nbytes].copy_(host, non_blocking=True)) / 1e9,
        "product_tflop_s": 2 * size**3 / seconds(lambda: left @ right) / 1e12,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
