"""Tests of what is particular to groups of torch.distributed. Two ranks of gloo can be threads of one process."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmarks.processes import free_port
from sagellm.comm_backend import CommConfig, ReduceOp
from sagellm.comm_backend.registry import make_backend
from sagellm.comm_backend.torch_groups import GlooBackend, NcclBackend
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError


def config(rank, size, rendezvous, **more):
    return CommConfig(rank=rank, world_size=size, rendezvous=str(rendezvous), timeout_s=more.pop("timeout_s", 10.0), **more)


def both(work):
    """`work(rank)` on two ranks at once."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


@pytest.fixture
def pair(tmp_path):
    ranks = both(lambda rank: make_backend(config(rank, 2, f"file://{tmp_path}/meet")))
    yield ranks
    for rank in ranks:
        rank.close()


def test_other_dtypes_travel_and_are_not_reduced(pair):
    def work(rank):
        for dtype in (torch.int16, torch.bool, torch.complex64, torch.float8_e5m2):
            tensor = torch.tensor([rank, 1 - rank]).to(dtype)
            output = torch.zeros(2, 2).to(dtype)
            pair[rank].all_gather(output, tensor)
            assert output.tolist() == [[0, 1], [1, 0]]
            pair[rank].broadcast(tensor, 1)
            assert tensor.tolist() == [1, 0]
            scalar = tensor[0].clone()
            pair[rank].broadcast(scalar, 0)
            with pytest.raises(CommError, match=f"gloo cannot reduce {dtype}; give bfloat16, float16"):
                pair[rank].all_reduce(tensor)
        return True

    assert both(work) == [True, True]


def test_it_meets_on_a_port_and_the_default_group_is_left_alone():
    port = free_port()

    def work(rank):
        with make_backend(config(rank, 2, f"tcp://127.0.0.1:{port}")) as backend:
            tensor = torch.ones(3)
            backend.all_reduce(tensor)
            return tensor.tolist(), dist.is_initialized()

    assert both(work) == [([2.0] * 3, False)] * 2


def test_a_group_that_there_is(tmp_path):
    def work(rank):
        store = dist.FileStore(str(tmp_path / "meet"), 2)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=10)
        inner = dist.ProcessGroupGloo(store, rank, 2, options)
        group = dist.ProcessGroup(store, rank, 2)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
        with GlooBackend.from_group(group) as backend:
            tensor = torch.tensor([float(rank + 1)])
            backend.all_reduce(tensor, ReduceOp.PRODUCT)
            assert (backend.rank, backend.world_size, tensor.item()) == (rank, 2, 2.0)
        with pytest.raises(CommError, match="closed"):
            backend.barrier()
        group.allreduce([tensor]).wait()  # as before, for who has it
        return tensor.item()

    assert both(work) == [4.0, 4.0]


def test_the_first_cause_is_told_again_to_whoever_waits(pair):
    """A deadline passes here while another receive waits; the other rank sees the connections end."""
    other = pair[0].recv(torch.zeros(1), 1, async_op=True)
    assert not other.is_completed()

    def wait():
        with pytest.raises(CommPeerError):
            pair[1].recv(torch.zeros(1), 0)

    waits = threading.Thread(target=wait)
    waits.start()
    with pytest.raises(CommTimeoutError, match=r"not done within 0.1 s") as first:
        pair[0].recv(torch.zeros(1), 1, timeout_s=0.1)
    for call in (other.wait, lambda: pair[0].all_reduce(torch.zeros(1)), other.wait):
        with pytest.raises(CommTimeoutError) as again:
            call()
        assert str(again.value) == str(first.value) and again.value is not first.value
    assert other.is_completed()
    waits.join(9)
    with pytest.raises(CommPeerError, match="has gone, or has closed"):
        pair[1].barrier()


def test_a_group_of_one(tmp_path):
    with make_backend(config(0, 1, f"file://{tmp_path}/meet")) as backend:
        tensor, output = torch.ones(2), torch.zeros(1, 2)
        backend.all_reduce(tensor)
        backend.all_gather(output, tensor)
        backend.broadcast(tensor, 0)
        backend.barrier()
        assert output.tolist() == [[1.0, 1.0]]
        with pytest.raises(CommError, match=r"give one of \[\]"):
            backend.send(tensor, 0)


@pytest.mark.parametrize(
    ("rendezvous", "options", "error", "message"),
    [
        ("file:///nowhere/meet", {}, CommError, "cannot be written .No such file"),
        ("memory://name", {}, CommError, "gloo cannot meet at memory://name; give file:// or tcp://"),
        ("tcp://127.0.0.1:1", {}, CommTimeoutError, "rank 0 did not open it within 0.2 s"),
        ("file://{tmp}/meet", {"interface": "none0"}, CommError, "gloo cannot make a group"),
        ("file://{tmp}/meet", {"port": 1}, CommError, r"options \['port'\]; gloo has \['interface'\]"),
        ("file://{tmp}/meet", {}, CommTimeoutError, "not all 2 ranks came to file"),
    ],
)
def test_where_no_group_can_be(tmp_path, rendezvous, options, error, message):
    with pytest.raises(error, match=message):
        GlooBackend(config(1, 2, rendezvous.format(tmp=tmp_path), options=options, timeout_s=0.2))


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommError, match="cannot be used"):
            GlooBackend(config(0, 2, f"tcp://127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_says_what_it_needs(tmp_path):
    with pytest.raises(CommError, match="nccl needs .*; use gloo"):
        NcclBackend(config(0, 1, f"file://{tmp_path}/meet"))
