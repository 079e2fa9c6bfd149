"""The backend `shm`, with ranks that are processes; the contract is put to it in `test_contract.py`."""

import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks.processes import free_port
from sagellm.comm_backend import CommConfig
from sagellm.comm_backend.registry import find_backend
from sagellm.comm_backend.shm import ShmBackend
from sagellm.core.errors import CommError, CommTimeoutError
from tests.comm_backend import shm_ranks as ranks
from tests.comm_backend.shm_ranks import SMALL, run_ranks


def alone(folder: Path, **values: object) -> ShmBackend:
    return ShmBackend(CommConfig(**({"rank": 0, "world_size": 1, "rendezvous": f"file://{folder}/alone"} | values)))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", [{}, SMALL], ids=["default", "small"])
def test_messages_arrive_whole_and_in_order(tmp_path: Path, world_size: int, options: dict[str, int]):
    """The messages are empty, shorter than a chunk, and longer than the ring."""
    assert run_ranks(ranks.messages, tmp_path, world_size, [0, 1, 777, 9000], options=options) == [None] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives_of_several_chunks(tmp_path: Path, world_size: int):
    bits = run_ranks(ranks.collectives, tmp_path, world_size, [0, 1, 5, 2000], options=SMALL)
    assert isinstance(bits[0], bytes) and bits == [bits[0]] * world_size, bits


def test_ranks_that_meet_over_tcp(tmp_path: Path):
    assert run_ranks(ranks.nothing, tmp_path, 2, rendezvous=f"tcp://127.0.0.1:{free_port()}") == [None, None]


# ---- what goes wrong


def names(listed: list[str]) -> set[str]:
    """Return the names of /dev/shm without those that other processes of Python and PyTorch make and drop at any time."""
    return {name for name in listed if not name.startswith(("psm_", "sem.mp-", "torch_"))}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_in_a_message_leaves_nobody_hanging(tmp_path: Path, killed: int):
    before = names(os.listdir("/dev/shm"))
    answers = run_ranks(ranks.killed_in_a_message, tmp_path, 2, killed, options=SMALL)
    assert answers[killed] is None
    first, *later = answers[1 - killed]
    assert first[0] == "CommPeerError" and f"rank {killed} has gone" in first[1]
    assert later == [first, first]
    until = time.monotonic() + 10
    while not names(os.listdir("/dev/shm")) <= before:
        assert time.monotonic() < until, names(os.listdir("/dev/shm")) - before
        time.sleep(0.05)


def test_a_rank_that_is_killed_in_a_collective_leaves_nobody_hanging(tmp_path: Path):
    answers = run_ranks(ranks.killed_in_a_collective, tmp_path, 3)
    assert answers[1] is None and answers[0] == answers[2]
    assert answers[0][0] == "CommPeerError" and "rank 1 has gone" in answers[0][1]


def test_a_deadline_breaks_the_group_for_all_with_its_cause(tmp_path: Path):
    own, other = run_ranks(ranks.silence, tmp_path, 2)
    assert own[0][0] == "CommTimeoutError" and "receive of rank 0" in own[0][1] and "waited for rank 1" in own[0][1]
    assert own == other == (own[0],) * 3


def test_messages_that_differ_are_refused_on_both_sides(tmp_path: Path):
    sender, receiver = run_ranks(ranks.different_messages, tmp_path, 2)
    assert sender == receiver and sender[0] == "CommError"
    assert "rank 0 sent float32 [4], rank 1 receives float32 [2, 2]" in sender[1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["all_reduce sum float32 [4]", "all_reduce sum float32 [5]"]),
        ("dtype", ["broadcast from 0 int64 [4]", "broadcast from 0 float64 [4]"]),
        ("op", ["all_reduce min", "all_reduce max"]),
        ("call", ["barrier", "all_reduce sum"]),
    ],
)
def test_collectives_that_differ_are_refused_on_all_sides(tmp_path: Path, kind: str, words: list[str]):
    answers = run_ranks(ranks.different_collectives, tmp_path, 2, kind)
    assert answers[0] == answers[1] and answers[0][0] == "CommError"
    assert all(word in answers[0][1] for word in words), answers[0]


def test_what_a_rank_sent_before_it_left_arrives(tmp_path: Path):
    stays, leaves = run_ranks(ranks.one_leaves, tmp_path, 2)
    assert stays[0] == "CommPeerError" and "rank 1 has gone" in stays[1]
    assert leaves == ("CommError", "this group of shm is closed; make a new one.")


def test_a_process_that_ends_without_close_has_left(tmp_path: Path):
    stays, ended = run_ranks(ranks.ends_without_close, tmp_path, 2)
    assert stays[0] == "CommPeerError" and ended is None


def test_close_ends_what_waits(tmp_path: Path):
    for waiting, later in run_ranks(ranks.closed_while_waiting, tmp_path, 2):
        assert waiting[0] in ("CommError", "CommPeerError") and later[0] == "CommError" and "closed" in later[1]


def test_ctrl_c_is_heard_while_waiting_and_told_to_the_others(tmp_path: Path):
    own, other = run_ranks(ranks.interrupted, tmp_path, 2)
    assert own == "interrupted"
    assert other[0] == "CommError" and "broken off by KeyboardInterrupt" in other[1]


def test_a_rank_that_does_not_come(tmp_path: Path):
    for rank in (0, 1):
        start = time.monotonic()
        with pytest.raises(CommTimeoutError, match="start of rank 0.* rank 1|rank 1 of shm found no other rank"):
            alone(tmp_path, rank=rank, world_size=2, rendezvous=f"file://{tmp_path}/{rank}", timeout_s=0.2)
        assert time.monotonic() - start < 20


def test_ranks_with_other_sizes_are_refused(tmp_path: Path):
    answers = run_ranks(ranks.nothing, tmp_path, 2, last={"options": SMALL})
    assert all(isinstance(answer, CommError) and "rank 1 has" in str(answer) for answer in answers), answers


def test_a_rank_that_is_there_already_is_refused(tmp_path: Path):
    first, second = run_ranks(ranks.nothing, tmp_path, 2, last={"rank": 0}, timeout_s=0.5)
    assert isinstance(first, CommError) and isinstance(second, CommError)


# ---- one rank is enough


def test_the_heap_gives_back_what_it_gave(tmp_path: Path):
    (full,) = run_ranks(ranks.heap, tmp_path, 1, options=SMALL)
    assert full[0] == "CommError" and "raise option heap_bytes" in full[1]


def test_nothing_has_a_name(tmp_path: Path):
    before = names(os.listdir("/dev/shm"))
    for links, while_running in run_ranks(ranks.left_behind, tmp_path, 2):
        assert links == [] and names(while_running) <= before


def test_misuse_breaks_nothing(tmp_path: Path):
    with alone(tmp_path) as backend:
        with pytest.raises(CommError, match="cannot be had"):
            backend.all_reduce(torch.zeros(2, dtype=torch.complex64), "min")
        backend.barrier()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"options": {"ring": 1}}, "ring: Extra inputs.*known are ring_bytes, "),
        ({"options": {"ring_bytes": 1}}, "ring_bytes: Input should be greater"),
        ({"rendezvous": "memory://here"}, "cannot meet at memory://here"),
    ],
)
def test_what_cannot_work_is_told(tmp_path: Path, values: dict[str, object], words: str):
    with pytest.raises(CommError, match=words):
        alone(tmp_path, **values)


def test_it_is_found_by_name():
    assert find_backend("shm") is ShmBackend
