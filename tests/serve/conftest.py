"""Servers of their own, on a tiny model; `one_server/` has one for many tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve.group_proxy import GroupProxy
from tests.serve.harness import ServerProcess


@pytest.fixture
def proxy() -> Iterator[Callable[..., GroupProxy]]:
    """`proxy(...)`: a stand-in for the proxy of a prefill/decode group."""
    started: list[GroupProxy] = []

    def start(*arguments: object, **options: object) -> GroupProxy:
        started.append(GroupProxy(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def launch(model_folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """`launch(*options, model="llama", env=None)`: a server that is starting, on a tiny random model."""
    started: list[ServerProcess] = []

    def start(*options: object, model: str | None = "llama", env: dict[str, str] | None = None) -> ServerProcess:
        base = ("--device", "cpu", "--block-size", 16, "--max-batch-size", 4)
        if model is not None:
            base += ("--model", model_folder(model), "--model-name", "tiny")
        started.append(ServerProcess(tmp_path / f"server{len(started)}", *base, *options, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
