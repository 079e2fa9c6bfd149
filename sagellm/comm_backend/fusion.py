"""Adjacent small reductions as one.

A reduction of a few KiB costs what starting it costs. Those that are started one after the other, alike in type and operation,
are laid side by side in one buffer, a bucket, and reduced together. Source: gradient buckets of PyTorch's
DistributedDataParallel (Li et al., VLDB 2020); group calls of NCCL.
"""

from __future__ import annotations

import threading
import time

import torch

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.core.errors import CommError

__all__ = ["CommFusion"]

SHORTEST_S = 0.001  # for what is started when its deadline is about to pass


class CommFusion(CommBackendProtocol):
    """A backend whose asynchronous `all_reduce`s are gathered into buckets; everything else is as `backend` does it.

    A bucket is started, for all its members,

    - It starts when it holds `max_tensors`, or one more tensor would make it larger than `bucket_bytes`.
    - It starts when a caller asks for a result in it (`wait`, `is_completed`), or an `all_reduce` that waits has joined it.
    - It starts before any other type, operation, collective or message of this group, so that the order of calls stays.
    - `flush` and `close` start it.

    All ranks must come to this at the same place in the order of their calls. They do where they run the same program; where
    one asks for a result before its next `all_reduce` and another one after it, their buckets differ. `memory` and `shm` raise
    a CommError then; `gloo` does not notice (its limit for any shapes that differ).

    Results are those of `backend`, and the same bits on every rank. They are also the bits that it gives without buckets where
    the order of a reduction does not depend on the place in the tensor: `memory` and `shm`, two ranks of `gloo`, and anywhere
    whole numbers, minima and maxima. Sums of floats over three ranks of `gloo` and more may differ in the last bits.

    The deadline of a bucket is the earliest of its members', each counted from its call. A failure is raised by every member.
    A tensor larger than `bucket_bytes`, or alone in its bucket, is reduced where it is.

    Operations start when a result is asked for. So call `flush` before waiting for another group, or for another rank in
    a way that this group does not see.

    `close` leaves `backend` open: it belongs to who made it.

    Raises:
        CommError: a limit that makes no sense.
    """

    name = "fusion"

    def __init__(self, backend: CommBackendProtocol, bucket_bytes: int = 256 << 10, max_tensors: int = 64) -> None:
        if bucket_bytes < 1 or max_tensors < 1:
            raise CommError(f"bucket_bytes is {bucket_bytes}, max_tensors {max_tensors}; give both above 0.")
        self.backend = backend
        self.bucket_bytes, self.max_tensors = bucket_bytes, max_tensors
        self.name = f"fusion of {backend.name}"  # type: ignore[misc]
        self.device_types = backend.device_types  # type: ignore[misc]
        self.detects_mismatch = backend.detects_mismatch  # type: ignore[misc]
        self.config, self.rank, self.world_size = backend.config, backend.rank, backend.world_size
        self._is_closed, self._takes_cpu = False, "cpu" in backend.device_types
        self.num_started = self.num_reduced = 0  # reductions of the backend, and tensors that were reduced
        self._lock = threading.RLock()
        self._open_bucket: _Bucket | None = None
        self._spare: list[torch.Tensor] = []  # buffers of buckets that have ended: new memory costs a fault a page

    def flush(self) -> None:
        """Start what waits in the bucket; all ranks at the same place in the order of their calls."""
        with self._lock:
            if self._open_bucket is not None:
                self._start_bucket(self._open_bucket, async_op=True)

    # ---- what the contract asks for

    def _open(self) -> None:
        """Nothing: the backend has met the others."""

    def _start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Work:
        with self._lock:
            self.num_reduced += 1
            bucket = self._open_bucket
            if bucket is not None and not bucket.takes(tensor, op, self.bucket_bytes):
                self._start_bucket(bucket, async_op=True)
                bucket = None
            if bucket is None:
                bucket = self._open_bucket = _Bucket(self, tensor, op)
            member = bucket.add(tensor, timeout_s)
            if len(bucket.tensors) >= self.max_tensors or bucket.num_bytes >= self.bucket_bytes:
                bucket.is_full = True
            return member

    def _done(self, work: Work, async_op: bool) -> Work | None:
        if not isinstance(work, _Member):
            return self.backend._done(work, async_op)
        # Here and not where it was added: of a full bucket whose last member waits nothing needs another thread.
        if async_op and work.bucket.is_full:
            with self._lock:
                self._start_bucket(work.bucket, async_op=True)
        return super()._done(work, async_op)

    def _start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Work:
        self.flush()
        return self.backend._start_all_gather(output, tensor, timeout_s)

    def _start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        self.flush()
        return self.backend._start_broadcast(tensor, src, timeout_s)

    def _start_barrier(self, timeout_s: float) -> Work:
        self.flush()
        return self.backend._start_barrier(timeout_s)

    def _start_send(self, tensor: torch.Tensor, dst: int, timeout_s: float) -> Work:
        self.flush()
        return self.backend._start_send(tensor, dst, timeout_s)

    def _start_recv(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        self.flush()
        return self.backend._start_recv(tensor, src, timeout_s)

    def _close(self) -> None:
        # Another thread may be in the middle of starting a bucket, as long as its deadline: nothing waits for that here.
        if self._lock.acquire(blocking=False):
            try:
                self.flush()
            finally:
                self._lock.release()

    # ---- buckets

    def _start_bucket(self, bucket: _Bucket, async_op: bool) -> None:
        """With the lock held. Errors are reported by the members: the caller may have asked for something else."""
        if bucket is not self._open_bucket:  # it was started meanwhile
            return
        self._open_bucket = None
        self.num_started += 1
        bucket.start(async_op)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            if self._spare:
                return self._spare.pop()
        assert num_bytes <= self.bucket_bytes
        return torch.empty(self.bucket_bytes, dtype=torch.uint8)

    def _give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._spare.append(buffer)


class _Bucket:
    """Tensors that are reduced together. Once started, its own lock guards its end."""

    def __init__(self, fusion: CommFusion, first: torch.Tensor, op: ReduceOp) -> None:
        self._fusion, self._op = fusion, op
        self._kind = (first.dtype, first.device)
        self.tensors: list[torch.Tensor] = []
        self.num_bytes = 0
        self.is_full = False
        self._deadline = float("inf")
        self._ending = threading.RLock()
        self._work: Work | None = None
        self._buffer: torch.Tensor | None = None
        self._flat: torch.Tensor | None = None
        self._failure: CommError | None = None
        self._has_ended = False

    def takes(self, tensor: torch.Tensor, op: ReduceOp, limit: int) -> bool:
        is_alike = (tensor.dtype, tensor.device) == self._kind and op is self._op
        return is_alike and not self.is_full and self.num_bytes + tensor.nbytes <= limit

    def add(self, tensor: torch.Tensor, timeout_s: float) -> _Member:
        self.tensors.append(tensor)
        self.num_bytes += tensor.nbytes
        self._deadline = min(self._deadline, time.monotonic() + timeout_s)
        return _Member(self)

    def start(self, async_op: bool) -> None:
        timeout_s = max(self._deadline - time.monotonic(), SHORTEST_S)
        with self._ending:
            try:
                self._work = self._fusion.backend.all_reduce(self._joined(), self._op, timeout_s=timeout_s, async_op=async_op)
            except CommError as error:
                self._end(error)
            else:
                if self._work is None:
                    self._end(None)

    def is_completed(self) -> bool:
        if self._has_ended:
            return True
        self._ask(async_op=True)
        with self._ending:
            if not self._has_ended and self._work is not None and self._work.is_completed():
                self.wait()
            return self._has_ended

    def wait(self) -> None:
        """Until it has ended; the members say how."""
        if self._has_ended:
            return
        self._ask(async_op=False)
        with self._ending:
            if not self._has_ended:
                assert self._work is not None
                try:
                    self._work.wait()
                except CommError as error:
                    self._end(error)
                else:
                    self._end(None)

    def check(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _ask(self, async_op: bool) -> None:
        if self._work is None and not self._has_ended:
            with self._fusion._lock:
                self._fusion._start_bucket(self, async_op)

    def _joined(self) -> torch.Tensor:
        if len(self.tensors) == 1:
            return self.tensors[0]
        dtype, device = self._kind
        rows = [tensor.view(-1) for tensor in self.tensors]
        if device.type != "cpu":
            self._flat = torch.cat(rows)
            return self._flat
        with torch.inference_mode(False):  # or it could not be written outside of that mode
            self._buffer = self._fusion._buffer(self.num_bytes)
            self._flat = self._buffer[: self.num_bytes].view(dtype)
        with torch.inference_mode():  # as the members may have been made in it
            torch.cat(rows, out=self._flat)
        return self._flat

    @torch.inference_mode()  # as the members may have been made in it, which can be written in no other
    def _end(self, failure: CommError | None) -> None:
        self._failure = failure
        if failure is None and self._flat is not None:
            parts = self._flat.split([tensor.numel() for tensor in self.tensors])
            for tensor, part in zip(self.tensors, parts, strict=True):
                tensor.view(-1).copy_(part)
        if failure is None and self._buffer is not None:  # after a failure somebody may still write into it
            self._fusion._give_back(self._buffer)
        self.tensors, self._work, self._buffer, self._flat = [], None, None, None
        self._has_ended = True


class _Member(Work):
    """One tensor of a bucket."""

    __slots__ = ("bucket",)

    def __init__(self, bucket: _Bucket) -> None:
        self.bucket = bucket

    def is_completed(self) -> bool:
        return self.bucket.is_completed()

    def wait(self) -> None:
        self.bucket.wait()
        self.bucket.check()
