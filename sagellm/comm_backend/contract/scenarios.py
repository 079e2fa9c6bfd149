"""Scenarios of success: each is one rank's part, and all ranks play it together."""

import time
from itertools import permutations

import torch

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.comm_backend.contract.seat import GROUP_S, Seat
from sagellm.core.errors import CommError, CommTimeoutError

__all__ = ["asynchronous", "collectives", "empties", "groups", "joining", "large", "leaving", "messages"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SHAPES = ((), (1,), (7,), (3, 5), (1000,))
LARGE = 1_500_000  # float32 values, 6 MB: more than sockets hold
NUM_MESSAGES = 5
REDUCED = {ReduceOp.SUM: torch.sum, ReduceOp.PRODUCT: torch.prod, ReduceOp.MIN: torch.amin, ReduceOp.MAX: torch.amax}
SHORT_S = 0.2


def joining(seat: Seat) -> None:
    with seat.held("builds"):
        backend = seat.open()
        said = (backend.rank, backend.world_size)
        if said != (seat.rank, seat.world_size):
            seat.report("builds", f"it says to be rank and world_size {said}.")
        if not (isinstance(name := getattr(backend, "name", None), str) and name):
            seat.report("builds", f"its name is {name!r}; give the class a text `name`.")
        backend.barrier()
    odd = {**seat.task.options, "no_such_option": 1}
    seat.refused("options", "an option no_such_option", lambda: seat.open("-odd", options=odd), CommError, within_s=GROUP_S)
    more = seat.world_size + 1
    seat.refused(
        "meets", f"a group of {more} to which {seat.world_size} come",
        lambda: seat.open("-more", SHORT_S, world_size=more), CommTimeoutError, within_s=SHORT_S,
    )  # fmt: skip


def collectives(seat: Seat) -> None:
    backend = seat.open()
    bits = seat.values["same_bits"] = []
    seat.seen.add("same_bits")
    for number, dtype in enumerate(DTYPES):
        for op in ReduceOp:
            values = _values(seat, SHAPES[(seat.seed + number) % len(SHAPES)], dtype)
            bits.append(_reduce(seat, backend, values, op))
        _gather(seat, backend, _values(seat, SHAPES[(seat.seed + number + 1) % len(SHAPES)], dtype))
        for src in range(seat.world_size):
            _broadcast(seat, backend, _values(seat, SHAPES[(seat.seed + number + 2) % len(SHAPES)], dtype), src)
    bits.append(_reduce(seat, backend, _values(seat, (LARGE,), torch.float32), ReduceOp.SUM))
    _gather(seat, backend, _values(seat, (LARGE // 4,), torch.float32))
    with seat.held("barrier"):
        if seat.rank == seat.world_size - 1:
            time.sleep(SHORT_S)
        came = time.monotonic()
        backend.barrier()
        seat.values["barrier"] = (came, time.monotonic())


def _values(seat: Seat, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[world_size, *shape], the same on all ranks: row r is what rank r has."""
    if dtype.is_floating_point:
        return torch.randn((seat.world_size, *shape), generator=seat.random).to(dtype)
    return torch.randint(0, 5, (seat.world_size, *shape), generator=seat.random).to(dtype)


def _reduce(seat: Seat, backend: CommBackendProtocol, values: torch.Tensor, op: ReduceOp) -> bytes:
    tensor = values[seat.rank].clone().to(seat.device)
    with seat.held("all_reduce"):
        if (answer := backend.all_reduce(tensor, op)) is not None:
            seat.report("all_reduce", f"it returned {answer!r} without async_op; return None.")
        exact = op in (ReduceOp.MIN, ReduceOp.MAX) or not values.dtype.is_floating_point
        wide = values.double() if values.dtype.is_floating_point else values
        expected = REDUCED[op](wide, 0).to(values.dtype)
        seat.expect("all_reduce", tensor.cpu(), expected, f"{op} of {values.dtype}", exact)
    return bytes(tensor.cpu().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() < 10_000 else _digest(tensor)


def _digest(tensor: torch.Tensor) -> bytes:
    return str(tensor.cpu().view(torch.int32).long().cumsum(0).sum().item()).encode()


def _gather(seat: Seat, backend: CommBackendProtocol, values: torch.Tensor) -> None:
    tensor, output = values[seat.rank].clone().to(seat.device), torch.zeros_like(values, device=seat.device)
    with seat.held("all_gather"):
        backend.all_gather(output, tensor)
        seat.expect("all_gather", output.cpu(), values, "all_gather")
        seat.expect("all_gather", tensor.cpu(), values[seat.rank], "the input of all_gather, afterwards,")


def _broadcast(seat: Seat, backend: CommBackendProtocol, values: torch.Tensor, src: int) -> None:
    tensor = values[seat.rank].clone().to(seat.device)
    with seat.held("broadcast"):
        backend.broadcast(tensor, src)
        seat.expect("broadcast", tensor.cpu(), values[src], f"broadcast from {src}")


def messages(seat: Seat) -> None:
    """All pairs at once, then one after the other, then with a collective between."""
    backend = seat.open()
    sizes = [1 + int(each) for each in torch.randint(0, 3000, (NUM_MESSAGES,), generator=seat.random)]
    with seat.held("order"):
        sent = [[_message(seat, seat.rank, dst, k, size) for k, size in enumerate(sizes)] for dst in seat.others]
        got = [[seat.tensor(torch.zeros(size)) for size in sizes] for _ in seat.others]
        works = [
            backend.send(tensor, dst, async_op=True) for dst, out in zip(seat.others, sent, strict=True) for tensor in out
        ]
        backend.barrier()  # a queue of messages is there
        works += [
            backend.recv(tensor, src, async_op=True) for src, into in zip(seat.others, got, strict=True) for tensor in into
        ]
        for work in works:
            work.wait()
        for other, into in zip(seat.others, got, strict=True):
            for k, size in enumerate(sizes):
                expected = _message(seat, other, seat.rank, k, size)
                pair = int(into[k][0]) // 100 == int(expected[0]) // 100
                seat.expect("order" if pair else "apart", into[k], expected, f"message {k} from {other}")
    with seat.held("reuse"):
        for src, dst in permutations(range(seat.world_size), 2):
            tensor = seat.tensor(torch.full((2000,), float(src)))
            if seat.rank == src:
                backend.send(tensor, dst)
                seat.expect("reuse", tensor, torch.full_like(tensor, src), "a tensor that was sent")
                tensor.fill_(-1)
            elif seat.rank == dst:
                time.sleep(0.01)  # the sender goes on meanwhile, if it may
                backend.recv(tensor.fill_(-2), src)
                seat.expect("reuse", tensor, torch.full_like(tensor, src), "overwritten after send, a message")
    with seat.held("apart"):
        into = [seat.tensor(torch.zeros(3)) for _ in seat.others]
        works = [backend.recv(tensor, src, async_op=True) for tensor, src in zip(into, seat.others, strict=True)]
        total = seat.tensor(torch.ones(3))
        backend.all_reduce(total)
        seat.expect("apart", total, torch.full_like(total, seat.world_size), "all_reduce while receives wait")
        for dst in seat.others:
            backend.send(seat.tensor(torch.full((3,), float(seat.rank))), dst)
        for tensor, src, work in zip(into, seat.others, works, strict=True):
            work.wait()
            seat.expect("apart", tensor, torch.full_like(tensor, src), "a receive across all_reduce")


def _message(seat: Seat, src: int, dst: int, number: int, size: int) -> torch.Tensor:
    """Says what it is in every element: pair and number."""
    return seat.tensor(torch.full((size,), float(1000 * (src + 1) + 100 * (dst + 1) + number)))


def large(seat: Seat) -> None:
    backend = seat.open()
    with seat.held("both_ways"):
        sent = seat.tensor(torch.arange(LARGE) + seat.rank)
        got = [torch.zeros_like(sent) for _ in seat.others]
        works = [backend.send(sent, dst, async_op=True) for dst in seat.others]
        works += [backend.recv(into, src, async_op=True) for into, src in zip(got, seat.others, strict=True)]
        for work in works:
            work.wait()
        for into, src in zip(got, seat.others, strict=True):
            seat.expect("both_ways", into, seat.tensor(torch.arange(LARGE) + src), f"6 MB from {src}")


def asynchronous(seat: Seat) -> None:
    backend = seat.open()
    with seat.held("asynchronous"):
        tensors = [seat.tensor(torch.full((100,), float(k))) for k in range(8)]
        works = [backend.all_reduce(tensor, async_op=True) for tensor in tensors]
        for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            if not isinstance(work, Work):
                seat.report("asynchronous", f"all_reduce with async_op returned {work!r}; return a Work.")
            work.wait()
            work.wait()
            if not work.is_completed():
                seat.report("asynchronous", "is_completed is false after wait.")
            seat.expect("asynchronous", tensor, torch.full_like(tensor, k * seat.world_size), f"all_reduce {k} of 8 at once")
        src, dst = (seat.rank - 1) % seat.world_size, (seat.rank + 1) % seat.world_size
        into, out = seat.tensor(torch.zeros(10)), seat.tensor(torch.full((10,), float(seat.rank)))
        works = [backend.recv(into, src, async_op=True)]
        backend.barrier()
        works += [backend.send(out, dst, async_op=True), backend.broadcast(seat.tensor([1.0]), 0, async_op=True)]
        deadline = time.monotonic() + GROUP_S
        while not all([work.is_completed() for work in works]) and time.monotonic() < deadline:
            time.sleep(0.002)
        if not all(work.is_completed() for work in works):
            seat.report("asynchronous", f"is_completed is still false after {GROUP_S:g} s without a call of wait.")
        for work in works:
            work.wait()
        seat.expect("asynchronous", into, torch.full_like(into, src), "recv with async_op")


def empties(seat: Seat) -> None:
    backend = seat.open()
    last = seat.world_size - 1
    with seat.held("empty"):
        for shape in ((0,), (3, 0)):
            tensor = seat.tensor(torch.zeros(shape))
            backend.all_reduce(tensor)
            backend.all_gather(seat.tensor(torch.zeros((seat.world_size, *shape))), tensor)
            backend.broadcast(tensor, last)
            _from_first_to_last(seat, backend, tensor)
        scalar = seat.tensor(float(seat.rank))
        _from_first_to_last(seat, backend, scalar)
        seat.expect("empty", scalar, seat.tensor(float(0 if seat.rank == last else seat.rank)), "a message of one value")
        backend.broadcast(scalar, last)
        seat.expect("empty", scalar, seat.tensor(0.0), "a broadcast of one value")


def _from_first_to_last(seat: Seat, backend: CommBackendProtocol, tensor: torch.Tensor) -> None:
    if seat.rank == 0:
        backend.send(tensor, seat.world_size - 1)
    elif seat.rank == seat.world_size - 1:
        backend.recv(tensor, 0)


def groups(seat: Seat) -> None:
    """Two groups at once, used in another order on each rank."""
    with seat.held("groups"):
        first, second = seat.open("-first"), seat.open("-second")
        ones, tens = seat.tensor([1.0]), seat.tensor([10.0])
        works = [first.all_reduce(ones, async_op=True), second.all_reduce(tens, async_op=True)]
        for work in works if seat.rank % 2 else reversed(works):
            work.wait()
        seat.expect("groups", torch.cat([ones, tens]), seat.tensor([1.0, 10.0]) * seat.world_size, "all_reduce in two groups")
        first.close()
        second.all_reduce(ones)
        seat.expect("groups", ones, seat.tensor([1.0]) * seat.world_size**2, "all_reduce after another group was closed")


def leaving(seat: Seat) -> None:
    """Everybody goes as soon as it has what it wants, as processes do at their end."""
    with seat.held("leaves"):
        for number in range(4):
            with seat.open(f"-{number}") as backend:
                tensor = seat.tensor(torch.ones(20_000))
                backend.all_reduce(tensor)
            seat.expect("leaves", tensor, torch.full_like(tensor, seat.world_size), "all_reduce before close")
