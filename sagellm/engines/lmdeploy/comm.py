"""Collectives of a worker process, seen by the plug-ins that ask for them."""

import contextlib
import json
import os
import threading
import time
from collections import Counter
from typing import Any

import torch

from sagellm.core.config import HookConfig
from sagellm.core.hooks import CommOp
from sagellm.core.host import PluginHost

REPORT_INTERVAL_S = 1.0


def attach(spec: str, dist_ctx: Any) -> "CommObserver | None":
    """The observer of this process, or None where nothing is to be seen: one rank, or no plug-in and no record."""
    world_size = dist_ctx.dist_config.world_size
    if world_size == 1:
        return None
    config = HookConfig.model_validate_json(spec)
    observer = CommObserver(PluginHost(config), dist_ctx.rank, world_size)
    return observer if observer.is_needed else None


class CommObserver:
    """Runs a collective between the `comm_begin` and `comm_end` of every plug-in that has them."""

    def __init__(self, host: PluginHost, rank: int, world_size: int) -> None:
        self._host = host
        self._rank = rank
        self._world_size = world_size
        self._next_report_s = 0.0
        self._num_faults = -1
        self._late: threading.Timer | None = None
        self._exposed_ns: Counter[str] = Counter()  # time in which the caller waited, by operation

    @property
    def is_needed(self) -> bool:
        asked = self._host.config.comm_metrics or self._host.recorder.enabled
        return asked or self._host.listens("comm_begin") or self._host.listens("comm_end")

    def run(self, name: str, function: Any, args: tuple, kwargs: dict) -> Any:
        tensor = _first_tensor((*args, *kwargs.values()))
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
        start_ns = time.monotonic_ns()
        work = function(*args, **kwargs)
        self._exposed_ns[name] += time.monotonic_ns() - start_ns
        if op.async_op and work is not None:
            return _WatchedWork(work, lambda waited_ns: self._end_async(op, tokens, start_ns, waited_ns))
        self._end(op, tokens, start_ns)
        return work

    def _end_async(self, op: CommOp, tokens: dict[str, Any], start_ns: int, waited_ns: int) -> None:
        self._exposed_ns[op.name] += waited_ns
        self._end(op, tokens, start_ns)

    def _end(self, op: CommOp, tokens: dict[str, Any], start_ns: int) -> None:
        duration_ns = time.monotonic_ns() - start_ns
        for name, plugin in self._host.listeners("comm_end"):
            self._host.call_one(name, "comm_end", plugin.comm_end, op, tokens.get(name))
        if self._host.recorder.enabled:
            self._host.recorder.write(
                "comm", op=op.name, bytes=op.num_bytes, rank=op.rank, world_size=op.world_size, duration_ns=duration_ns
            )
        self._report()

    def _report(self) -> None:
        """Leave the counts where the engine process finds them; it has no other way to see into a worker."""
        now = time.monotonic()
        if self._host.config.run_dir is None:
            return
        if now < self._next_report_s and len(self._host.faults) == self._num_faults:
            if self._late is None:  # this may be the last collective for long
                self._late = threading.Timer(REPORT_INTERVAL_S, self._write_report)
                self._late.daemon = True
                self._late.start()
            return
        self._next_report_s, self._num_faults = now + REPORT_INTERVAL_S, len(self._host.faults)
        self._write_report()

    def _write_report(self) -> None:
        self._late = None
        file = self._host.config.run_dir / f"rank{self._rank}.json"
        draft = file.with_suffix(f".{threading.get_ident()}.tmp")
        with contextlib.suppress(FileNotFoundError):  # the server has ended and taken its folder along
            own = {"comm_ns": [[self._rank, name, spent] for name, spent in self._exposed_ns.copy().items()]}
            draft.write_text(json.dumps(self._host.report() | own))
            os.replace(draft, file)

    def close(self) -> None:
        self._host.close()
        if self._host.config.run_dir is not None:
            self._write_report()


class _WatchedWork:
    """The handle of an asynchronous collective; the first `wait` ends the observation."""

    def __init__(self, work: Any, end: Any) -> None:
        self._work = work
        self._end = end

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        start_ns = time.monotonic_ns()
        result = self._work.wait(*args, **kwargs)
        end, self._end = self._end, None
        if end is not None:
            end(time.monotonic_ns() - start_ns)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _first_tensor(values: tuple) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_tensor(tuple(value))
            if found is not None:
                return found
    return None
