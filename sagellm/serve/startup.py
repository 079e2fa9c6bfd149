"""Mends a race in LMDeploy's start of its engine process."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class _Lasting:
    """Stands for a started manager in a `with` block, whose end does not end it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return self._manager

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def lasting_managers() -> Iterator[Callable[[], None]]:
    """Within the block managers of LMDeploy live until the function that is yielded is called, or the block ends.

    The engine process announces itself through a manager, which LMDeploy ends as soon as it has read the announcement.
    Once in some twenty starts the engine process was then still waiting for the answer to its last call, and died of it.
    """
    import torch.multiprocessing

    managers: list[Any] = []

    def start() -> _Lasting:
        managers.append(multiprocessing.Manager())
        return _Lasting(managers[-1])

    def end() -> None:
        while managers:
            managers.pop().shutdown()

    with mock.patch.object(torch.multiprocessing, "Manager", start):
        try:
            yield end
        finally:
            end()
