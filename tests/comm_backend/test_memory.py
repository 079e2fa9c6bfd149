"""Tests of what is particular to ranks that are threads: where they meet, and that every rank knows what has failed."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sagellm.comm_backend import CommConfig
from sagellm.comm_backend.memory import _OPENING, MemoryBackend
from sagellm.comm_backend.registry import backend_names, find_backend, make_backend
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError


def join(rank, size=2, name="here", **more):
    return make_backend(CommConfig(backend="memory", rank=rank, world_size=size, rendezvous=f"memory://{name}", **more))


@pytest.fixture
def pair():
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, range(2)))


def test_a_name_is_free_again_once_all_have_come(pair):
    assert _OPENING == {}
    with ThreadPoolExecutor(2) as pool:
        others = list(pool.map(join, range(2)))
    assert others[0]._group is others[1]._group is not pair[0]._group
    with pytest.raises(CommTimeoutError, match=r"ranks \[1\] did not come within 0.05 s"):
        join(0, timeout_s=0.05)
    assert _OPENING == {}


def test_who_does_not_fit_is_refused():
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join, 0, timeout_s=2.0)
        while not (_OPENING or waiting.done()):
            time.sleep(0.001)
        for rank, size in ((0, 2), (1, 3)):
            with pytest.raises(CommError, match=f"rank {rank} of {size} cannot join"):
                join(rank, size)
        with pytest.raises(CommTimeoutError):
            waiting.result()


def test_a_failure_is_told_to_every_rank(pair):
    pending = pair[1].all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(CommTimeoutError) as first:
        pair[0].recv(torch.ones(1), 1, timeout_s=0.05)
    for call in (pending.wait, pair[1].barrier, pair[0].barrier):
        with pytest.raises(CommTimeoutError, match=str(first.value)):
            call()
    assert pending.is_completed()


def test_what_was_sent_before_close_arrives(pair):
    pair[0].send(torch.tensor([7]), 1)
    pair[0].close()
    got = torch.tensor([0])
    pair[1].recv(got, 0)
    assert got.item() == 7
    with pytest.raises(CommPeerError, match="rank 0 has closed the group"):
        pair[1].recv(got, 0)


def test_what_differs_is_told_in_full(pair):
    pair[0].all_reduce(torch.ones(2), "max", async_op=True)
    said = r"rank 0: all_reduce max of \(2,\) torch.float32; rank 1: barrier"
    with pytest.raises(CommError, match=said):
        pair[1].barrier()
    with pytest.raises(CommError, match=said):
        pair[0].barrier()


def test_a_dtype_that_torch_cannot_reduce(pair):
    tensor = torch.ones(2).to(torch.complex64)
    pair[0].all_reduce(tensor, "max", async_op=True)
    with pytest.raises(CommError, match="all_reduce max of"):
        pair[1].all_reduce(tensor.clone(), "max")


def test_names():
    assert backend_names()[:3] == ["memory", "gloo", "nccl"] and find_backend("Memory") is MemoryBackend
    with pytest.raises(CommError, match="known are: memory, gloo"):
        find_backend("smoke")
    with pytest.raises(CommError, match=r"options \['size'\]; memory has none"):
        join(0, 1, options={"size": 1})
