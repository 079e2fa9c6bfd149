"""One server on the demo model for all tests of this folder; it ends with them, since one that is idle still uses a core a
little."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.serve.harness import KEY, ServerProcess


@pytest.fixture(scope="package")
def demo_model() -> None:
    """The demo model lies in the cache; building it takes longer than a server may take to start."""
    subprocess.run([sys.executable, "-m", "sagellm.demo_model"], check=True)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: None) -> Iterator[ServerProcess]:
    """Without `--model`, so on the demo model, in float32."""
    process = ServerProcess(tmp_path_factory.mktemp("server"), "--api-key", KEY, "--device", "cpu")
    try:
        yield process.ready()
        process.end()
    finally:
        process.kill()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client
