"""The channel `shm` and its memory: what its own address, segments and owners can have wrong."""

import gc
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from sagellm._core import copy_pieces
from sagellm.comm_backend.kv_transfer.base import TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.contract.desk import layout_of
from sagellm.comm_backend.kv_transfer.contract.owner import OwnerProcess, OwnerStarter, make_region
from sagellm.comm_backend.kv_transfer.layout import KVRegion
from sagellm.comm_backend.kv_transfer.shared_memory import HEADER_BYTES, SharedMemory, memory_of, open_memory
from sagellm.comm_backend.kv_transfer.shm import ShmChannel
from sagellm.core.errors import TransferError

LAYOUT = layout_of()


def opened(memory: SharedMemory, **values: int) -> np.ndarray:
    return open_memory(**{"pid": os.getpid(), "fd": memory.fd, "token": memory.token, "num_bytes": len(memory)} | values)


@pytest.fixture
def channel():
    with ShmChannel(make_region(ShmChannel, LAYOUT, None), TransferOptions()) as channel:
        yield channel


def test_memory_of_others_is_seen_and_cannot_be_written():
    tensor = ShmChannel.empty((3, 5), torch.bfloat16).fill_(2)
    memory, offset = memory_of(tensor[1:])
    assert offset == HEADER_BYTES + 10 and memory_of(torch.zeros(3)) is None
    seen = opened(memory)
    tensor[1:] = 3
    assert torch.equal(torch.from_numpy(seen[HEADER_BYTES:].copy()).view(torch.bfloat16).view(3, 5), tensor)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    with pytest.raises(ValueError, match="read-only|writeable"):
        copy_pieces(seen, np.zeros(8, np.uint8), *np.zeros((3, 1), np.int64), 1e12, np.zeros(1, np.uint8))


def test_memory_is_given_back_and_cannot_shrink():
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    tensor = ShmChannel.empty((1 << 20,), torch.uint8)
    memory, _ = memory_of(tensor)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 10)
    seen = opened(memory)
    del tensor, memory
    gc.collect()
    assert seen[-1] == 0 and len(os.listdir("/proc/self/fd")) == before + 1  # the mapping's own
    del seen
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pages_that_nobody_touches_cost_nothing():
    tensor = ShmChannel.empty((1 << 40,), torch.uint8)  # more than the machine has
    tensor[1 << 39] = 1
    memory, _ = memory_of(tensor)
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 24


@pytest.mark.parametrize("written", [0, 8, 16, 23])
def test_a_half_written_segment_is_refused(written: int):
    """The header of a segment is written last. A segment is refused if any part of its header is missing."""
    memory = SharedMemory.create(100)
    memory[written:24] = bytes(24 - written)
    with pytest.raises(TransferError, match="half-written"):
        opened(memory)


def test_segments_that_are_not_what_the_address_says_are_refused(tmp_path: Path):
    memory = SharedMemory.create(100)
    for values in ({"token": memory.token + 2}, {"num_bytes": 4096}, {"fd": 999_999}, {"pid": 2**22 + 1}):
        with pytest.raises(TransferError, match="another|gone|KV memory"):
            opened(memory, **values)
    other = os.memfd_create("unsealed")
    try:
        os.ftruncate(other, len(memory))
        os.pwrite(other, struct.pack("<QQ", memory.token, len(memory)), 0)
        with pytest.raises(TransferError, match="could shrink"):
            opened(memory, fd=other)
    finally:
        os.close(other)
    read, write = os.pipe()
    with pytest.raises(TransferError, match="could shrink"):
        opened(memory, fd=read)
    os.close(read)
    os.close(write)


def test_blocks_that_others_cannot_read_are_refused_at_once():
    tensors = tuple(torch.zeros(LAYOUT.shape(part), dtype=getattr(torch, part.dtype)) for part in LAYOUT.parts)
    with pytest.raises(TransferError, match=r"keys lies in memory that no other .* ShmChannel\.empty"):
        ShmChannel(KVRegion(LAYOUT, tensors), TransferOptions())


def test_an_address_whose_parts_lie_elsewhere_is_refused(channel: ShmChannel):
    with OwnerStarter() as starter:
        owner = OwnerProcess(starter.pipe, ShmChannel, LAYOUT, 1, {})
        address = owner.endpoint.address
        first = address["parts"][0]
        for parts in ([{**first, "offset": first["num_bytes"]}, *address["parts"][1:]], address["parts"][:2], ["nonsense"] * 3):
            endpoint = owner.endpoint.model_copy(update={"address": {**address, "parts": parts}})
            with pytest.raises(TransferError, match="address of the peer"):
                channel.connect("p", [endpoint])
        state = {**address["state"], "token": 5}
        with pytest.raises(TransferError, match="another engine"):
            channel.connect("p", [owner.endpoint.model_copy(update={"address": {**address, "state": state}})])
    with pytest.raises(TransferError, match="has gone"):
        channel.connect("p", [owner.endpoint])


def test_copy_pieces_against_plain_slices():
    random = np.random.default_rng(0)
    source = random.integers(0, 256, 4_000_000, np.uint8)
    for num, longest in ((3, 1_300_000), (300, 9000), (5000, 100), (0, 1)):
        sizes = random.integers(0, longest, num)
        dst = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
        src = random.integers(0, len(source) - longest, num)
        target, expected = (np.zeros(4_000_000, np.uint8) for _ in range(2))
        for to, at, size in zip(dst, src, sizes, strict=True):
            expected[to : to + size] = source[at : at + size]
        assert copy_pieces(target, source, dst, src, sizes, 1e12, np.zeros(1, np.uint8)) == "done"
        assert np.array_equal(target, expected)


def test_copy_pieces_writes_nothing_that_it_should_not():
    source, target, one = np.ones(10, np.uint8), np.zeros(10, np.uint8), np.ones(1, np.int64)
    fine = np.zeros(1, np.uint8)
    for src, dst, size in ((10, 0, 1), (0, 10, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 0, 11), (2**62, 0, 2**62)):
        with pytest.raises(IndexError, match="does not lie within"):
            copy_pieces(target, source, one * dst, one * src, one * size, 1e12, fine)
    assert copy_pieces(target, source, one, one, one, 0.0, fine) == "deadline"
    assert copy_pieces(target, source, one, one, one, 1e12, np.ones(1, np.uint8)) == "stopped"
    with pytest.raises(ValueError, match="as many"):
        copy_pieces(target, source, one, one, np.ones(2, np.int64), 1e12, fine)
    assert not target.any()


def test_a_peer_that_is_disconnected_before_the_turn_of_a_transfer_is_not_read(channel):
    channel.connect("peer", [channel.endpoint()])
    check = channel._check_plan

    def checked(plan, peer):
        check(plan, peer)
        channel.disconnect("peer")  # nothing runs yet that it could end

    channel._check_plan = checked
    plan = TransferPlan(transfer_id="t", source="peer", block_ids=(1,), target_blocks=(2,), num_tokens=1, timeout_s=10)
    with pytest.raises(TransferError, match="was disconnected"):
        channel.transfer(plan)


def test_a_transfer_moves_the_bytes_of_its_plan(channel):
    channel.connect("peer", [channel.endpoint()])
    size = channel.region.layout.token_bytes()
    plan = TransferPlan(transfer_id="t", source="peer", block_ids=(1,), target_blocks=(2,), num_tokens=1, timeout_s=10)
    assert channel.transfer(plan.model_copy(update={"total_bytes": size})).num_bytes == size
    with pytest.raises(TransferError, match=f"{size} bytes were moved; the plan has {size + 1}"):
        channel.transfer(plan.model_copy(update={"total_bytes": size + 1}))
