"""The contract of communication backends: collectives and messages among the ranks of a group.

A rank is a process, or a thread for the backend in memory. All ranks start the same collectives in the same order; messages
from one rank to another arrive in the order in which they were sent. Tensors are torch's, contiguous, on a device of the
backend, and alike on every rank. A failure breaks the group: a passed deadline, a lost rank. From then on
every call raises the first cause, at once, on every rank that knows of it; nothing hangs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from sagellm.comm_backend.config import CommConfig
from sagellm.core.enums import StrEnum
from sagellm.core.errors import CommError

__all__ = ["CommBackendProtocol", "ReduceOp", "Work"]


class ReduceOp(StrEnum):
    """How the values of the ranks become one."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


class Work(ABC):
    """An operation that was started. Its tensors belong to the backend until `wait` has returned."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether it has ended, well or badly; `wait` then returns at once."""

    @abstractmethod
    def wait(self) -> None:
        """Until it has ended, which its deadline bounds. Called again, it answers the same again.

        Raises:
            CommTimeoutError: the deadline has passed.
            CommPeerError: a rank that takes part has gone.
            CommError: it failed otherwise, or the group was closed or broken before.
        """


class CommBackendProtocol(ABC):
    """A group, seen by one rank of it. Made by all ranks at the same time; the constructor returns when all are there.

    Calls may come from any thread, one at a time. Each takes `timeout_s` (by default that of the configuration) and
    `async_op`: with it a `Work` is returned, without it the call waits, and returns None.

    A subclass defines `_open`, which meets the other ranks, the `_start_...` methods, which are given what was checked, and
    `_close`.

    Raises:
        CommTimeoutError: not all ranks came.
        CommError: the backend cannot work here; bad options.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]] = ("file", "tcp")  # of a rendezvous; ("memory",): ranks are threads of one process
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    detects_mismatch: ClassVar[bool] = False  # ranks whose shapes or dtypes differ get a CommError, not garbage

    def __init__(self, config: CommConfig) -> None:
        if config.rendezvous.partition("://")[0] not in self.schemes:
            allowed = " or ".join(f"{scheme}://" for scheme in self.schemes)
            raise CommError(f"{self.name} cannot meet at {config.rendezvous}; give {allowed}.")
        if missing := self.missing():
            raise CommError(missing)
        self.config = config
        self.rank, self.world_size = config.rank, config.world_size
        self._is_closed, self._takes_cpu = False, "cpu" in self.device_types
        self._open()

    @classmethod
    def missing(cls) -> str:
        """Return what it needs and does not find here; empty if it can work."""
        return ""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise CommError for options that the backend does not take, as far as it can tell before ranks meet."""
        return

    # ---- collectives

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """In place: `tensor` [any] becomes the reduction of those of all ranks, the same bits on each."""
        self._check(tensor)
        if type(op) is not ReduceOp:
            op = self._op(op)
        return self._done(self._start_all_reduce(tensor, op, self._limit(timeout_s)), async_op)

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """`output` [world_size, *shape] gets the `tensor` [*shape] of each rank."""
        self._check(output, tensor)
        if output.shape != (self.world_size, *tensor.shape) or output.dtype != tensor.dtype:
            raise CommError(
                f"all_gather of {tuple(tensor.shape)} {tensor.dtype} into {tuple(output.shape)} {output.dtype}; give an output "
                f"of shape {(self.world_size, *tensor.shape)} and the same dtype."
            )
        return self._done(self._start_all_gather(output, tensor, self._limit(timeout_s)), async_op)

    def broadcast(
        self, tensor: torch.Tensor, src: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """`tensor` [any] becomes that of rank `src`."""
        self._check(tensor)
        self._check_rank(src)
        return self._done(self._start_broadcast(tensor, src, self._limit(timeout_s)), async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Until every rank has called it."""
        self._check()
        self._done(self._start_barrier(self._limit(timeout_s)), async_op=False)

    # ---- messages

    def send(
        self, tensor: torch.Tensor, dst: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Ends when `tensor` [any] may be written again, which need not mean that it has arrived."""
        self._check(tensor)
        self._check_rank(dst, is_peer=True)
        return self._done(self._start_send(tensor, dst, self._limit(timeout_s)), async_op)

    def recv(
        self, tensor: torch.Tensor, src: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """`tensor` [any] becomes the next message of rank `src`, which has as many bytes."""
        self._check(tensor)
        self._check_rank(src, is_peer=True)
        return self._done(self._start_recv(tensor, src, self._limit(timeout_s)), async_op)

    # ----

    def close(self) -> None:
        """Leave the group. Operations in which others wait for this rank fail there. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._close()

    def __enter__(self) -> "CommBackendProtocol":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- what a backend defines

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Work: ...

    @abstractmethod
    def _start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Work: ...

    @abstractmethod
    def _start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work: ...

    @abstractmethod
    def _start_barrier(self, timeout_s: float) -> Work: ...

    @abstractmethod
    def _start_send(self, tensor: torch.Tensor, dst: int, timeout_s: float) -> Work: ...

    @abstractmethod
    def _start_recv(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work: ...

    @abstractmethod
    def _close(self) -> None: ...

    # ---- checks

    def _done(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    def _op(self, op: object) -> ReduceOp:
        try:
            return ReduceOp(op)
        except ValueError:
            raise CommError(f"op is {op!r}; give {', '.join(ReduceOp)}.") from None

    def _limit(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.config.timeout_s
        if not 0 < timeout_s < float("inf"):
            raise CommError(f"timeout_s is {timeout_s!r}; give seconds above 0.")
        return float(timeout_s)

    def _check(self, *tensors: torch.Tensor) -> None:
        if self._is_closed:
            raise CommError(f"this group of {self.name} is closed; make a new one.")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise CommError(f"got {type(tensor).__name__}; give a torch.Tensor.")
            if not (tensor.is_cpu and self._takes_cpu) and tensor.device.type not in self.device_types:  # the first is quick
                allowed = " or ".join(self.device_types)
                raise CommError(f"a tensor on {tensor.device}; {self.name} takes tensors on {allowed}.")
            if not tensor.is_contiguous():
                raise CommError(f"a tensor of strides {tensor.stride()}; give a contiguous one.")

    def _check_rank(self, rank: int, is_peer: bool = False) -> None:
        if not (isinstance(rank, int) and 0 <= rank < self.world_size) or (is_peer and rank == self.rank):
            others: Sequence[int] = [each for each in range(self.world_size) if not (is_peer and each == self.rank)]
            raise CommError(f"rank {rank!r} of a group of {self.world_size}; give one of {list(others)}.")
