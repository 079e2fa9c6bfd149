"""Ranks that are threads of one process: the plain twin by which others are judged.

A message is a copy in a list; a collective is computed by whichever rank comes last, for all of them, in the order of ranks.
"""

import threading
import time
from collections import deque
from typing import ClassVar

import torch

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError

__all__ = ["MemoryBackend"]

REDUCE = {
    ReduceOp.SUM: torch.add, ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum,
}  # fmt: skip


class MemoryBackend(CommBackendProtocol):
    """Ranks that are threads of this process.

    A thread that ends without `close` is not noticed: others wait for their deadlines.
    """

    name = "memory"
    schemes = ("memory",)
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    detects_mismatch = True

    def _open(self) -> None:
        if self.config.options:
            raise CommError(f"options {sorted(self.config.options)}; memory has none.")
        self._group = _meet(self.config.rendezvous, self.rank, self.world_size, self.config.timeout_s)

    def _start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Work:
        return self._join(f"all_reduce {op}", [tensor], tensor, timeout_s)

    def _start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Work:
        return self._join("all_gather", [tensor, output], tensor, timeout_s)

    def _start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        return self._join(f"broadcast from {src}", [tensor], tensor, timeout_s)

    def _start_barrier(self, timeout_s: float) -> Work:
        return self._join("barrier", [], None, timeout_s)

    def _start_send(self, tensor: torch.Tensor, dst: int, timeout_s: float) -> Work:
        group = self._group
        with group.changed:
            work = _Part(group, f"send to {dst}", {dst}, timeout_s)
            group.check(work)
            group.sent[self.rank, dst].append(tensor.clone())
            work.is_done = True
            group.deliver(self.rank, dst)
            return work

    def _start_recv(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        group = self._group
        with group.changed:
            work = _Part(group, f"recv from {src}", {src}, timeout_s, [tensor])
            group.check()
            group.wanted[src, self.rank].append(work)
            group.deliver(src, self.rank)
            group.check(work)
            return work

    def _close(self) -> None:
        self._group.leave(self.rank)

    def _join(self, what: str, tensors: list[torch.Tensor], like: torch.Tensor | None, timeout_s: float) -> Work:
        group = self._group
        shape = "" if like is None else f" of {tuple(like.shape)} {like.dtype}"
        with group.changed:
            work = _Part(group, what + shape, set(range(self.world_size)) - {self.rank}, timeout_s, tensors)
            group.check()
            group.join(self.rank, work)
            group.check(work)
            return work


class _Part(Work):
    """Part of one rank in an operation. `peers`: the ranks whose part has yet to come."""

    def __init__(
        self, group: "_Group", what: str, peers: set[int], timeout_s: float, tensors: list[torch.Tensor] | None = None
    ) -> None:
        self.what, self.peers, self.tensors = what, peers, tensors or []
        self.is_done = False
        self._group, self._timeout_s, self._deadline = group, timeout_s, time.monotonic() + timeout_s
        self._failure: CommError | None = None

    def is_completed(self) -> bool:
        with self._group.changed:
            return self.is_done or self._failed() is not None

    def wait(self) -> None:
        with self._group.changed:
            while not self.is_done and self._failed() is None:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    self._group.break_with(CommTimeoutError(f"{self.what}: not done within {self._timeout_s:g} s."))
                else:
                    self._group.changed.wait(left_s)
            if not self.is_done:
                raise _again(self._failed())

    def fail(self, failure: CommError) -> None:
        if self._failed() is None:
            self._failure = failure

    def _failed(self) -> CommError | None:
        if self._failure is None:
            self._failure = self._group.failure
        return self._failure


class _Group:
    """State shared by the ranks. `changed` guards all of it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.present: set[int] = set()
        self.left: set[int] = set()
        self.failure: CommError | None = None
        pairs = [(src, dst) for src in range(world_size) for dst in range(world_size)]
        self.sent: dict[tuple[int, int], deque[torch.Tensor]] = {pair: deque() for pair in pairs}
        self.wanted: dict[tuple[int, int], deque[_Part]] = {pair: deque() for pair in pairs}
        self._rounds: deque[dict[int, _Part]] = deque()  # collectives that not all ranks have joined, oldest first

    def check(self, work: _Part | None = None) -> None:
        """Raises the cause that broke the group, which is broken too if this operation needs a rank that has left."""
        if work is not None and not work.is_done and (gone := work.peers & self.left):
            self.break_with(CommPeerError(f"{work.what}: rank {min(gone)} has closed the group."))
        if self.failure is not None and not (work is not None and work.is_done):
            raise _again(self.failure)

    def break_with(self, failure: CommError) -> None:
        if self.failure is None:
            self.failure = failure
            self.changed.notify_all()

    @torch.no_grad()
    def deliver(self, src: int, dst: int) -> None:
        sent, wanted = self.sent[src, dst], self.wanted[src, dst]
        while sent and wanted:
            message, work = sent.popleft(), wanted.popleft()
            (tensor,) = work.tensors
            if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
                is_to = f"is to be {tuple(tensor.shape)} {tensor.dtype}"
                self.break_with(CommError(f"{work.what}: {tuple(message.shape)} {message.dtype} came, which {is_to}."))
                return
            tensor.copy_(message)
            work.is_done = True
        self.changed.notify_all()

    def join(self, rank: int, work: _Part) -> None:
        """The oldest collective that this rank has not joined is this one."""
        mine = next((each for each in self._rounds if rank not in each), None)
        if mine is None:
            self._rounds.append(mine := {})
        for other in mine.values():
            other.peers.discard(rank)
        work.peers -= mine.keys()
        mine[rank] = work
        whats = {each.what: number for number, each in mine.items()}
        if len(whats) > 1:
            said = "; ".join(f"rank {number}: {what}" for what, number in whats.items())
            self.break_with(CommError(f"the ranks do not agree ({said}); call the same, alike, on each."))
        elif len(mine) == self.world_size:
            self._rounds.popleft()
            try:
                _compute([mine[each] for each in range(self.world_size)])
            except RuntimeError as error:  # a dtype that torch cannot reduce
                self.break_with(CommError(f"{work.what}: {error}"))
                return
            for each in mine.values():
                each.is_done = True
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            for other in range(self.world_size):
                for work in self.wanted[other, rank]:
                    work.fail(CommError(f"{work.what}: this rank closed the group meanwhile."))
                self.wanted[other, rank].clear()
            for each in self._rounds:
                if rank in each:
                    each[rank].fail(CommError(f"{each[rank].what}: this rank closed the group meanwhile."))
            waiting = [work for queue in self.wanted.values() for work in queue if rank in work.peers]
            waiting += [work for each in self._rounds for work in each.values()]  # none can be completed without it
            for work in waiting:
                self.break_with(CommPeerError(f"{work.what}: rank {rank} has closed the group."))
            self.changed.notify_all()


@torch.no_grad()
def _compute(parts: list[_Part]) -> None:
    """A collective that every rank has joined; `parts` by rank."""
    name, *words = parts[0].what.split()
    tensors = [part.tensors[0] for part in parts if part.tensors]
    if name == "all_reduce":
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = REDUCE[ReduceOp(words[0])](total, tensor)
        for tensor in tensors:
            tensor.copy_(total)
    elif name == "all_gather":
        for part in parts:
            for row, tensor in zip(part.tensors[1], tensors, strict=True):
                row.copy_(tensor)
    elif name == "broadcast":
        source = tensors[int(words[1])].clone()
        for tensor in tensors:
            tensor.copy_(source)


def _again(failure: CommError) -> CommError:
    """An exception of its own for each thread that raises it."""
    return type(failure)(*failure.args)


_OPENING: dict[str, _Group] = {}  # groups that not all ranks have joined, by rendezvous
_OPENING_LOCK = threading.Lock()


def _meet(rendezvous: str, rank: int, world_size: int, timeout_s: float) -> _Group:
    """The group of that name, once all ranks have come; the name is free again then, or when one has waited too long."""
    with _OPENING_LOCK:
        group = _OPENING.setdefault(rendezvous, _Group(world_size))
        if group.world_size != world_size or rank in group.present:
            said = f"rank {rank} of {world_size}"
            raise CommError(f"{rendezvous} has ranks {sorted(group.present)} of {group.world_size}; {said} cannot join.")
        group.present.add(rank)
        is_last = len(group.present) == world_size
        if is_last:
            del _OPENING[rendezvous]
    with group.changed:
        if is_last:
            group.changed.notify_all()
            group.check()
            return group
        if group.changed.wait_for(lambda: len(group.present) == world_size or group.failure is not None, timeout_s):
            if len(group.present) < world_size:
                group.check()
            return group  # what others have broken since is told by the first call
        missing = sorted(set(range(world_size)) - group.present)
        group.break_with(CommTimeoutError(f"{rendezvous}: ranks {missing} did not come within {timeout_s:g} s."))
    with _OPENING_LOCK:
        if _OPENING.get(rendezvous) is group:
            del _OPENING[rendezvous]
    raise _again(group.failure)
