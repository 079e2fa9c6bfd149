"""Engines with two workers, of which no process may be left."""

import psutil
import pytest

from benchmarks.processes import command_line
from sagellm.engines.lmdeploy import worker_processes
from sagellm.engines.lmdeploy.workers import failure_of
from tests.engines.lmdeploy.worker_helpers import children
from tests.pool import settle


@pytest.fixture
def two_workers(start_engine):
    """`two_workers(*plugins, **config)`; afterwards the workers must be gone."""
    worker_processes.load_early(keep=True)
    before = children()
    engines = []

    def start(*plugins, **config):
        engine = start_engine(*plugins, tensor_parallel=2, **config)
        engines.append(engine)
        assert len(children() - before) >= 2
        return engine

    yield start
    for engine in engines:
        if not engine._loop.is_closed():
            if not failure_of(engine.engine.executor):
                settle(engine)
            engine.close()
    left = [psutil.Process(pid) for pid in children() - before if psutil.pid_exists(pid)]
    left = [process for process in left if "resource_tracker" not in command_line(process)]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert alive == []
