"""Process groups of torch.distributed: gloo for tensors in memory, NCCL for those on GPUs.

A group is the backend's own, on a store of its own, and never the default group of the process, which belongs to the engine.
"""

import threading
from abc import abstractmethod
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BarrierOptions, BroadcastOptions

from sagellm.comm_backend.base import CommBackendProtocol, ReduceOp, Work
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.rendezvous import is_local, open_store
from sagellm.core.errors import CommError, CommPeerError, CommTimeoutError

__all__ = ["GlooBackend", "NcclBackend", "TorchGroupBackend"]

OPS = {op: getattr(dist.ReduceOp, op.name) for op in ReduceOp}
TAG, BREAK_TAG = 0x5A6E, 0x5A6F  # other users of a group that was given have tags of their own
SHORTEST_S = 0.001  # torch counts in milliseconds, and takes 0 for no limit
POLL_S = 0.0002
# Messages of gloo to the other waits of a rank when the time of one has passed, and how long the cause may take to be known.
CONSEQUENCE, CAUSE_S = "Application timeout caused pair closure", 1.0
# A rank whose deadline has passed closes its connections, so that others see an end of the connection.
TIMED_OUT = ("timed out", "timeout", "deadline")
GONE = ("connection closed", "connection reset", "read error", "write error", "broken pipe", "connection refused", "remote")


class _TorchWork(Work):
    """An operation of a group, which `start` begins, or `run` does and waits for.

    One of a message ends for torch only when somebody waits: who asks whether it has ended starts a thread.
    """

    __slots__ = ("_arguments", "_backend", "_call", "_failure", "_is_collective", "_started", "_timeout_s", "_waiter", "_work")

    def __init__(
        self, backend: "TorchGroupBackend", is_collective: bool, timeout_s: float, call: Any, arguments: tuple[Any, ...]
    ) -> None:
        self._backend, self._call, self._arguments = backend, call, arguments
        self._timeout_s, self._is_collective = timeout_s, is_collective
        self._work: Any = None
        self._failure: CommError | None = None
        self._waiter: threading.Thread | None = None

    def run(self) -> None:
        """Begin it and wait for it. Nothing stands between the two: a thread of gloo that finds the caller still busy wakes
        on another core, which takes longer than a small operation does."""
        limit = self._backend._as_limit(self._timeout_s)
        try:
            self._call(*self._arguments).wait(limit)
        except RuntimeError as error:
            raise self._backend._failed(error, self._timeout_s) from error

    def start(self) -> None:
        try:
            self._work = self._call(*self._arguments)
        except RuntimeError as error:
            raise self._backend._failed(error, self._timeout_s) from error
        self._started = monotonic()

    def is_completed(self) -> bool:
        if self._work is None:
            return True
        if self._is_collective:  # messages: see above
            return self._work.is_completed() or monotonic() - self._started >= self._timeout_s
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._finish, name="comm-wait", daemon=True)
            self._waiter.start()
        return False

    def wait(self) -> None:
        if self._waiter is not None:
            self._waiter.join()
        if self._work is not None:
            self._finish()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _finish(self) -> None:
        left_s = self._timeout_s - (monotonic() - self._started)
        try:
            self._work.wait(timedelta(seconds=max(left_s, SHORTEST_S)))
        except RuntimeError as error:
            self._failure = self._backend._failed(error, self._timeout_s)
        self._work = None


class _NcclWork(_TorchWork):
    __slots__ = ()

    def run(self) -> None:
        self.start()
        self.wait()

    def _finish(self) -> None:
        # NCCL's own `wait` makes a stream wait, not the host.
        try:
            while not self._work.is_completed():
                if monotonic() - self._started >= self._timeout_s:
                    raise RuntimeError("timed out")
                sleep(POLL_S)
            if (error := self._work.exception()) is not None:
                raise RuntimeError(str(error))
            self._work.synchronize()
        except RuntimeError as error:
            self._failure = self._backend._failed(error, self._timeout_s)
        self._work = None


class TorchGroupBackend(CommBackendProtocol):
    """A rank of a process group. A subclass says how its group is made, and how it is broken."""

    options: ClassVar[tuple[str, ...]] = ()
    _work_kind: ClassVar[type[_TorchWork]] = _TorchWork
    reducible: ClassVar[frozenset[torch.dtype]]  # the dtypes it knows; others travel as bytes, and are not reduced
    _given: Any = None

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, timeout_s: float = 30.0) -> "TorchGroupBackend":
        """Over a group that there is, which others may use too: `close` leaves it as it is.

        Raises CommError: it has no backend of this name for tensors of this kind.
        """
        made = cls.__new__(cls)
        made._given = group
        config = dict(backend=cls.name, rank=group.rank(), world_size=group.size(), rendezvous="file:///given")
        made.__init__(CommConfig(**config, timeout_s=timeout_s))  # type: ignore[misc]
        return made

    @property
    def torch_group(self) -> Any:
        """The backend of torch.distributed underneath. Its operations come in between ours; those of a message need tags of
        their own."""
        return self._group

    @abstractmethod
    def _make_group(self, store: dist.Store, timeout: timedelta) -> Any:
        """The group, once all ranks have come. A RuntimeError stands for a CommError."""

    def _break_group(self) -> None:
        """Wake waiting callers, here and on other ranks."""

    def _open(self) -> None:
        self._failure: CommError | None = None
        self._failing = threading.Condition()
        self._default_limit = timedelta(seconds=self.config.timeout_s)
        self._usual_options: dict[tuple[Any, Any], Any] = {}
        if unknown := sorted(set(self.config.options) - set(self.options)):
            raise CommError(f"options {unknown}; {self.name} has {list(self.options) or 'none'}.")
        if self._given is not None:
            self._group = self._backend_of(self._given)
            return
        self._store = open_store(self.config)
        try:
            self._group = self._make_group(self._store, self._default_limit)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            if any(word in first.lower() for word in TIMED_OUT):
                said = f"not all {self.world_size} ranks came to {self.config.rendezvous} within {self.config.timeout_s:g} s"
                raise CommTimeoutError(f"{said} ({first}).") from error
            raise CommError(f"{self.name} cannot make a group at {self.config.rendezvous}: {first}") from error

    def _backend_of(self, group: dist.ProcessGroup) -> Any:
        try:
            backend = group._get_backend(torch.device(self.device_types[0]))
        except RuntimeError as error:
            raise CommError(f"the group has no {self.name} for {self.device_types[0]} ({error}); give one that has.") from None
        if backend.name() != self.name:
            raise CommError(f"the group uses {backend.name()} for {self.device_types[0]}, not {self.name}.")
        return backend

    def _start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Work:
        if tensor.dtype not in self.reducible:
            raise CommError(f"{self.name} cannot reduce {tensor.dtype}; give {_names(self.reducible)}.")
        options = self._options(AllreduceOptions, timeout_s, "reduceOp", OPS[op])
        return self._operation(True, timeout_s, self._group.allreduce, [tensor], options)

    def _start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Work:
        rows, row = self._plain(output).view(-1), self._plain(tensor).view(-1)
        options = self._options(AllgatherOptions, timeout_s)
        return self._operation(True, timeout_s, self._group._allgather_base, rows, row, options)

    def _start_broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        options = self._options(BroadcastOptions, timeout_s, "rootRank", src)
        return self._operation(True, timeout_s, self._group.broadcast, [self._plain(tensor)], options)

    def _start_barrier(self, timeout_s: float) -> Work:
        return self._operation(True, timeout_s, self._group.barrier, self._options(BarrierOptions, timeout_s))

    def _start_send(self, tensor: torch.Tensor, dst: int, timeout_s: float) -> Work:
        return self._operation(False, timeout_s, self._group.send, [tensor], dst, TAG)

    def _start_recv(self, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
        return self._operation(False, timeout_s, self._group.recv, [tensor], src, TAG)

    def _done(self, work: Work, async_op: bool) -> Work | None:
        """The contract's calls begin here what `_start_...` made."""
        assert isinstance(work, _TorchWork)
        if async_op:
            work.start()
            return work
        work.run()
        return None

    def _close(self) -> None:
        with self._failing:
            if self._failure is None:
                self._failure = CommError(f"this group of {self.name} was closed.")
        if self._given is None:
            self._break_group()
        self._group = self._store = None

    def _operation(self, is_collective: bool, timeout_s: float, call: Any, *arguments: Any) -> _TorchWork:
        if self._failure is not None:
            raise self._first_failure()
        return self._work_kind(self, is_collective, timeout_s, call, arguments)

    def _options(self, kind: Any, timeout_s: float, field: str = "", value: Any = None) -> Any:
        """Torch's options of a collective; with them it takes the first of its overloads. The usual ones are kept."""
        is_usual = timeout_s == self.config.timeout_s
        if is_usual and (kept := self._usual_options.get((kind, value))) is not None:
            return kept
        options = kind()
        options.timeout = self._as_limit(timeout_s)
        if field:
            setattr(options, field, value)
        if is_usual:
            self._usual_options[kind, value] = options
        return options

    def _as_limit(self, timeout_s: float) -> timedelta:
        if timeout_s == self.config.timeout_s:
            return self._default_limit
        return timedelta(seconds=max(timeout_s, SHORTEST_S))

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype in self.reducible else tensor.view(-1).view(torch.uint8)

    def _failed(self, error: RuntimeError | None, timeout_s: float) -> CommError:
        """Return the error that broke the group first, which may be this one."""
        with self._failing:
            if CONSEQUENCE in str(error):  # the wait whose time has passed is about to say so
                self._failing.wait_for(lambda: self._failure is not None, CAUSE_S)
            if is_first := self._failure is None:
                self._failure = _failure_of(error, timeout_s)
                self._failing.notify_all()
        if is_first and self._given is None:
            self._break_group()
        return self._first_failure()

    def _first_failure(self) -> CommError:
        assert self._failure is not None
        return type(self._failure)(*self._failure.args)


class GlooBackend(TorchGroupBackend):
    """Tensors in memory, over TCP.

    The loopback interface is used where the rendezvous says that all ranks are on one host. Options: `interface`, the network
    interface (by default that of the host's name where it does not say so).
    """

    name = "gloo"
    options = ("interface",)
    reducible = frozenset(
        {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64}
    )

    # The following are short cuts past the contract's checks, for calls that pass them all and are waited for. A rank that has
    # just waited finds its caches cold: each function on the way to gloo then takes a microsecond, not a tenth of one.

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """See the contract."""
        if op is not ReduceOp.SUM or async_op or timeout_s is not None or not self._is_usual(tensor):
            return super().all_reduce(tensor, op, timeout_s=timeout_s, async_op=async_op)
        try:
            self._group.allreduce([tensor], self._usual_sum).wait(self._default_limit)
        except RuntimeError as error:
            raise self._failed(error, self.config.timeout_s) from error
        return None

    def send(
        self, tensor: torch.Tensor, dst: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """See the contract."""
        if async_op or timeout_s is not None or type(dst) is not int or dst not in self._peers or not self._is_usual(tensor):
            return super().send(tensor, dst, timeout_s=timeout_s, async_op=async_op)
        try:
            self._group.send([tensor], dst, TAG).wait(self._default_limit)
        except RuntimeError as error:
            raise self._failed(error, self.config.timeout_s) from error
        return None

    def recv(
        self, tensor: torch.Tensor, src: int, *, timeout_s: float | None = None, async_op: bool = False
    ) -> Work | None:
        """See the contract."""
        if async_op or timeout_s is not None or type(src) is not int or src not in self._peers or not self._is_usual(tensor):
            return super().recv(tensor, src, timeout_s=timeout_s, async_op=async_op)
        try:
            self._group.recv([tensor], src, TAG).wait(self._default_limit)
        except RuntimeError as error:
            raise self._failed(error, self.config.timeout_s) from error
        return None

    def _is_usual(self, tensor: Any) -> bool:
        return (
            type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in self.reducible and tensor.is_contiguous()
            and self._failure is None
        )  # fmt: skip

    # ----

    def _open(self) -> None:
        super()._open()
        self._peers = frozenset(range(self.world_size)) - {self.rank}
        self._usual_sum = self._options(AllreduceOptions, self.config.timeout_s, "reduceOp", OPS[ReduceOp.SUM])

    def _make_group(self, store: dist.Store, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        kind = dist.ProcessGroupGloo
        if interface := self.config.options.get("interface"):
            options._devices = [kind.create_device(interface=interface)]
        else:
            is_here = is_local(self.config)
            options._devices = [kind.create_device(hostname="127.0.0.1") if is_here else kind.create_default_device()]
        return kind(store, self.rank, self.world_size, options)

    def _break_group(self) -> None:
        # Gloo's `abort` wakes no caller. A receive whose time has passed closes every connection of the group.
        if self.world_size > 1:
            with suppress(RuntimeError):
                nothing = self._group.recv([torch.empty(1)], (self.rank + 1) % self.world_size, BREAK_TAG)
                nothing.wait(timedelta(seconds=SHORTEST_S))


class NcclBackend(TorchGroupBackend):
    """Tensors on GPUs of NVIDIA, one a rank: its current device.

    Work that has ended has ended for the host, which waits; no stream has to. Never run on a GPU so far.
    """

    name = "nccl"
    device_types = ("cuda",)
    reducible = GlooBackend.reducible
    _work_kind = _NcclWork

    @classmethod
    def missing(cls) -> str:
        if not dist.is_nccl_available():
            return f"nccl needs a build of torch for CUDA, and torch {torch.__version__} has no NCCL; use gloo."
        if not torch.cuda.is_available():
            return "nccl needs an NVIDIA GPU, and torch finds none; use gloo."
        return ""

    def _make_group(self, store: dist.Store, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 4 * timeout  # torch's watchdog ends the process; the deadlines here come first
        group = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return group

    def _break_group(self) -> None:
        self._group.abort()


def _failure_of(error: RuntimeError | None, timeout_s: float) -> CommError:
    lines = str(error).splitlines() or [""]
    first = lines[0].partition(". This is typically caused")[0]
    if any(word in first.lower() for word in TIMED_OUT):
        return CommTimeoutError(f"not done within {timeout_s:g} s: {first}.")
    if any(word in first.lower() for word in GONE):
        return CommPeerError(f"another rank has gone, or has closed the group: {first}.")
    return CommError(f"torch.distributed: {first}")


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
