"""Collectives of a worker process, seen by the plug-ins that ask for them, and counted.

Exposed is the time in which a collective kept its caller's thread: inside the call, and inside `wait`. The time between two
looks at `is_completed` is the caller's own. On a GPU a collective is enqueued and the host goes on: the time that the host is
kept says nothing of the device's.

With `comm_backend` the sums and gatherings of all workers' tensors are done by a backend of `sagellm.comm_backend`. A native
step does its own by `native_exchange` then, without Python, and counts them itself.
"""

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from sagellm import _core
from sagellm.comm_backend.overlap_window import OverlapWindow
from sagellm.comm_backend.shm import ShmBackend
from sagellm.core.collectives import GROUP, CommDecision, CommOp, CommRule
from sagellm.core.config import HookConfig
from sagellm.core.host import PluginHost
from sagellm.engines.lmdeploy.comm_choice import ARGUMENTS, AUTO, CommChoice, join
from sagellm.engines.lmdeploy.comm_stats import BOUNDS_NS, CommStats

REPORT_INTERVAL_S = 0.2

Ended = Callable[[int | None], None]  # given the time of the end, on the clock of `time.monotonic_ns`, where it is known


def attach(spec: str, dist_ctx: Any) -> "CommObserver | None":
    """The observer of this process, or None where there is nothing to do: one rank, or no plug-in, record and backend."""
    rank, world_size = dist_ctx.rank, dist_ctx.dist_config.world_size
    if world_size == 1:
        return None
    config = HookConfig.model_validate_json(spec)
    joined = join(config.comm_backend, config.comm_device, rank, world_size, config.comm_options)
    host, cpu_group = PluginHost(config), dist_ctx.attn_tp_group.cpu_group
    choice = CommChoice(host, rank, world_size, joined, config.comm_backend == AUTO, cpu_group)
    observer = CommObserver(host, rank, world_size, choice)
    return observer if observer.is_needed else None


class CommObserver:
    """Runs a collective between the `comm_begin` and `comm_end` of every plug-in that has them.

    Args:
        choice: what does each one; None: the process group does all.
    """

    def __init__(self, host: PluginHost, rank: int, world_size: int, choice: CommChoice | None = None) -> None:
        self._host = host
        self._choice = choice or CommChoice(host, rank, world_size)
        self._backend = self._choice.backend
        self._forced = ""  # backend that a native step has chosen
        self.num_changes = 0  # of rules
        self._exchange: _core.ShmExchange | None = None
        self._rank = rank
        self._world_size = world_size
        self.stats = CommStats()
        self._num_faults = 0
        # Ends that were noticed where no plug-in may be called: in a thread of the library's, or while a handle is deleted.
        self._unseen: deque[Callable[[], None]] = deque()
        self._has_news = threading.Event()
        self._is_closed = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="sagellm-comm-report", daemon=True)
        self._writing = threading.Lock()
        if host.config.run_dir is not None:
            self._write_report()  # the engine process reads what backends there are
            self._reporter.start()

    @property
    def is_needed(self) -> bool:
        asked = self._host.config.comm_metrics or self._host.recorder.enabled or self._choice.has_choice
        return asked or self._host.listens("comm_begin") or self._host.listens("comm_end")

    def follow(self, rules: Iterable[CommRule]) -> None:
        """A step begins from which on collectives of these sorts are done so. All ranks come here between the same two."""
        self.num_changes += 1
        self._choice.follow(rules)

    @property
    def window(self) -> OverlapWindow:
        """The decisions whether native steps are computed in halves."""
        return self._choice.window

    def of_layers(self, num_bytes: int, num_layers: int, phase: str) -> list[CommDecision]:
        """Return how the sums of each layer of a native step are done."""
        return self._choice.of_layers(num_bytes, num_layers, phase)

    def of_logits(self, num_bytes: int, phase: str) -> CommDecision:
        """Return how the logits of a native step are gathered. `num_bytes`: of a worker's part."""
        return self._choice.of("all_gather", num_bytes, "float32", None, phase)

    def native_exchange(self, backend: str) -> _core.ShmExchange | None:
        """Return what exchanges the numbers of native steps by a backend, without Python.

        None where the backend has none, or somebody looks at each collective.
        """
        listens = self._host.listens("comm_begin") or self._host.listens("comm_end") or self._host.recorder.enabled
        if backend != ShmBackend.name or not isinstance(self._backend, ShmBackend) or listens:
            return None
        if self._exchange is None:
            self._exchange = self._backend.exchange(BOUNDS_NS)
        return self._exchange

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Let a backend do the collectives inside, whatever is decided about their sort."""
        self._forced = backend
        try:
            yield
        finally:
            self._forced = ""

    def run(self, name: str, function: Any, args: tuple, kwargs: dict) -> Any:
        self._tell_unseen()
        values = (*args, *kwargs.values())
        tensor = _first_tensor(values)
        op = CommOp(
            name=name,
            num_bytes=0 if tensor is None else tensor.numel() * tensor.element_size(),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            rank=self._rank,
            world_size=self._world_size,
            async_op=bool(kwargs.get("async_op")) or name in ("isend", "irecv"),
        )
        tokens = {
            plugin_name: self._host.call_one(plugin_name, "comm_begin", plugin.comm_begin, op)
            for plugin_name, plugin in self._host.listeners("comm_begin")
        }
        whole_bytes, num_ranks = _whole_bytes(values), _group_size(values) or self._world_size
        start_ns, backend = time.monotonic_ns(), GROUP

        def end(end_ns: int | None) -> None:
            latency_ns = None if end_ns is None else end_ns - start_ns
            self.stats.add(self._rank, name, whole_bytes, num_ranks, latency_ns)
            self._end(op, tokens, latency_ns, backend)

        result = None
        try:
            own = self._backends_call(op, args, kwargs)
            if own is None:
                result = function(*args, **kwargs)
            else:
                backend = self._backend.name
                result = own()
        finally:
            end_ns = time.monotonic_ns()
            self.stats.expose(self._rank, name, end_ns - start_ns)
            is_pending = hasattr(result, "wait")  # `async_op` may be given by position, and `recv` returns a number
            if not is_pending:  # also where it has failed
                end(end_ns)
        if not is_pending:
            return result
        return _WatchedWork(result, lambda waited_ns: self.stats.expose(self._rank, name, waited_ns), end, self._unseen)

    def _backends_call(self, op: CommOp, args: tuple, kwargs: dict) -> Callable[[], object] | None:
        """Return the backend's call in place of a collective of all ranks; None if it has none."""
        names = ARGUMENTS.get(op.name)
        if names is None or not self._choice.has_choice:
            return None
        given = dict(zip(names, args, strict=False)) | kwargs
        group = given.get("group")
        if not (group is None or group.size() == self._world_size):
            return None
        tensor = given["tensor"]
        device = tensor.device.type
        chosen = self._forced or self._choice.of(op.name, op.num_bytes, op.dtype, device=device).backend
        is_async = bool(given.get("async_op"))
        if chosen == GROUP or (is_async and not self._forced):  # others may ask for the handle's future
            return None
        if not tensor.is_contiguous() or device not in self._backend.device_types:
            return None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():  # a backend waits for its end, a graph must not
            return None
        if op.name == "all_reduce":
            is_sum = given.get("op", torch.distributed.ReduceOp.SUM) == torch.distributed.ReduceOp.SUM
            return partial(self._backend.all_reduce, tensor, async_op=is_async) if is_sum else None
        if op.name == "broadcast":
            return partial(self._backend.broadcast, tensor, given["src"])
        return partial(self._gather, given["tensor_list"], tensor)

    def _gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        parts = tensor.new_empty(self._world_size, *tensor.shape)
        self._backend.all_gather(parts, tensor)
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)

    def _end(self, op: CommOp, tokens: dict[str, Any], latency_ns: int | None, backend: str) -> None:
        for name, plugin in self._host.listeners("comm_end"):
            self._host.call_one(name, "comm_end", plugin.comm_end, op, tokens.get(name))
        if self._host.recorder.enabled:
            self._host.recorder.write(
                "comm", op=op.name, bytes=op.num_bytes, rank=op.rank, world_size=op.world_size, duration_ns=latency_ns,
                backend=backend,
            )  # fmt: skip
        self._has_news.set()
        if len(self._host.faults) != self._num_faults:
            self._num_faults = len(self._host.faults)
            self._write_report()

    def _tell_unseen(self) -> None:
        while self._unseen:
            try:
                end = self._unseen.popleft()
            except IndexError:  # the other thread that tells has taken it
                return
            end()

    def _report(self) -> None:
        """Leave the counts where the engine process finds them; it has no other way to see into a worker."""
        while not self._is_closed.wait(REPORT_INTERVAL_S):
            self._tell_unseen()
            if self._has_news.is_set() or self._count_exchanges():
                self._has_news.clear()
                self._write_report()

    def _count_exchanges(self) -> bool:
        """Count what the native steps have exchanged. True if there is something new."""
        if self._exchange is None:
            return False
        costs = {"all_reduce": self._exchange.sums(), "all_gather": self._exchange.gatherings()}
        return any([self.stats.set_exchanged(self._rank, name, self._world_size, each) for name, each in costs.items()])

    def _write_report(self) -> None:
        if self._host.config.run_dir is None:
            return
        file = self._host.config.run_dir / f"rank{self._rank}.json"
        draft = file.with_suffix(".tmp")
        # The lock keeps an older report from taking the place of a newer one. The folder goes when the server has ended.
        with self._writing, contextlib.suppress(FileNotFoundError):
            report = {
                "comm": self.stats.report(), "comm_choice": self._choice.report(),
                "comm_backends": {name: self._choice.backends(name, self._host.config.comm_device) for name in ARGUMENTS},
            }  # fmt: skip
            draft.write_text(json.dumps(self._host.report() | report))
            os.replace(draft, file)

    def close(self) -> None:
        self._is_closed.set()
        if self._reporter.is_alive():
            self._reporter.join()
        self._tell_unseen()
        if self._backend is not None:
            self._backend.close()
        self._host.close()
        self._count_exchanges()
        self._write_report()


class _WatchedWork:
    """The handle of an asynchronous collective. Its end is seen once: by `wait`, `is_completed` or the future, what is first.

    The end of a handle that is dropped without any of these is unknown; the operation counts, its time does not.
    """

    def __init__(self, work: Any, expose: Callable[[int], None], end: Ended, unseen: deque[Callable[[], None]]) -> None:
        self._work = work
        self._expose = expose
        self._ends = [end]  # taken by the first thread: `pop` of a list is one step for all threads
        self._unseen = unseen
        self._has_future = False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        start_ns = time.monotonic_ns()
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            end_ns = time.monotonic_ns()
            self._expose(end_ns - start_ns)
            self._end(end_ns)

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed:
            self._end(time.monotonic_ns())
        return is_completed

    def get_future(self) -> Any:
        """The library's own, which others may hand on to it; it tells of its end itself."""
        future = self._work.get_future()
        if not self._has_future:
            self._has_future = True
            ends, unseen = self._ends, self._unseen

            def told(_: Any) -> None:
                _put_off(ends, unseen, time.monotonic_ns())

            future.add_done_callback(told)
        return future

    def _end(self, end_ns: int) -> None:
        with contextlib.suppress(IndexError):
            self._ends.pop()(end_ns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        if not self._has_future:
            _put_off(self._ends, self._unseen, None)


def _put_off(ends: list[Ended], unseen: deque[Callable[[], None]], end_ns: int | None) -> None:
    with contextlib.suppress(IndexError):
        end = ends.pop()
        unseen.append(lambda: end(end_ns))


def _first_tensor(values: tuple) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_tensor(tuple(value))
            if found is not None:
                return found
    return None


def _whole_bytes(values: tuple) -> int:
    """Return the bytes of all ranks together: the largest tensor given, so the whole and not a part."""
    return max((_num_bytes(value) for value in values), default=0)


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_num_bytes(each) for each in value) if isinstance(value, (list, tuple)) else 0


def _group_size(values: tuple) -> int | None:
    for value in values:
        if isinstance(value, torch.distributed.ProcessGroup):
            return value.size()
    return None
