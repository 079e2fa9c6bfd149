"""Mends a race in LMDeploy's start of its engine process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any
from unittest import mock

from sagellm.serve.following import follow_parent


class _Lasting:
    """Stands for a started manager in a `with` block, whose end does not end it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return self._manager

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def lasting_managers(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Within the block managers of LMDeploy live until the function that is yielded is called, or the block ends.

    The engine process announces itself through a manager, which LMDeploy ends as soon as it has read the announcement.
    Once in some twenty starts the engine process was then still waiting for the answer to its last call, and died of it.
    Their sockets lie in `run_dir`: a manager that is killed leaves its folder behind.
    """
    import torch.multiprocessing

    managers: list[Any] = []

    def start() -> _Lasting:
        managers.append(SyncManager(str(run_dir / f"manager{len(managers)}")))
        managers[-1].start(follow_parent)
        return _Lasting(managers[-1])

    def end() -> None:
        while managers:
            managers.pop().shutdown()

    with mock.patch.object(torch.multiprocessing, "Manager", start):
        try:
            yield end
        finally:
            end()
