"""Memory of a control group, the stand-in for torch.cuda, and what the device refuses."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from lmdeploy import sage_device

from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.cpu import runtime
from sagellm.engines.lmdeploy.cpu.device import CPU_DEVICE
from sagellm.engines.lmdeploy.cpu.runtime import CpuRuntime, memory_bytes, usable_cores
from sagellm.engines.lmdeploy.device_settings import check_threads

GIB = 2**30


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A machine of 16 GiB, 12 of them free, and a control group's two files."""
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(runtime, "_CGROUP_FILES", (files,))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * GIB, total=16 * GIB))

    def write(limit, used):
        files[0].write_text(f"{limit}\n")
        files[1].write_text(f"{used}\n")

    return write


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (4 * GIB, GIB, (3 * GIB, 4 * GIB)),
        (14 * GIB, GIB, (12 * GIB, 14 * GIB)),
        (4 * GIB, 5 * GIB, (0, 4 * GIB)),
        ("max", GIB, (12 * GIB, 16 * GIB)),
        (2**63 - 4096, GIB, (12 * GIB, 16 * GIB)),
        ("?", "", (12 * GIB, 16 * GIB)),
    ],
)
def test_memory_is_the_lesser_of_machine_and_group(group, limit, used, expected):
    group(limit, used)
    assert memory_bytes() == expected
    assert CpuRuntime().mem_get_info() == expected


def test_no_group(group):
    assert memory_bytes() == (12 * GIB, 16 * GIB)


def test_streams_and_events_are_always_done():
    cuda = CpuRuntime()
    stream, first, second = cuda.Stream(), cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    first.record()
    second.record(stream)
    assert first.elapsed_time(second) >= 0
    assert stream.query() and first.query()
    with cuda.stream(stream):
        stream.wait_stream(cuda.current_stream())
        stream.wait_event(first)
        stream.synchronize()
    assert cuda.current_device() == 0 and cuda.is_available()


@pytest.mark.parametrize(
    ("bound", "siblings", "quota", "expected"),
    [
        ({0, 1, 2, 3}, "0 1 2 3", "max 100000", 4),
        ({0, 1, 2, 3}, "0-1 0-1 2-3 2-3", "max 100000", 2),
        ({1, 2}, "0-1 0-1 2-3 2-3", None, 2),
        ({0, 1, 2, 3}, "0 1 2 3", "250000 100000", 2),
        ({0, 1, 2, 3}, "0 1 2 3", "50000 100000", 1),
        ({5}, "0", "max 100000", 1),
    ],
)
def test_cores_that_may_be_used(monkeypatch, tmp_path, bound, siblings, quota, expected):
    for number, text in enumerate(siblings.split()):
        (tmp_path / f"cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}/topology/thread_siblings_list").write_text(text)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(runtime, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(runtime, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: bound)
    assert usable_cores() == expected


def test_huge_pages_are_asked_for_whole_pages_only():
    memory = torch.empty(8 << 20, dtype=torch.uint8)
    assert not runtime.use_huge_pages(memory.data_ptr(), 1 << 20)
    given = runtime.use_huge_pages(memory.data_ptr(), memory.nbytes)
    state = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    assert given == state.exists()


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(runtime, "usable_cores", lambda: 4)
    assert check_threads(SageConfig(), "cpu") == 4 and check_threads(SageConfig(tensor_parallel=3), "cpu") == 1
    assert check_threads(SageConfig(threads=3), "cpu") == 3 and check_threads(SageConfig(threads=9), "cuda") == 9
    with pytest.raises(ConfigError, match="threads is 5; this process may use 4 cores. Use at most 4 threads."):
        check_threads(SageConfig(threads=5), "cpu")


def settings(**change):
    values = dict(
        dtype="auto", quant_policy=0, block_size=16, tp=1, dp=1, ep=1, num_gpu_blocks=0, num_cpu_blocks=0,
        max_prefill_token_num=4096, cache_max_entry_count=0.8,
    )  # fmt: skip
    return SimpleNamespace(**(values | change))


def test_settings_that_run():
    CPU_DEVICE.validate(settings())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16' does not run on the CPU device; use one of auto, float32, bfloat16"),
        ({"quant_policy": 3}, "quant_policy 3 is unknown; use 8 or 4"),
        ({"quant_policy": 8, "block_size": 8}, "block_size 8 is too small for keys of 8 bits; use 16"),
        ({"block_size": 48}, "block_size 48 is not a power of two"),
        ({"tp": 0}, "tp is 0; it must be at least 1"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks is -1; it must not be negative"),
        ({"cache_max_entry_count": 1.0}, "must lie between 0 and 1"),
    ],
)
def test_settings_that_do_not(change, message):
    with pytest.raises(ConfigError, match=message):
        CPU_DEVICE.validate(settings(**change))


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("auto", torch.float32, "float32"), ("auto", "float32", "float32"), ("auto", torch.float16, "bfloat16"),
        ("auto", torch.bfloat16, "bfloat16"), ("auto", None, "bfloat16"), ("float32", torch.bfloat16, "float32"),
    ],
)  # fmt: skip
def test_dtype(asked, stored, expected):
    assert CPU_DEVICE.dtype(asked, SimpleNamespace(dtype=stored)) == expected


def test_what_the_agent_gets_is_a_copy():
    value = torch.arange(3)
    copy = CPU_DEVICE.to_device(value)
    copy += 1
    assert value.tolist() == [0, 1, 2]
    assert CPU_DEVICE.to_device(None) is None


def test_marks_are_there_only_with_a_profiler():
    marked = sage_device.record_function("a mark")(lambda: torch.ones(1) + 1)
    marked()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            marked()
        with pytest.raises(ZeroDivisionError), sage_device.record_function("another"):
            raise ZeroDivisionError
    marked()
    counts = {each.key: each.count for each in profiler.key_averages()}
    assert (counts["a mark"], counts["another"]) == (2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bitmask_forbids_tokens_in_every_dtype(dtype):
    logits = torch.zeros(1, 40, dtype=dtype)
    bitmask = torch.tensor([[0b101, 1]], dtype=torch.int32)
    CPU_DEVICE.apply_token_bitmask(logits, bitmask)
    assert (logits[0] > float("-inf")).nonzero().flatten().tolist() == [0, 2, 32]
