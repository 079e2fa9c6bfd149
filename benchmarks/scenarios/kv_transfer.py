"""KV blocks from one process into another by the KV channels, against one plain copy of as many bytes in one process."""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.result import Definition
from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart, KVRegion
from sagellm.comm_backend.kv_transfer.registry import channel_names, find_channel, make_channel

OPTIONS: dict[str, Any] = {"mib": [1, 4, 16, 64], "total_mib": 64, "rounds": 20, "blocks": 1000}
MIB = 1 << 20
SIZES = (1, 4, 16, 64)
CHANNELS = tuple(name for name in ("shm", "tcp", "mooncake") if name in channel_names() and not find_channel(name).missing())
KEY = b"of this benchmark"
DEFINITIONS = {
    f"kv_transfer_{channel}_{name}_{size}mib": Definition(unit=unit, better="higher", text=text.format(size=size, it=channel))
    for channel in CHANNELS
    for size in SIZES
    for name, unit, text in (
        (
            "share", "1",
            "Bandwidth of transfers by `{it}` of {size} MiB, `total_mib` in a row, over that of as many `Tensor.copy_` by one "
            "thread of one process between ordinary memory; no byte of either twice. KV of 16 layers, 4 heads of 64 bf16, "
            "blocks of 64 tokens, in random places on both sides: pieces of 32 KiB. The median of `rounds` ratios, of "
            "contestants that follow each other in random order, each behind the same copy of other memory, which fills the "
            "caches.",
        ),
        ("best_share", "1", "The same, of the best of `rounds` each: who had the cores all the time."),
        (
            "cpu_share", "1",
            "The same as the share, of the CPU time of the thread that copies, or transfers: what others do at the time weighs "
            "less. Without that of other threads and processes, which `tcp` has.",
        ),
        ("gb_s", "GB/s", "Transfers of {size} MiB by `{it}`, at best."),
    )
} | {
    f"kv_transfer_{channel}_block_us": Definition(
        unit="us", better="lower",
        text=f"A transfer by `{channel}` of one block of 64 KiB in 8 pieces (4 layers, 16 tokens), median of `blocks`.",
    )
    for channel in CHANNELS
} | {
    f"kv_transfer_copy_gb_s_{size}mib": Definition(
        unit="GB/s", better=None, text=f"`Tensor.copy_` of {size} MiB, `total_mib` in a row, at best."
    )
    for size in SIZES
}  # fmt: skip


def run(seed: int, mib: list[int], total_mib: int, rounds: int, blocks: int) -> dict[str, float]:
    """Sizes that are not in `mib` are measured as one block, once."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=_own, args=(there,), daemon=True)
    owner.start()
    there.close()
    readers = {}
    try:
        endpoints = here.recv()
        for name in CHANNELS:
            for size in ("small", "large"):
                channel = readers[name, size] = _channel(name, size)
                channel.connect("owner", [endpoints[name, size]], timeout_s=60)
        metrics = {}
        for name in CHANNELS:
            metrics[f"kv_transfer_{name}_block_us"] = _block(readers[name, "small"], seed, blocks)
        large = {name: readers[name, "large"] for name in CHANNELS}
        for size in SIZES:
            how = (size, max(1, total_mib // size), rounds) if size in mib else (1, 1, 1)
            metrics |= _sizes(large, size, *how, seed)
        return metrics
    finally:
        for channel in readers.values():
            channel.close()
        here.close()  # its end
        owner.join(20)
        owner.kill()


def _layout(size: str) -> KVLayout:
    layers, tokens, num_blocks = (4, 16, 64) if size == "small" else (16, 64, 80)
    parts = tuple(KVPart(name=name, num_heads=4, width=64, dtype="bfloat16") for name in ("keys", "values"))
    return KVLayout(num_layers=layers, num_blocks=num_blocks, block_size=tokens, total_heads=4, parts=parts)


def _channel(name: str, size: str) -> KVTransferChannel:
    layout, kind = _layout(size), find_channel(name)
    tensors = tuple(kind.empty(layout.shape(part), torch.bfloat16).fill_(0) for part in layout.parts)
    return make_channel(name, KVRegion(layout, tensors), TransferOptions(key=KEY))


def _own(pipe: Connection) -> None:
    torch.set_num_threads(1)
    channels = {(name, size): _channel(name, size) for name in CHANNELS for size in ("small", "large")}
    for channel in channels.values():
        for tensor in channel.region.tensors:
            tensor.fill_(1)
    pipe.send({key: channel.endpoint() for key, channel in channels.items()})
    with suppress(EOFError):
        pipe.recv()
    for channel in channels.values():
        channel.close()


def _block(channel: KVTransferChannel, seed: int, times: int) -> float:
    random = np.random.default_rng(seed)
    num_blocks, tokens = channel.region.layout.num_blocks, channel.region.layout.block_size
    seconds = []
    for _ in range(times):
        src, dst = (int(block) for block in random.integers(num_blocks, size=2))
        plan = TransferPlan(
            transfer_id="block", source="owner", block_ids=(src,), target_blocks=(dst,), num_tokens=tokens, timeout_s=60
        )
        start = time.perf_counter()
        channel.transfer(plan)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)) * 1e6


def _sizes(
    channels: dict[str, KVTransferChannel], name_mib: int, size: int, times: int, rounds: int, seed: int
) -> dict[str, float]:
    """`size` MiB are `size` blocks."""
    random = np.random.default_rng(seed)
    source, target = (torch.full((times, size * MIB), value, dtype=torch.uint8) for value in (1, 0))

    def copies() -> None:
        for number in range(times):
            target[number].copy_(source[number])

    def transfers(channel: KVTransferChannel) -> Callable[[], None]:
        layout = channel.region.layout
        src, dst = (random.permutation(layout.num_blocks)[: size * times].reshape(times, size).tolist() for _ in range(2))
        plans = [
            TransferPlan(
                transfer_id="blocks", source="owner", block_ids=src[number], target_blocks=dst[number],
                num_tokens=size * layout.block_size, timeout_s=60,
            )
            for number in range(times)
        ]  # fmt: skip

        def call() -> None:
            for plan in plans:
                channel.transfer(plan)

        return call

    # A contestant writes back the cache lines of the one before it. So all begin after this pass, which leaves the same
    # for each.
    junk = torch.ones(2, 64 * MIB, dtype=torch.uint8)
    contestants = {"copy": copies} | {name: transfers(channel) for name, channel in channels.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name in random.permutation(list(contestants)):
            junk[0].copy_(junk[1])
            start, cpu_start = time.perf_counter(), time.thread_time()
            contestants[name]()
            if number:  # the first touches memory for the first time
                seconds[name].append((time.perf_counter() - start, time.thread_time() - cpu_start))
    for name, channel in channels.items():
        num_copied = sum(int((tensor[-1, :, -1, -1, -1] == 1).sum()) for tensor in channel.region.tensors)
        assert num_copied >= 2 * size * times, (name, num_copied)
    taken = {name: np.array(each).T for name, each in seconds.items()}
    (copy, cpu_copy), num_bytes = taken.pop("copy"), size * MIB * times
    metrics = {f"kv_transfer_copy_gb_s_{name_mib}mib": num_bytes / copy.min() / 1e9}
    for name, (each, cpu) in taken.items():
        metrics[f"kv_transfer_{name}_cpu_share_{name_mib}mib"] = np.median(cpu_copy / cpu)
        metrics[f"kv_transfer_{name}_share_{name_mib}mib"] = np.median(copy / each)
        metrics[f"kv_transfer_{name}_best_share_{name_mib}mib"] = copy.min() / each.min()
        metrics[f"kv_transfer_{name}_gb_s_{name_mib}mib"] = num_bytes / each.min() / 1e9
    return {name: float(value) for name, value in metrics.items()}
