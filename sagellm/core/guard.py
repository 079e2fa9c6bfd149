"""Calls into plug-ins that cannot stop the engine: limited in time, and switched off at the first fault."""

import logging
import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger("sagellm")

MAX_POSTED = 10_000  # calls that wait for a slow plug-in; the oldest are dropped
LOOK_AGAIN_S = 0.01


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
    """Calls that the plug-in's thread gets together and runs one by one. `hook` is the one that runs."""

    __slots__ = ("begin_by_s", "calls", "done", "error", "has_begun", "hook", "is_cancelled", "is_done", "is_late", "results")

    def __init__(self, hook: str, calls: Iterable[Call], begin_by_s: float = math.inf) -> None:
        self.hook = hook
        self.calls = calls
        self.begin_by_s = begin_by_s  # for every call but the first
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.has_begun = self.is_done = False
        self.is_late = False  # a call overran, though it has returned since
        self.is_cancelled = False  # its caller has stopped waiting
        self.done = threading.Lock()
        self.done.acquire()


class PluginGuard:
    """Runs one plug-in's hooks on a thread of its own and waits at most `time_limit_s` for each.

    An inline call could not be interrupted; a thread can be abandoned. A hand-over wakes two threads, which takes some tens of
    microseconds, so notices that can wait are posted and travel with the next call (`post`).

    Several threads may call; one thread posts.

    Attributes:
        calls: hook -> number of calls that returned.
        num_lost: posted notices that were dropped because the plug-in was slow.
    """

    def __init__(self, name: str, time_limit_s: float, on_fault: Callable[[PluginFault], None]) -> None:
        self.name = name
        self.fault: PluginFault | None = None
        self.calls: Counter[str] = Counter()
        self.num_lost = 0
        self._time_limit_s = time_limit_s
        self._on_fault = on_fault
        # Held while the plug-in works on the engine's state through its handle; an overrun waits for it, so that the
        # engine never goes on in the middle of such a change.
        self.engine_access = threading.Lock()
        self._posted: deque[Call] = deque()
        self._posted_since_s = 0.0
        self._stopped = False
        self._hold = threading.Lock()  # around what is next
        self._works: deque[_Work] = deque()  # handed over and not known to be done, in order
        self._since_s = 0.0  # when the call before the present one ended, or work came to an idle thread
        self._is_behind = False  # a question was given up before its turn came
        self._has_failed = False  # set by the plug-in's thread, which then calls nothing any more
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"sagellm-plugin-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self.fault is None

    @property
    def is_calling(self) -> bool:
        """Whether this is the plug-in's thread while the engine waits: only then may it use its engine handle."""
        return self.healthy and threading.get_ident() == self._thread.ident

    def post(self, hook: str, function: Callable[..., Any], *args: Any) -> None:
        """Run `function(*args)` before the next call, or with the next `flush` or `hand_over`. Its result is dropped."""
        if self.fault is None:
            if not self._posted:
                self._posted_since_s = time.monotonic()
            elif len(self._posted) >= MAX_POSTED:
                self._posted.popleft()
                self.num_lost += 1
            self._posted.append((hook, function, args))

    def flush(self, after_s: float = 0.0) -> None:
        """Run all posted calls, if the first has waited for `after_s`.

        Raises:
            Switched: a posted call switched the plug-in off.
        """
        if self._posted and time.monotonic() - self._posted_since_s >= after_s:
            hook, function, args = self._posted.pop()
            self.call(hook, function, *args)

    def hand_over(self) -> float:
        """Start all posted calls without waiting for them. They stay posted while the plug-in is busy.

        Returns:
            Seconds after which to call this again: when the present call will have overrun, or earlier if calls stay posted.
            Infinity if there is nothing to wait for.

        Raises:
            Switched: the plug-in is off, or a call has raised or overrun since the last look.
        """
        left_s = self._look()
        if not self._posted or self._stopped:
            return left_s
        if self._works:
            return min(left_s, LOOK_AGAIN_S)
        self._put_posted()
        return self._time_limit_s

    def call(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `function(*args)`, after all posted calls.

        Raises:
            Switched: the plug-in was off or stopped, or this call or a posted one switched it off.
        """
        return self._ask(hook, [(hook, function, args)], math.inf)[0]

    def ask(self, hook: str, function: Callable[[Any], Any], views: Iterable[Any], until_s: float = math.inf) -> list[Any]:
        """Return results of `function(view)` for the views, in one hand-over after all posted calls.

        Every call has the whole time limit. After half of the time until `until_s` no view but the first is begun. At
        `until_s` the question is given up; this is a fault of the plug-in only if a single call overruns.

        Args:
            views: iterated on the plug-in's thread.
            until_s: on the clock of `time.monotonic`.

        Returns:
            The results that there are by `until_s`.

        Raises:
            Switched: see `call`.
        """
        return self._ask(hook, ((hook, function, (view,)) for view in views), until_s)

    def is_behind(self) -> bool:
        """Return whether a question was given up before its turn, and the plug-in has not caught up since.

        Raises:
            Switched: see `hand_over`.
        """
        self._look()
        return self._is_behind

    def _ask(self, hook: str, calls: Iterable[Call], until_s: float) -> list[Any]:
        if self.fault is not None or self._stopped:
            raise Switched
        if threading.get_ident() == self._thread.ident:  # a hook caused by this plug-in's own request
            return [self._counted(*call) for call in calls]
        self._look()
        # Two pieces of work, so that a question can be given up without the notices before it.
        self._put_posted()
        work = self._put(_Work(hook, calls, (until_s + time.monotonic()) / 2))
        while not work.done.acquire(timeout=self._wait_s(until_s)):
            self._look()
            if time.monotonic() >= until_s:
                work.is_cancelled = True
                self._is_behind = not work.has_begun
                return work.results.copy()
        self._look()
        return work.results

    def _wait_s(self, until_s: float) -> float:
        return max(min(self._look(), self._time_limit_s, until_s - time.monotonic()), 0.0)

    def _put(self, work: _Work) -> _Work:
        with self._hold:
            if not self._works:
                self._since_s = time.monotonic()
            self._works.append(work)
            self._queue.put(work)
        return work

    def _put_posted(self) -> None:
        if self._posted:
            calls, self._posted = self._posted, deque()
            self._put(_Work(calls[0][0], calls))

    def _look(self) -> float:
        """Return the seconds that the present call has left, infinity if none runs. Raises Switched after a fault."""
        with self._hold:
            if self.fault is not None:
                raise Switched
            while self._works and self._works[0].is_done:
                work = self._works.popleft()
                if work.is_late:
                    self._overran(work)
                if work.error is not None:
                    self.switch_off(work.hook, "raised", "".join(traceback.format_exception(work.error)).rstrip())
                    raise Switched
            if not self._works:
                self._is_behind = False
                return math.inf
            left_s = self._since_s + self._time_limit_s - time.monotonic()
            if left_s <= 0:
                with self.engine_access:
                    self._overran(self._works[0])
            return left_s

    def _overran(self, work: _Work) -> None:
        self.switch_off(work.hook, "overran", f"no answer within {self._time_limit_s:g} s")
        raise Switched

    def switch_off(self, hook: str, kind: str, detail: str) -> None:
        """Record the first fault, log it once, and never call the plug-in again."""
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
        """End the thread. Nothing is called after this."""
        self._stopped = True
        self._queue.put(None)

    def extend(self, time_limit_s: float) -> None:
        """Raise the time limit of a call to at least `time_limit_s`."""
        self._time_limit_s = max(self._time_limit_s, time_limit_s)

    def join(self, timeout_s: float) -> None:
        """Wait, after `stop`, until the thread has ended."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self._run(work)
            self._since_s = time.monotonic()
            work.is_done = True
            work.done.release()
            del work

    def _run(self, work: _Work) -> None:
        for hook, function, args in work.calls:
            is_too_late = bool(work.results) and time.monotonic() >= work.begin_by_s
            if self.fault is not None or self._has_failed or work.is_cancelled or is_too_late:
                return
            work.hook, work.has_begun = hook, True
            try:
                work.results.append(self._counted(hook, function, args))
            except BaseException as error:  # a plug-in may raise anything, SystemExit too
                # After a question was given up the handle does not work; an error of that is not the plug-in's fault.
                work.error = None if work.is_cancelled else error
            end_s = time.monotonic()
            work.is_late = end_s - self._since_s > self._time_limit_s
            self._since_s = end_s
            self._has_failed = work.is_late or work.error is not None

    def _counted(self, hook: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = function(*args)
        self.calls[hook] += 1
        return result
