"""Grammars of requests, compiled before a request needs them. Else the engine stands still meanwhile, with all its requests."""

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from sagellm.core.errors import EngineError

__all__ = ["Grammars"]

logger = logging.getLogger("sagellm")

NICE = 10  # requests come first


class Grammars:
    """
    Args:
        executor: LMDeploy's. Its compiler keeps what it has compiled.

    Attributes:
        num_compiled: patterns that were compiled ahead.
    """

    def __init__(self, executor: Any) -> None:
        agent = getattr(executor, "model_agent", None)  # of an engine without workers
        self._manager = getattr(agent, "guided_decoding_manager", None)
        self.num_compiled = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def compile_ahead(self, patterns: Sequence[str]) -> None:
        """Compile regular expressions on a thread. A request with one of them waits until that one is compiled.

        Raises:
            EngineError: the engine computes in other processes, or has no compiler for its tokenizer.
        """
        if self._manager is None:
            raise EngineError("grammars are compiled ahead where the engine computes in one process; a request compiles them.")
        self._thread = threading.Thread(target=self._compile, args=(patterns,), name="sagellm-grammars", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Compile nothing further."""
        self._is_closed = True

    def join(self) -> None:
        """Wait until the thread has ended: after `close` that takes as long as the pattern that it compiles."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self, patterns: Sequence[str]) -> None:
        with contextlib.suppress(OSError):  # of this thread, and of those that the compiler starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for pattern in patterns:
            if self._is_closed:
                return
            try:
                self._manager.compiler.compile_regex(pattern)
                self.num_compiled += 1
            except RuntimeError as error:
                logger.warning("pattern %r cannot be compiled: %s", pattern[:60], error)
