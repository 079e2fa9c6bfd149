"""One server on a demo model for all tests of this folder; it ends with them, since one that is idle still uses a core a
little."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.serve.harness import KEY, ServerProcess

NUM_STEPS = "5"  # of training: what is asked here does not depend on what the model knows, and all of them take minutes


@pytest.fixture(scope="package")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its shape, its tokenizer and real words; `../test_demo_model.py` has the whole one."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    command = [sys.executable, "-m", "sagellm.demo_model", "--steps", NUM_STEPS, "--out", folder]
    subprocess.run(command, check=True)
    return folder


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
