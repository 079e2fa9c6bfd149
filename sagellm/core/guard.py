"""Calls into plug-ins that cannot take the engine down: bounded in time, switched off at the first fault."""

import logging
import threading
import traceback
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


class Switched(Exception):  # noqa: N818 - a signal between our own frames, not an error for users
    """The plug-in is off; the caller goes on with the engine's own default."""


class PluginGuard:
    """Runs one plug-in's hooks on a thread of its own and waits at most `time_limit_s` for each.

    A call inline could not be interrupted while it sleeps; on its own thread it can be left behind. The hand-over costs
    some tens of microseconds a call.
    """

    def __init__(self, name: str, time_limit_s: float, on_fault: Callable[[PluginFault], None]) -> None:
        self.name = name
        self.fault: PluginFault | None = None
        self._time_limit_s = time_limit_s
        self._on_fault = on_fault
        # Held while the plug-in works on the engine's state through its handle; an overrun waits for it, so that the
        # engine never goes on in the middle of such a change.
        self.engine_access = threading.Lock()
        self._calls: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"sagellm-plugin-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self.fault is None

    @property
    def is_calling(self) -> bool:
        """True on the plug-in's thread while the engine waits for it: the only time it may use its engine handle."""
        return self.healthy and threading.get_ident() == self._thread.ident

    def call(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Result of `function(*args)`.

        Raises:
            Switched: the plug-in was off already, or this call switched it off.
        """
        if self.fault is not None:
            raise Switched
        if threading.get_ident() == self._thread.ident:  # a hook caused by this plug-in's own request
            return function(*args)
        done = threading.Lock()
        done.acquire()
        box: list[Any] = []
        self._calls.put((function, args, box, done))
        if not done.acquire(timeout=self._time_limit_s):
            with self.engine_access:
                self.switch_off(hook, "overran", f"no answer within {self._time_limit_s:g} s")
            raise Switched
        error = box[1]
        if error is not None:
            detail = "".join(traceback.format_exception(error)).rstrip()
            self.switch_off(hook, "raised", detail)
            raise Switched
        return box[0]

    def switch_off(self, hook: str, kind: str, detail: str) -> None:
        """Record the first fault, report it once, and never call the plug-in again."""
        if self.fault is not None:
            return
        self.fault = PluginFault(self.name, hook, kind, detail)
        logger.error(
            "plug-in %s is switched off: %s in %s. The engine goes on with its own default.\n%s",
            self.name, kind, hook, detail,
        )  # fmt: skip
        self._on_fault(self.fault)

    def stop(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, args, box, done = call
            try:
                box[:] = function(*args), None
            except BaseException as error:  # a plug-in may raise anything, SystemExit too
                box[:] = None, error
            done.release()
            del call, function, args, box
