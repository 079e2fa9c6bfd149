"""The engine's process: spawned, it loads libraries without searching them for garbage; or it is a fork."""

import gc
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import psutil

from sagellm.core.early import ENGINE_NAME
from sagellm.core.host import ENGINE_PROCESS
from sagellm.serve.following import EngineProcess, FollowingProcess


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
    file.write_text(json.dumps(facts | {"argv": sys.orig_argv}))
    sys.exit(3)


def test_a_fork_is_the_engine(tmp_path, monkeypatch):
    """It has the environment and the libraries of this process, and no file of it but those that it keeps."""
    monkeypatch.setenv("WORD", "of now")
    with (tmp_path / "open").open("w"), (tmp_path / "kept").open("w") as kept:
        process = FollowingProcess(target=note, args=(tmp_path / "facts",), name=ENGINE_PROCESS)
        process.keeps = (kept.fileno(),)
        process.start()
        process.start()  # as LMDeploy does with an engine that runs
        process.join(60)
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["pid"], process.exitcode) == (process.pid, 3)
    assert (facts["word"], facts["name"], facts["argv"]) == ("of now", ENGINE_NAME, sys.orig_argv)
    assert [Path(each).name for each in facts["files"] if each.startswith(str(tmp_path))] == ["kept"]


def test_a_process_that_is_no_fork_is_spawned(tmp_path):
    process = FollowingProcess(target=note, args=(tmp_path / "facts",))
    process.start()
    process.join(60)
    assert process.exitcode == 3
    assert any("spawn_main" in word for word in json.loads((tmp_path / "facts").read_text())["argv"])


def sleep() -> None:
    signal.pause()


def test_a_fork_whose_server_is_killed_ends(tmp_path):
    """Without a sign on its pipe: another fork holds the other end."""
    server = os.fork()
    if server == 0:
        process = FollowingProcess(target=sleep)
        process.keeps = ()
        process.start()
        holder = os.fork()
        if holder == 0:
            signal.pause()
        (tmp_path / "pids").write_text(f"{process.pid} {holder}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(server, 0)
    engine, holder = (psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    try:
        psutil.wait_procs([engine], timeout=30)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    finally:
        holder.kill()


def tell_port(ports, condition) -> None:
    with condition:
        ports["rpc_server_port"] = os.getpid()
        condition.notify()


def test_lmdeploy_starts_an_engine_that_does_not_run_yet():
    """It asks for a manager, a dict, a condition and a process, in its own way."""
    watched = []
    part = EngineProcess(watched.append)
    with part.Manager() as manager:
        ports, condition = manager.dict(), manager.Condition()
        process = part.get_context("spawn").Process(target=tell_port, args=(ports, condition), kwargs={}, name="engine")
        process.start()
        with condition:
            if "rpc_server_port" not in ports:
                condition.wait()
        assert ports["rpc_server_port"] == process.pid
    process.join(60)
    assert process.exitcode == 0 and watched == [process]
