"""Processes of servers: readiness, figures, ends, and what they must not leave. The server is a few lines of Python."""

import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.errors import ServerDied
from benchmarks.processes import ServerProcess, free_port, sum_of, wait_until

SERVER = """
import json, os, signal, subprocess, sys, tempfile
from pathlib import Path

how = sys.argv[1]
print("a word on the way", file=sys.stderr, flush=True)
if how == "dies":
    sys.exit("no model fits")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if how == "forgets a file":
    tempfile.mkdtemp(prefix="sagellm-")

def end(*_):
    if how != "forgets a child":
        child.kill()
        child.wait()
    sys.exit(0)

if how != "stays":
    signal.signal(signal.SIGTERM, end)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(json.dumps({"ready": True, "tmp": tempfile.gettempdir()}), flush=True)
while True:
    signal.pause()
"""


class Leaves(ServerProcess):
    own_files = ("sagellm-",)


@pytest.fixture
def start() -> Iterator:
    started = []

    def begin(how: str) -> Leaves:
        started.append(Leaves([sys.executable, "-c", SERVER, how], free_port()))
        return started[-1]

    yield begin
    for server in started:
        server.kill()


def test_from_readiness_to_an_end_in_order(start):
    server = start("obeys")
    assert server.ready() == server.announcement == {"ready": True, "tmp": str(server.tmp)}
    wait_until("its child", lambda: len(server.family()) == 2)
    server.check()
    server.end()
    assert not server.tmp.exists()


def test_it_starts_again_after_a_kill(start):
    server = start("obeys")
    server.ready()
    server.kill()
    server.start()
    assert server.ready()["ready"]


@pytest.mark.parametrize("how", ["forgets a child", "forgets a file"])
def test_what_is_left_is_an_error(how, start, monkeypatch):
    server, wait = start(how), psutil.wait_procs
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: wait(processes, timeout=1))
    server.ready()
    wait_until("its child", lambda: len(server.family()) == 2)
    with pytest.raises(ServerDied, match=r"left something: .*(time\.sleep|sagellm-)"):
        server.end()


def test_another_exit_code_is_an_error(start):
    server = start("obeys")
    server.ready()
    with pytest.raises(ServerDied, match="ended with code -9, not 0: a word on the way"):
        server.end(signal.SIGKILL)


def test_a_server_that_dies_or_is_late_says_its_last_words(start):
    server = start("dies")
    with pytest.raises(ServerDied, match=r"did not become ready: a word on the way \| no model fits"):
        server.ready()
    with pytest.raises(ServerDied, match="ended with code 1"):
        server.check()
    with pytest.raises(ServerDied, match="no answer from /metrics|ended with code 1"):
        server.metrics()


def test_close_takes_the_whole_family_by_force_if_it_must(start, monkeypatch):
    server = start("stays")
    server.ready()
    family = wait_until("its child", lambda: len(server.family()) == 2 and server.family())
    monkeypatch.setattr("benchmarks.processes.wait_until", timed_out)
    server.close()
    assert not psutil.wait_procs(family, timeout=5)[1]


def timed_out(*_: object) -> None:
    raise TimeoutError


def test_ports_differ_and_waiting_ends():
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20 and max(ports) < 32768
    with pytest.raises(TimeoutError, match=r"not within 0\.01 s: nothing"):
        wait_until("nothing", lambda: 0, 0.01)


def test_a_sum_takes_the_samples_with_the_labels():
    samples = {'n{kind="a",side="x"}': 1.0, 'n{kind="b",side="x"}': 2.0, 'n{side="y"}': 4.0, 'n{outside="x"}': 16.0}
    samples["other"] = 8.0
    assert (sum_of(samples, "n"), sum_of(samples, "n", side="x"), sum_of(samples, "n", kind="b", side="x")) == (23.0, 3.0, 2.0)
    assert sum_of(samples, "other") == 8.0
