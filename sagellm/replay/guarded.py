"""Keeps the faults of a policy that is not ours apart from our own: each becomes a PolicyError that says whose it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext


class Guarded(EvictionPolicy):
    """The policy that `build` makes, with the same answers.

    Raises:
        PolicyError: wherever the policy raises anything, `SystemExit` and endless recursion included, or answers a question
            with something that is no `EvictionDecision`.
    """

    def __init__(self, name: str, capacity: int, build: Callable[[int], EvictionPolicy]) -> None:
        super().__init__(capacity)
        self.name = name  # type: ignore[misc]  # each instance stands for another class
        with blamed(name, "__init__"):
            self._policy = build(capacity)

    def on_request(self, index: int) -> None:
        """Passed on to a policy that wants to know."""
        tell = getattr(self._policy, "on_request", None)
        if tell is not None:
            with blamed(self.name, "on_request"):
                tell(index)

    def on_insert(self, block: CachedBlock) -> None:
        with blamed(self.name, "on_insert"):
            self._policy.on_insert(block)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        with blamed(self.name, "on_hit"):
            self._policy.on_hit(key, time_s)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        with blamed(self.name, "on_remove"):
            self._policy.on_remove(key, evicted)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        with blamed(self.name, "select_victims"):
            decision: Any = self._policy.select_victims(context)
            if not isinstance(decision, EvictionDecision):
                raise PolicyError(
                    f"policy {self.name} answers select_victims with a {type(decision).__name__}; "
                    "it must return an EvictionDecision, such as context.decision()."
                )
            return decision._replace(victims=tuple(map(int, decision.victims)))


@contextmanager
def blamed(name: str, method: str) -> Iterator[None]:
    """Raises PolicyError for what is raised inside, but for a PolicyError itself and Ctrl-C."""
    try:
        yield
    except (PolicyError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a policy of others may raise anything, and may want to end the process
        raise PolicyError(f"policy {name} raised {type(error).__name__} in {method}: {error}") from error
