"""Processes of one host over memory that they share.

Messages go through a ring for each pair of ranks, copied out while they are copied in; tensors that `empty` made are copied
once, by the receiver, from where they lie. The memory has no name: nothing is left of it when the processes have ended.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sagellm._core import ShmExchange, ShmGroup
from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.comm_backend.shm_collectives import REDUCTIONS, Collectives, describe
from sagellm.comm_backend.shm_lanes import Lane, Operation, Rest
from sagellm.comm_backend.shm_rendezvous import find_segment
from sagellm.core.errors import CommError

__all__ = ["ShmBackend", "ShmOptions"]


class ShmOptions(BaseModel):
    """Sizes of the shared memory, the same on all ranks; untouched pages cost nothing.

    Attributes:
        ring_bytes: of the ring for each ordered pair of ranks; rounded up to a power of two.
        staging_bytes: of each rank's place for chunks of collectives; there are two.
        heap_bytes: of each rank's heap for `empty`.
        chunk_bytes: of a message that are copied before they are published.
        delay_us: what each exchange of a native step takes at least, to try what a slower link does.
        spin_us: how long to look again before the kernel is asked to wait; 0 where ranks outnumber the processors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ring_bytes: int = Field(default=1 << 20, ge=4096, le=1 << 30)
    staging_bytes: int = Field(default=1 << 20, ge=4096, le=1 << 30)
    heap_bytes: int = Field(default=256 << 20, ge=4096, le=1 << 40)
    chunk_bytes: int = Field(default=128 << 10, ge=256)
    spin_us: float = Field(default=50.0, ge=0, le=10_000)
    delay_us: float = Field(default=0.0, ge=0, le=1_000_000)


class ShmBackend(CommBackendProtocol):
    """Ranks are processes of one user on one host (Linux 5.3 or newer) that see each other's process ids.

    A failure is seen by all ranks, with its cause; a process that was killed within about 50 ms by those that wait for it.
    """

    name = "shm"
    detects_mismatch = True

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See the contract."""
        _options_of(options)

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor [*shape] in this rank's shared heap, from where others copy it once. It may outlive the group.

        Raises:
            CommError: the heap has no such place free.
        """
        self._check()
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._group.allocate(num_bytes)).view(dtype).view(shape)

    def exchange(self, bounds_ns: Sequence[int]) -> ShmExchange:
        """Return the sums and gatherings of native steps over this group.

        Args:
            bounds_ns: upper bounds of the latencies that it counts apart, rising.
        """
        self._check()
        return ShmExchange(self._group, self.config.timeout_s, list(bounds_ns), round(1000 * self._delay_us))

    # A message that is waited for and has no other before it needs no `Work`: making one takes as long as a small message.

    def send(
        self, tensor: torch.Tensor, dst: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """See the contract."""
        self._check(tensor)
        self._check_rank(dst, is_peer=True)
        limit, lane = self._limit(timeout_s), self._sends[dst]
        if async_op or not lane.enter():
            return self._done(self._start_send(tensor, dst, limit), async_op)
        try:
            deadline = time.monotonic() + limit
            label = describe(tensor.dtype, tensor.shape)
            position = self._group.post(dst, tensor.data_ptr(), tensor.nbytes, label, deadline)
            if position:
                self._group.wait_read(dst, position, deadline)
        except CommError:
            raise
        except BaseException as error:
            lane.break_off(error)
            raise
        finally:
            lane.leave()
        return None

    def recv(
        self, tensor: torch.Tensor, src: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """See the contract."""
        self._check(tensor)
        self._check_rank(src, is_peer=True)
        limit, lane = self._limit(timeout_s), self._recvs[src]
        if async_op or not lane.enter():
            return self._done(self._start_recv(tensor, src, limit), async_op)
        try:
            label = describe(tensor.dtype, tensor.shape)
            self._group.recv(src, tensor.data_ptr(), tensor.nbytes, label, time.monotonic() + limit)
        except CommError:
            raise
        except BaseException as error:
            lane.break_off(error)
            raise
        finally:
            lane.leave()
        return None

    # ----

    def _open(self) -> None:
        if not sys.platform.startswith("linux"):
            raise CommError(f"shm needs Linux, this is {sys.platform}; take gloo.")
        options = _options_of(self.config.options)
        self._delay_us = options.delay_us
        deadline = time.monotonic() + self.config.timeout_s
        spin_s = options.spin_us * 1e-6 if self.world_size <= len(os.sched_getaffinity(0)) else 0.0
        with find_segment(self.config, options.model_dump(include={"ring_bytes", "staging_bytes", "heap_bytes"})) as found:
            self._group = ShmGroup(found.segment, self.rank, options.chunk_bytes, spin_s)
            try:
                if found.complaint:
                    self._group.fail(found.complaint)
                self._group.join(deadline)
            except BaseException:
                self._group.close()
                raise
        self._collectives = Collectives(self._group, self.rank, self.world_size)
        self._meetings = Lane("shm-collectives", self._group.fail)
        self._sends = [Lane(f"shm-to-{rank}", self._group.fail) for rank in range(self.world_size)]
        self._recvs = [Lane(f"shm-from-{rank}", self._group.fail) for rank in range(self.world_size)]
        # Also if it is not closed: when it is forgotten, and before the interpreter ends.
        self._leave = weakref.finalize(self, _leave, self._group, [self._meetings, *self._sends, *self._recvs])

    def _start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Work:
        nothing = torch.empty(0, dtype=tensor.dtype)
        try:
            REDUCTIONS[op](nothing, nothing)
        except RuntimeError as error:
            raise CommError(f"{op} of {tensor.dtype} cannot be had: {error}; convert the tensor.") from None
        label = f"all_reduce {op} {describe(tensor.dtype, tensor.shape)}"
        return self._meeting(partial(self._collectives.all_reduce, tensor, op, label), timeout_s)

    def _start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Work:
        label = f"all_gather {describe(tensor.dtype, tensor.shape)}"
        return self._meeting(partial(self._collectives.all_gather, output, tensor, label), timeout_s)

    def _start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        label = f"broadcast from {src} {describe(tensor.dtype, tensor.shape)}"
        return self._meeting(partial(self._collectives.broadcast, tensor, src, label), timeout_s)

    def _start_barrier(self, timeout_s: float) -> Work:
        return self._meeting(partial(self._group.meet, "barrier"), timeout_s)

    def _start_send(self, tensor: torch.Tensor, dst: int, timeout_s: float) -> Work:
        operation = self._message(self._sends[dst], partial(_send, self._group, dst), tensor, timeout_s)
        operation.is_quick = self._group.can_post_at_once(dst, tensor.data_ptr(), tensor.nbytes)
        return operation

    def _start_recv(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        return self._message(self._recvs[src], partial(self._group.recv, src), tensor, timeout_s)

    def _message(self, lane: Lane, call: Callable[..., None], tensor: torch.Tensor, timeout_s: float) -> Operation:
        deadline = time.monotonic() + timeout_s
        call = partial(call, tensor.data_ptr(), tensor.nbytes, describe(tensor.dtype, tensor.shape), deadline)
        return Operation(lane, call, tensor)

    def _meeting(self, call: Callable[..., None], timeout_s: float) -> Operation:
        return Operation(self._meetings, partial(call, time.monotonic() + timeout_s))

    def _done(self, work: Work, async_op: bool) -> Work | None:
        """The contract's calls start here what `_start_...` made: on its lane's thread, or by waiting in this one."""
        assert isinstance(work, Operation)
        if async_op:
            work.start()
        return super()._done(work, async_op)

    def _close(self) -> None:
        self._leave()


def _options_of(given: Mapping[str, Any]) -> ShmOptions:
    try:
        return ShmOptions(**given)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise CommError(f"options of shm: {what}; known are {', '.join(ShmOptions.model_fields)}.") from None


def _send(group: ShmGroup, dst: int, data: int, num_bytes: int, label: str, deadline: float) -> Rest:
    position = group.post(dst, data, num_bytes, label, deadline)
    return partial(group.wait_read, dst, position, deadline) if position else None


def _leave(group: ShmGroup, lanes: list[Lane]) -> None:
    group.close()
    for lane in lanes:
        lane.close()
