"""Ranks of these tests are forked from the process that tensor-parallel workers of later tests are forked from."""

import pytest

from sagellm.engines.lmdeploy.worker_processes import load_early


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> None:
    """Python has one a process. Without the libraries in it, each worker of a later test would load them."""
    load_early(keep=True)
