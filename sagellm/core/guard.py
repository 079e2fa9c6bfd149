"""Calls into plug-ins that cannot take the engine down: bounded in time, switched off at the first fault."""

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger("sagellm")


@dataclass(frozen=True, slots=True)
class PluginFault:
    """Why a plug-in was switched off. `kind`: raised, overran or nonsense."""

    plugin: str
    hook: str
    kind: str
    detail: str


class Switched(Exception):
    """The plug-in is off; the caller goes on with the engine's own default."""


Call = tuple[str, Callable[..., Any], tuple[Any, ...]]  # hook, function, arguments


class _Work:
    """Calls handed to the plug-in's thread together. `hook` and `start_s` tell which one runs, and since when."""

    __slots__ = ("calls", "done", "error", "hook", "result", "start_s")

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.hook = calls[0][0]
        self.start_s = time.monotonic()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


class PluginGuard:
    """Runs one plug-in's hooks on a thread of its own and waits at most `time_limit_s` for each.

    A call inline could not be interrupted while it sleeps; on its own thread it can be left behind. A hand-over wakes two
    threads, some tens of microseconds, so what the plug-in need not hear at once waits for its next call (`post`).

    `calls` counts, by hook, the calls that returned.
    """

    def __init__(self, name: str, time_limit_s: float, on_fault: Callable[[PluginFault], None]) -> None:
        self.name = name
        self.fault: PluginFault | None = None
        self.calls: Counter[str] = Counter()
        self._time_limit_s = time_limit_s
        self._on_fault = on_fault
        # Held while the plug-in works on the engine's state through its handle; an overrun waits for it, so that the
        # engine never goes on in the middle of such a change.
        self.engine_access = threading.Lock()
        self._posted: list[Call] = []
        self._posted_since_s = 0.0
        self._stopped = False
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"sagellm-plugin-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self.fault is None

    @property
    def is_calling(self) -> bool:
        """True on the plug-in's thread while the engine waits for it: the only time it may use its engine handle."""
        return self.healthy and threading.get_ident() == self._thread.ident

    def post(self, hook: str, function: Callable[..., Any], *args: Any) -> None:
        """Have `function(*args)` run before the next call, or with the next `flush`; its result is dropped."""
        if self.fault is None:
            if not self._posted:
                self._posted_since_s = time.monotonic()
            self._posted.append((hook, function, args))

    def flush(self, after_s: float = 0.0) -> None:
        """Run what was posted, if the first of it has waited for `after_s`.

        Raises:
            Switched: one of the posted calls switched the plug-in off.
        """
        if self._posted and time.monotonic() - self._posted_since_s >= after_s:
            hook, function, args = self._posted.pop()
            self.call(hook, function, *args)

    def call(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Result of `function(*args)`, run after what was posted.

        Raises:
            Switched: the plug-in was off or stopped already, or this call or a posted one switched it off.
        """
        if self.fault is not None or self._stopped:
            raise Switched
        if threading.get_ident() == self._thread.ident:  # a hook caused by this plug-in's own request
            result = function(*args)
            self.calls[hook] += 1
            return result
        work = _Work([*self._posted, (hook, function, args)])
        self._posted.clear()
        self._queue.put(work)
        wait_s = self._time_limit_s
        while not work.done.acquire(timeout=wait_s):
            wait_s = work.start_s + self._time_limit_s - time.monotonic()
            if wait_s <= 0:
                with self.engine_access:
                    self.switch_off(work.hook, "overran", f"no answer within {self._time_limit_s:g} s")
                raise Switched
        if work.error is not None:
            self.switch_off(work.hook, "raised", "".join(traceback.format_exception(work.error)).rstrip())
            raise Switched
        return work.result

    def switch_off(self, hook: str, kind: str, detail: str) -> None:
        """Record the first fault, report it once, and never call the plug-in again."""
        if self.fault is not None:
            return
        self.fault = PluginFault(self.name, hook, kind, detail)
        self._posted.clear()
        logger.error(
            "plug-in %s is switched off: %s in %s. The engine goes on with its own default.\n%s",
            self.name, kind, hook, detail,
        )  # fmt: skip
        self._on_fault(self.fault)

    def stop(self) -> None:
        """End the thread; nothing is called after this."""
        self._stopped = True
        self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            for hook, function, args in work.calls:
                if self.fault is not None:  # left behind in an earlier call of this work
                    break
                work.hook, work.start_s = hook, time.monotonic()
                try:
                    work.result = function(*args)
                except BaseException as error:  # a plug-in may raise anything, SystemExit too
                    work.error = error
                    break
                self.calls[hook] += 1
            work.done.release()
            del work, function, args
