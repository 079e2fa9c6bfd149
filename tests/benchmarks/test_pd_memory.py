"""Memory of engines over the requests that they have answered."""

import subprocess
import sys

import psutil
import pytest

from benchmarks.pd import memory
from benchmarks.pd.memory import EngineMemory, Growth
from benchmarks.processes import wait_until


def test_growth_is_that_after_the_warm_up_of_each_process():
    engines = EngineMemory(warm_up=10)
    for number, level in enumerate((1e9, 3e9)):
        for requests in range(0, 60, 5):
            touched = min(requests, 10) * 1e7  # pools fill at the start
            engines.note((number, 0.0), requests, level + touched + 3000 * requests)
    engines.note((0, 1.0), 10, 5e9)  # another process of the same number, seen once
    assert engines.growth() == Growth(pytest.approx(3000), 90)
    assert EngineMemory(10).growth() == Growth(0, 0)


def test_a_process_is_looked_at_with_those_below_it(monkeypatch):
    """And one that has ended is left out, as is one that does not answer yet."""
    below = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"
    process = subprocess.Popen([sys.executable, "-c", below, "--port", "1"])
    try:
        server = psutil.Process(process.pid)
        wait_until("its child", server.children)
        pages = [{memory.ANSWERED[0]: 1.0, memory.ANSWERED[1]: 1.0}, {memory.ANSWERED[0]: 4.0}]
        monkeypatch.setattr(memory, "metrics_of", lambda url: pages.pop(0))
        engines = EngineMemory(warm_up=2)
        engines.look([server])
        engines.look([server])
        assert engines.growth().num_requests == 2
        ((_, seen),) = engines._lives.items()
        assert all(num_bytes > memory.private_bytes(server) for _, num_bytes in seen)
    finally:
        for each in [*psutil.Process(process.pid).children(), process]:
            each.kill()
        process.wait()
    monkeypatch.undo()
    engines.look([server])
    assert engines.growth().num_requests == 2
