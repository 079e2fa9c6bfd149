"""The server on a thread of a program that goes on, with LMDeploy's engine in the same process."""

import contextlib
import ctypes
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError, SageError

__all__ = ["EmbeddedServer", "check_embedded"]

logger = logging.getLogger("sagellm")

ONLY = {"engine": "pytorch", "tensor_parallel": 1, "sot_workers": 0, "restart_workers": False}
_taken = threading.Lock()


def check_embedded(config: SageConfig) -> None:
    """Raises ConfigError: a setting of an engine that has processes."""
    if others := [f"{name} {value}" for name in ONLY if (value := getattr(config, name)) != ONLY[name]]:
        raise ConfigError(
            f"{', '.join(others)}: an engine in the manager's process is a PyTorch engine without processes of its own. "
            "Leave this out, or start the engine as a process."
        )


class EmbeddedServer:
    """`sagellm serve` on a thread with an event loop of its own. It listens on a free port of the loopback.

    LMDeploy keeps a server's engine in variables of the process. So a process has one such server at a time.

    Args:
        config: settings that `check_embedded` takes. `host`, `port`, `api_key` and `pd` are not used.

    Attributes:
        life: facts of it once it is ready.
        ready: done when it serves; fails with the SageError that kept it from that.
        over: done with the reason when it is to serve no longer.
        ended: done when engine and port are gone.
    """

    def __init__(self, config: SageConfig) -> None:
        self.config = config
        self.ready: Future[None] = Future()
        self.over: Future[str] = Future()
        self.ended: Future[None] = Future()
        for future in (self.ready, self.over, self.ended):
            future.set_running_or_notify_cancel()  # a caller that is cancelled cancels its own wait alone
        self.life = Life(self.ready, self.over)

    def start(self) -> None:
        """Begin to start it, and return. Raises ConfigError: this process has such a server already."""
        if not _taken.acquire(blocking=False):
            raise ConfigError(
                "this process has an engine already, and LMDeploy allows one. Start the other one as a process, or stop that "
                "one first."
            )
        self._thread = threading.Thread(target=self._run, name="sagellm-embedded", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread is gone: a moment after `ended`."""
        self._thread.join()

    def leave(self, at_once: bool = False) -> None:
        """Begin to end it; answers may end within the drain time, or end at once. From any thread."""
        self.life.leave(at_once)

    def _run(self) -> None:
        refusal: SageError | None = None
        try:
            from sagellm.serve.embedded_launch import serve_here  # on this thread: it loads torch

            serve_here(self.config, self.life)
        except SageError as error:
            refusal = error.with_traceback(None)  # its frames would keep the engine
        except BaseException as error:  # LMDeploy's checks of a model exit
            logger.exception("the engine in this process has failed")
            refusal = EngineError(f"it has failed: {type(error).__name__}: {error}; its log says why.")
        _free_memory(self.life.let_go())
        _taken.release()
        if not self.ready.done():
            self.ready.set_exception(refusal or EngineError("it was stopped while it started."))
        if not self.over.done():
            self.over.set_result(str(refusal or "it was stopped."))
        self.ended.set_result(None)


class Life:
    """Takes the parts of `Loading`, `_Banner` and `EngineWatch`, which are for a process of the server.

    Attributes:
        url, model: address without /v1, and name of the model.
        device: type of the engine's device.
        engine_died: whether the engine has ended by itself.
        reason: why it has; empty before.
    """

    def __init__(self, ready: Future[None], over: Future[str]) -> None:
        self.url = self.model = self.device = self.reason = ""
        self.engine_died = False
        self._ready, self._over, self._is_leaving, self._is_over = ready, over, False, False
        self._server: Any = None
        self._engine: Any = None
        self._callback: Callable[[], None] = lambda: None

    def let_go(self) -> Callable[[], Any]:
        """Keep nothing of the engine and its server. Return what gives the engine as long as others keep it."""
        engine = (lambda: None) if self._engine is None else weakref.ref(self._engine)
        self._server = self._engine = self._callback = None
        return engine

    def take(self, server: Any, engine: Any) -> None:
        """Take LMDeploy's engine and its server, which is about to run."""
        self._server, self._engine = server, engine
        if self._is_leaving:
            server.leave()

    def leave(self, at_once: bool) -> None:
        self._is_leaving = True
        if (server := self._server) is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                server.leave(at_once)

    def done(self) -> None:
        """The engine is built. Signals are the program's."""

    def show(self) -> None:
        """The server serves, and the loop of the engine runs."""
        self._engine.req_manager._loop_task.add_done_callback(self._loop_ended)
        self._ready.set_result(None)

    def on_death(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def report_dead_loop(self) -> None:
        if not (self._is_over or self.engine_died):
            self.engine_died, self.reason = True, "the engine has stopped working; its log says why"
            self._callback()  # before others know and may end it too: answers end with the reason
            self._over.set_result(f"{self.reason}.")

    def stop(self) -> None:
        """From here on the engine may end."""
        self._is_over = True

    def _loop_ended(self, task: Any) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio would log that it was never retrieved
        self.report_dead_loop()


def _free_memory(engine: Callable[[], Any]) -> None:
    """Free the weights and keys and values of an engine that has ended: parts of it refer to each other.

    Args:
        engine: gives LMDeploy's engine as long as it is there.
    """
    gc.collect()
    if engine() is not None and gc.get_freeze_count():  # a manager freezes what is there once its engines serve
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
