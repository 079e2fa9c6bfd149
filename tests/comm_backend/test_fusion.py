"""Buckets of reductions: the same results as without, over real groups of threads and of processes."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sagellm.comm_backend import CommConfig, CommFusion, ReduceOp
from sagellm.comm_backend.contract.fleet import ProcessFleet, ThreadFleet
from sagellm.comm_backend.contract.rules import PLAYS, check_backend
from sagellm.comm_backend.contract.seat import Task
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError
from tests.comm_backend.fused import FusedGloo, FusedMemory, FusedShm

FUSED = [FusedMemory, FusedGloo, FusedShm]


@pytest.mark.parametrize("kind", FUSED)
def test_it_keeps_to_the_contract(kind):
    # In `groups` ranks wait for two groups in different orders, which takes a `flush` of the other: see below.
    plays = {name: play for name, play in PLAYS.items() if name != "groups"}
    report = check_backend(kind, world_size=3, seed=1, plays=plays)
    assert {result.rule for result in report.results if not result.seen} == {"groups"}
    assert [result for result in report.results if result.seen and not result.passed] == []


def play(kind, body, world_size=3):
    """`body` on every rank. It reports what is wrong by raising."""
    with (ThreadFleet if kind.schemes == ("memory",) else ProcessFleet)(world_size, 30.0) as fleet:
        place = fleet.rendezvous(kind.schemes[0])
        tasks = [Task(kind, "own", rank, world_size, place, {}, 0) for rank in range(world_size)]
        facts = fleet.play(body, tasks)
    assert None not in facts, "a rank did not come to its end"
    assert [report for each in facts for report in each.reports] == []
    return [each.values for each in facts]


def mixed(seat):
    """Many reductions of several types and operations, with and without buckets, and other calls between."""
    fusion = seat.open()
    random = torch.Generator().manual_seed(seat.rank)
    jobs = []
    for number in range(60):
        dtype = torch.float32 if number % 20 < 12 else torch.int64
        op = (ReduceOp.SUM, ReduceOp.MAX)[number // 6 % 2]
        shape = [(), (0,), (17,), (3, 40), (90_000,)][number % 5]
        values = torch.randn(shape, generator=random)
        jobs.append(((values * 100).to(dtype), op))
    plain = [tensor.clone() for tensor, _ in jobs]
    for tensor, (_, op) in zip(plain, jobs, strict=True):
        fusion.backend.all_reduce(tensor, op)
    works = []
    for number, (tensor, op) in enumerate(jobs):
        works.append(fusion.all_reduce(tensor, op, async_op=number % 9 != 8))
        if number % 13 == 12:
            fusion.barrier()
        if number % 17 == 16 and works[-1] is not None:
            works[-1].wait()
    for work in reversed(works):
        if work is not None:
            work.wait()
            assert work.is_completed()
    seat.values["num"] = (fusion.num_reduced, fusion.num_started)
    in_order = seat.task.kind is not FusedGloo or seat.world_size == 2
    for (tensor, op), expected in zip(jobs, plain, strict=True):
        exact = in_order or not tensor.is_floating_point() or op is ReduceOp.MAX
        seat.expect("all_reduce", tensor, expected, f"{op} of {tensor.dtype} {tuple(tensor.shape)}", exact)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", FUSED)
def test_results_are_those_without_buckets_bit_by_bit_where_the_order_is_the_same(kind, world_size):
    for values in play(kind, mixed, world_size):
        reduced, started = values["num"]
        assert reduced == 60 and started < 40


def in_inference_mode(seat):
    fusion = seat.open()
    with torch.inference_mode():
        tensors = [torch.ones(10) for _ in range(4)]
        works = [fusion.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[0].wait()
    more = [torch.ones(10) for _ in range(4)]  # the same buffer, without that mode
    for work in [fusion.all_reduce(tensor, async_op=True) for tensor in more]:
        work.wait()
    for tensor in tensors + more:
        seat.expect("all_reduce", tensor, torch.full((10,), float(seat.world_size)), "a reduction")
    assert fusion.num_started == 2 and len(fusion._spare) == 1


@pytest.mark.parametrize("kind", FUSED)
def test_tensors_of_inference_mode(kind):
    play(kind, in_inference_mode)


def two_groups(seat):
    first, second = seat.open("-first"), seat.open("-second")
    tensors = [torch.ones(5), torch.ones(5)]
    works = [group.all_reduce(tensor, async_op=True) for group, tensor in zip((first, second), tensors, strict=True)]
    first.flush()
    second.flush()
    for work in works if seat.rank % 2 else reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [seat.world_size] * 2


@pytest.mark.parametrize("kind", FUSED)
def test_two_groups_that_are_flushed_may_be_waited_for_in_any_order(kind):
    play(kind, two_groups)


# ---- what starts a bucket, seen on two threads


class Watched(MemoryBackend):
    """Remembers its calls."""

    def _open(self):
        super()._open()
        self.calls = []

    def _start_all_reduce(self, tensor, op, timeout_s):
        self.calls.append((str(op), tensor.numel(), tensor.data_ptr()))
        return super()._start_all_reduce(tensor, op, timeout_s)

    def _start_barrier(self, timeout_s):
        self.calls.append(("barrier",))
        return super()._start_barrier(timeout_s)


def on_both(body, **limits):
    place, through = f"memory://{uuid.uuid4().hex}", threading.Barrier(2)

    def rank(number):
        below = Watched(CommConfig(backend="memory", rank=number, world_size=2, rendezvous=place, timeout_s=5))
        try:
            return body(CommFusion(below, **limits))
        finally:
            through.wait(20)  # a rank that closes early would be the reason of other failures
            below.close()

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(rank, range(2))
    return first


def sizes(fusion):
    return [call[:2] for call in fusion.backend.calls]


def start(fusion, *numbers, **more):
    return [fusion.all_reduce(torch.ones(number), async_op=True, **more) for number in numbers]


def test_bytes_and_count_start_a_bucket():
    def by_bytes(fusion):
        start(fusion, 100, 100, 50)  # 250 values are 1000 bytes
        before = sizes(fusion)
        start(fusion, 10)
        full = sizes(fusion)
        start(fusion, 5000)  # larger than any bucket: reduced where it is, at once
        return before, full, sizes(fusion)

    before, full, large = on_both(by_bytes, bucket_bytes=1000)
    assert before == full == [("sum", 250)] and large == [("sum", 250), ("sum", 10), ("sum", 5000)]

    def by_count(fusion):
        start(fusion, 1, 2)
        before = sizes(fusion)
        start(fusion, 3)
        return before, sizes(fusion)

    assert on_both(by_count, max_tensors=3) == ([], [("sum", 6)])


@pytest.mark.parametrize("ask", ["wait", "is_completed", "flush", "sync", "barrier", "close"])
def test_what_asks_for_a_result_starts_its_bucket(ask):
    def body(fusion):
        works = start(fusion, 1, 2)
        assert sizes(fusion) == []
        if ask in ("wait", "is_completed"):
            getattr(works[0], ask)()
        elif ask == "sync":
            fusion.all_reduce(torch.ones(3))
        else:
            getattr(fusion, ask)()
        found = sizes(fusion)
        for work in works:
            work.wait()
        return found

    expected = {"sync": [("sum", 6)], "barrier": [("sum", 3), ("barrier",)]}.get(ask, [("sum", 3)])
    assert on_both(body) == expected


def test_unlike_neighbours_are_kept_apart_and_in_order():
    def body(fusion):
        works = start(fusion, 1, 2) + start(fusion, 3, op=ReduceOp.MAX) + start(fusion, 4)
        works.append(fusion.all_reduce(torch.ones(5, dtype=torch.float64), async_op=True))
        for work in works:
            work.wait()
        return sizes(fusion)

    assert on_both(body) == [("sum", 3), ("max", 3), ("sum", 4), ("sum", 5)]


def test_one_alone_is_not_copied():
    def body(fusion):
        tensor = torch.ones(7)
        fusion.all_reduce(tensor)
        return fusion.backend.calls[0][2] == tensor.data_ptr()

    assert on_both(body)


def test_a_failure_reaches_every_member_and_nobody_else():
    def body(fusion):
        works = [fusion.all_reduce(torch.ones(3, dtype=torch.float32), async_op=True)]
        with pytest.raises(CommError, match="contiguous"):
            fusion.all_reduce(torch.ones(4, 4).T, async_op=True)
        with pytest.raises(CommError, match="op is 'mean'"):
            fusion.all_reduce(torch.ones(4), "mean", async_op=True)
        works[0].wait()  # the refused calls have not harmed this one
        if fusion.rank == 0:
            works = start(fusion, 1, 2, timeout_s=0.2)
            errors = []
            for work in works * 2:
                with pytest.raises(CommTimeoutError) as caught:
                    work.wait()
                errors.append(str(caught.value))
            with pytest.raises(CommTimeoutError):
                fusion.all_reduce(torch.ones(1))
            return errors
        return None

    errors = on_both(body)
    assert len(errors) == 4 and len(set(errors)) == 1


def test_a_rank_that_has_gone_ends_the_bucket():
    def body(fusion):
        if fusion.rank == 1:
            fusion.backend.close()
            return None
        kinds = []
        for work in start(fusion, 1, 2, 3):
            with pytest.raises(CommPeerError) as caught:
                work.wait()
            kinds.append(type(caught.value))
        return kinds

    assert on_both(body) == [CommPeerError] * 3


def test_ranks_whose_buckets_differ_are_told():
    def body(fusion):
        works = start(fusion, 1)
        if fusion.rank == 0:
            works[0].is_completed()  # a bucket of one here, of two there
        works += start(fusion, 2)
        with pytest.raises(CommError, match="do not agree"):
            for work in works:
                work.wait()
        return True

    assert on_both(body)


def test_the_earliest_deadline_of_its_members_is_the_buckets():
    def body(fusion):
        if fusion.rank == 1:
            return None
        works = start(fusion, 1, timeout_s=4) + start(fusion, 1, timeout_s=0.1)
        with pytest.raises(CommTimeoutError, match="0.0|0.1"):
            works[0].wait()
        return True

    assert on_both(body)


@pytest.mark.parametrize("limits", [{"bucket_bytes": 0}, {"max_tensors": 0}])
def test_limits_that_make_no_sense(limits):
    backend = MemoryBackend(CommConfig(backend="memory", rank=0, world_size=1, rendezvous=f"memory://{uuid.uuid4().hex}"))
    with backend, pytest.raises(CommError, match="give both above 0"):
        CommFusion(backend, **limits)


def test_a_closed_one_is_no_more_and_leaves_its_backend():
    backend = MemoryBackend(CommConfig(backend="memory", rank=0, world_size=1, rendezvous=f"memory://{uuid.uuid4().hex}"))
    fusion = CommFusion(backend)
    fusion.close()
    with pytest.raises(CommError, match="this group of fusion of memory is closed"):
        fusion.all_reduce(torch.ones(1))
    backend.barrier()
    backend.close()
