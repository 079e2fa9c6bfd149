"""One server on a demo model for all tests of this folder; it ends with them, since one that is idle still uses a core a
little."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from sagellm.demo_model import ensure_demo_model
from tests.serve.harness import KEY, ServerProcess


@pytest.fixture(scope="package")
def demo_model() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[ServerProcess]:
    """In float32."""
    options = ("--model", demo_model, "--api-key", KEY, "--device", "cpu")
    process = ServerProcess(tmp_path_factory.mktemp("server"), *options)
    try:
        yield process.ready()
        process.end()
    finally:
        process.kill()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
