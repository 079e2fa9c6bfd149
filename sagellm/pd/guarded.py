"""The guard that keeps a faulty routing plug-in from losing requests."""

import logging
from collections.abc import Sequence
from typing import Any

from sagellm.core.errors import SageError

__all__ = ["GuardedRouting"]

logger = logging.getLogger("sagellm.pd")


class GuardedRouting:
    """Asks a plug-in, checks its answer, and goes on with the default where it is at fault.

    A subclass says what the default is, checks answers, and has a last resort that needs no plug-in.

    Attributes:
        num_faults: of the plug-in that was given.
    """

    what = "routing policy"
    default: type

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.num_faults = 0

    def check(self, answer: Any, request: Any, engines: Sequence[Any]) -> None:
        """Raises SageError: the answer is not allowed."""
        raise NotImplementedError

    def ask(self, request: Any, engines: Sequence[Any]) -> Any:
        return self.policy.choose(request, engines)

    def last_resort(self, engines: Sequence[Any], error: Exception) -> Any:
        raise NotImplementedError

    def choose(self, request: Any, engines: Sequence[Any]) -> Any:
        try:
            answer = self.ask(request, engines)
            self.check(answer, request, engines)
            return answer
        except Exception as error:
            if type(self.policy) is self.default:  # ours: a fault of it is no reason to lose the request either
                logger.exception("%s %s failed", self.what, self.policy.name)
                return self.last_resort(engines, error)
            self.num_faults += 1
            is_words = isinstance(error, SageError)
            logger.error(
                "%s %s is switched off, %s decides from now on: %s", self.what, self.policy.name, self.default.name, error,
                exc_info=None if is_words else error,
            )  # fmt: skip
            self.policy = self.default()
            return self.choose(request, engines)
