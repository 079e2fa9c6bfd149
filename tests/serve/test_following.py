"""The engine's process: spawned, it loads libraries without searching them for garbage; or a fork that waits for its task."""

import gc
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from sagellm.core.early import ENGINE_NAME
from sagellm.core.host import ENGINE_PROCESS
from sagellm.serve.following import FollowingProcess, WaitingFork


class AsItArrives:
    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, collected=gc.isenabled())


def tell(arrived, pipe) -> None:
    pipe.send((arrived.collected, gc.isenabled(), gc.get_freeze_count() > 0))


def test_garbage_is_collected_once_everything_is_loaded():
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    arrived = AsItArrives()
    arrived.number = 1  # or there is no state
    process = FollowingProcess(target=tell, args=(arrived, sender))
    process.start()
    assert receiver.poll(60) and receiver.recv() == (False, True, True)
    process.join()
    assert process.exitcode == 0


def note(file: Path) -> None:
    files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.exists(each.path)]
    facts = {"pid": os.getpid(), "files": files, "word": os.environ.get("WORD"), "name": psutil.Process().name()}
    file.write_text(json.dumps(facts | {"argv": sys.orig_argv, "fork": FollowingProcess.fork is not None}))
    sys.exit(3)


@pytest.fixture
def fork():
    FollowingProcess.fork = WaitingFork()
    yield FollowingProcess.fork
    FollowingProcess.dismiss_fork()


def test_a_fork_becomes_the_engine(fork, tmp_path, monkeypatch):
    """It has the environment of now, the libraries of before, and no file of this process."""
    monkeypatch.setenv("WORD", "after the fork")
    with (tmp_path / "open").open("w"):
        process = FollowingProcess(target=note, args=(tmp_path / "facts",), name=ENGINE_PROCESS)
        process.start()
        process.join(60)
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["pid"], process.pid, process.exitcode) == (fork.pid, fork.pid, 3)
    assert (facts["word"], facts["name"], facts["argv"], facts["fork"]) == ("after the fork", ENGINE_NAME, sys.orig_argv, False)
    assert not any(each.startswith(str(tmp_path)) and each.endswith("open") for each in facts["files"])
    assert FollowingProcess.fork is None


def test_after_a_fork_that_was_killed_the_engine_is_spawned(fork, tmp_path):
    os.kill(fork.pid, signal.SIGKILL)
    fork.wait()
    process = FollowingProcess(target=note, args=(tmp_path / "facts",), name=ENGINE_PROCESS)
    process.start()
    process.join(60)
    assert process.exitcode == 3 and process.pid != fork.pid
    assert any("spawn_main" in word for word in json.loads((tmp_path / "facts").read_text())["argv"])


def test_a_fork_that_becomes_no_process_ends(fork):
    FollowingProcess.dismiss_fork()
    assert fork.returncode == 0 and not psutil.pid_exists(fork.pid)


def test_a_fork_whose_server_is_killed_ends(tmp_path):
    """Without a sign on its pipe: another fork holds the other end."""
    server = os.fork()
    if server == 0:
        fork = WaitingFork()
        holder = os.fork()
        if holder == 0:
            signal.pause()
        (tmp_path / "pids").write_text(f"{fork.pid} {holder}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(server, 0)
    waiting, holder = (psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    try:
        psutil.wait_procs([waiting], timeout=10)
        assert not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE
    finally:
        holder.kill()
