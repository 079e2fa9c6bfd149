"""Scenarios of failures, which must come in time and with a message. Each is one rank's part, and all ranks play it
together."""

import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.contract.seat import Seat
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError

__all__ = ["closing", "deadlines", "departing", "killing", "mismatches", "misuse"]

SHORT_S, LONG_S = 0.2, 1.5


def deadlines(seat: Seat) -> None:
    """Rank 0 waits for what never comes; what the others wait for does not come either."""
    waits: dict[str, Callable[[CommBackendProtocol], Any]] = {
        "recv": lambda backend: backend.recv(seat.tensor([0.0]), 1, timeout_s=SHORT_S),
        "all_reduce": lambda backend: backend.all_reduce(seat.tensor([0.0]), timeout_s=SHORT_S),
        "barrier": lambda backend: backend.barrier(timeout_s=SHORT_S),
        "recv by the deadline of the group": lambda backend: backend.recv(seat.tensor([0.0]), 1),
    }
    for number, (what, wait) in enumerate(waits.items()):
        with seat.held("deadline"):
            backend = seat.open(f"-{number}", SHORT_S if "group" in what else LONG_S)
            backend.barrier(timeout_s=LONG_S)
        if seat.rank == 0:
            seat.refused("deadline", what, partial(wait, backend), CommTimeoutError, within_s=SHORT_S)
            _is_broken(seat, backend, CommTimeoutError)
        else:
            _waits_in_vain(seat, backend, "broken", 0)
    with seat.held("deadline"):
        backend = seat.open("-async")
        backend.barrier()
    if seat.rank == 0:
        work = backend.recv(seat.tensor([0.0]), 1, timeout_s=SHORT_S, async_op=True)
        for _ in range(2):
            seat.refused("deadline", "wait of an async recv", work.wait, CommTimeoutError, within_s=SHORT_S)
    else:
        _waits_in_vain(seat, backend, "broken", 0)


def _is_broken(seat: Seat, backend: CommBackendProtocol, *kinds: type[CommError]) -> None:
    """The next call fails at once, for the first reason; the deadline of a wait for it is never reached."""
    last = (seat.rank + 1) % seat.world_size
    seat.refused("broken", "all_reduce afterwards", lambda: backend.all_reduce(seat.tensor([0.0])), *kinds, within_s=0)
    seat.refused("broken", "recv afterwards", lambda: backend.recv(seat.tensor([0.0]), last, timeout_s=9), *kinds, within_s=0)
    seat.refused("broken", "send afterwards", lambda: backend.send(seat.tensor([0.0]), last), *kinds, within_s=0)


def _waits_in_vain(seat: Seat, backend: CommBackendProtocol, rule: str, src: int) -> None:
    """For a rank that fails; in which way this one learns of it is not laid down."""
    tensor, what = seat.tensor([0.0]), f"recv from rank {src}, which has failed,"
    seat.refused(rule, what, lambda: backend.recv(tensor, src, timeout_s=LONG_S), CommError, within_s=LONG_S)


def departing(seat: Seat) -> None:
    """The last rank closes while others wait for it."""
    last, tensor = seat.world_size - 1, seat.tensor(torch.zeros(10))
    kinds = (CommPeerError, CommTimeoutError)
    for what in ("recv", "all_reduce"):
        with seat.held("peer_left"):
            backend = seat.open(f"-{what}")
            backend.barrier()
        if seat.rank == last:
            backend.close()
            continue
        wait = partial(backend.recv, src=last) if what == "recv" else backend.all_reduce
        said = f"{what} with rank {last}, which has closed,"
        seat.refused("peer_left", said, partial(wait, tensor, timeout_s=LONG_S), *kinds, within_s=LONG_S)
        _is_broken(seat, backend, *kinds)


def killing(seat: Seat) -> None:
    """The last rank's process is killed without a word; a thread cannot be, and closes."""
    with seat.held("peer_killed"):
        backend = seat.open()
        backend.barrier()
    last = seat.world_size - 1
    if seat.rank == last:
        if seat.is_thread:
            backend.close()
            return
        os.kill(os.getpid(), signal.SIGKILL)
    big = torch.zeros(2_000_000)
    kinds = (CommPeerError, CommTimeoutError)
    what = f"recv from rank {last}, whose process was killed,"
    seat.refused("peer_killed", what, lambda: backend.recv(seat.tensor(big), last, timeout_s=LONG_S), *kinds, within_s=LONG_S)
    what = "all_reduce with a rank whose process was killed"
    seat.refused("peer_killed", what, lambda: backend.all_reduce(seat.tensor(big), timeout_s=LONG_S), *kinds, within_s=LONG_S)


def closing(seat: Seat) -> None:
    with seat.held("closed"):
        backend = seat.open()
        pending = backend.recv(seat.tensor([0.0]), seat.others[0], async_op=True)
        with contextlib.suppress(CommPeerError):  # one that is through already has closed, which ends what is pending here
            backend.barrier()
        backend.close()
        backend.close()
    seat.refused("closed", "wait for an operation that close has ended", pending.wait, CommError, within_s=0)
    tensor, other = seat.tensor([0.0]), seat.others[0]
    for what, call in {
        "all_reduce": lambda: backend.all_reduce(tensor),
        "all_gather": lambda: backend.all_gather(seat.tensor(torch.zeros(seat.world_size, 1)), tensor),
        "broadcast": lambda: backend.broadcast(tensor, 0),
        "barrier": backend.barrier,
        "send": lambda: backend.send(tensor, other),
        "recv": lambda: backend.recv(tensor, other),
    }.items():
        seat.refused("closed", f"{what} after close", call, CommError, within_s=0)


def misuse(seat: Seat) -> None:
    with seat.held("misuse"):
        backend = seat.open()
    tensor, other, size = seat.tensor(torch.ones(4)), seat.others[0], seat.world_size
    for what, call in {
        "a list": lambda: backend.all_reduce([1.0]),
        "a strided tensor": lambda: backend.all_reduce(seat.tensor(torch.ones(4, 4)).t()),
        "a tensor on meta": lambda: backend.all_reduce(torch.ones(4, device="meta")),
        "op median": lambda: backend.all_reduce(tensor, "median"),
        "an output of another shape": lambda: backend.all_gather(seat.tensor(torch.ones(size, 5)), tensor),
        "an output of another dtype": lambda: backend.all_gather(seat.tensor(torch.ones(size, 4), torch.int64), tensor),
        "a strided output": lambda: backend.all_gather(seat.tensor(torch.ones(4, size)).t(), tensor),
        "broadcast from a rank that is not": lambda: backend.broadcast(tensor, size),
        "send to a rank that is not": lambda: backend.send(tensor, size),
        "send to rank -1": lambda: backend.send(tensor, -1),
        "send to itself": lambda: backend.send(tensor, seat.rank),
        "recv from itself": lambda: backend.recv(tensor, seat.rank),
        "recv of a strided tensor": lambda: backend.recv(seat.tensor(torch.ones(4, 4)).t(), other),
        "timeout 0": lambda: backend.barrier(timeout_s=0),
        "timeout -1": lambda: backend.recv(tensor, other, timeout_s=-1),
        "timeout inf": lambda: backend.all_reduce(tensor, timeout_s=float("inf")),
        "timeout nan": lambda: backend.all_reduce(tensor, timeout_s=float("nan")),
    }.items():
        seat.refused("misuse", what, call, CommError, within_s=0)
    with seat.held("misuse"):
        backend.all_reduce(tensor)
        seat.expect("misuse", tensor, torch.full_like(tensor, size), "all_reduce after misuse")


def mismatches(seat: Seat) -> None:
    """Rank 0 gives something else than the others."""
    seat.seen.add("mismatch")
    if not seat.task.kind.detects_mismatch:
        return
    is_odd, size = seat.rank == 0, seat.world_size
    four, five = seat.tensor(torch.ones(4)), seat.tensor(torch.ones(5))
    whole = seat.tensor(torch.ones(4), torch.int32)
    mine, output = (four, (size, 4)) if is_odd else (five, (size, 5))
    for number, (what, call) in enumerate({
        "all_reduce of other shapes": lambda backend: backend.all_reduce(mine.clone()),
        "all_reduce of other dtypes": lambda backend: backend.all_reduce((four if is_odd else whole).clone()),
        "all_gather of other shapes": lambda backend: backend.all_gather(seat.tensor(torch.ones(output)), mine),
        "broadcast of other shapes": lambda backend: backend.broadcast(mine.clone(), 0),
    }.items()):  # fmt: skip
        with seat.held("mismatch"):
            backend = seat.open(f"-{number}")
        seat.refused("mismatch", what, lambda c=call, b=backend: c(b), CommError, within_s=LONG_S)
    with seat.held("mismatch"):
        backend = seat.open("-message")
        if seat.rank > 1:
            return
    if is_odd:
        for each in (five, four):  # too long for who receives it; the second may find the group broken
            try:
                backend.send(each, 1)
            except CommError:
                break
        _waits_in_vain(seat, backend, "mismatch", 1)  # stays until the other rank has failed
        return
    seat.refused("mismatch", "recv of a message of another size", lambda: backend.recv(four, 0), CommError, within_s=LONG_S)


