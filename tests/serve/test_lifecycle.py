"""Stops and accidents before a server is ready: exit codes, and nothing left behind. `end` looks for children, the port and the
folder. Those of one that is ready are in `endings.py`, and happen where one has been started for something else."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.processes import workers_below
from tests.serve.endings import Stream, check_error_event, killed
from tests.serve.harness import READY_S, wait_until
from tests.sweeps import slow_but


@pytest.mark.parametrize("number", slow_but([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_stop_while_loading(launch, number):
    server = launch()
    server.engine_process()
    server.end(number, group=number == signal.SIGINT)
    assert server.stdout == ""
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("program", "module"), [("sagellm.serve.__main__", "click"), ("sagellm.cli.main", "yaml")])
def test_stop_before_anything_was_started(tmp_path, program, module, number):
    """The signal comes while that module is imported: the first of all, or the first that the command itself needs."""
    (tmp_path / f"{module}.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\nraise SystemExit(3)\n")
    (tmp_path / "config.yaml").touch()
    code = f"import runpy; runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    if module == "yaml":
        code = "from sagellm.cli import main; main(['serve', '--config', 'config.yaml'])"
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.slow
def test_a_server_with_several_workers_is_killed(launch):
    killed(launch("--tensor-parallel", 2).ready(), 4)


def worker_of(server):
    return workers_below(psutil.Process(server.process.pid))[0]


@pytest.mark.slow
def test_a_worker_is_killed(launch):
    server = launch("--tensor-parallel", 2).ready()
    stream, worker = Stream(server, 2000), worker_of(server)
    worker.kill()
    server.end(None, code=1)
    reason = f"tensor-parallel worker 0 (process {worker.pid}) was ended by signal SIGKILL"
    assert f"error: {reason}; its log is above." in server.stderr
    check_error_event(stream, f"the engine has stopped: {reason}")


@pytest.mark.slow
def test_a_server_starts_again_after_a_worker_was_killed(launch):
    server = launch("--tensor-parallel", 2, "--restart-workers").ready()
    prompt = {"model": server.model, "prompt": "a b c", "max_tokens": 8, "temperature": 0}
    before = server.post("/v1/completions", prompt).json()["choices"][0]["text"]
    process, said = server.process.pid, server.stdout
    for count in (1, 2):
        worker_of(server).kill()
        wait_until("it is ready again", lambda: server.stdout.count('"ready": true') == count + 1, READY_S)  # noqa: B023
        assert server.process.poll() is None and server.process.pid == process
        assert server.post("/v1/completions", prompt).json()["choices"][0]["text"] == before
        assert server.stderr.count("the server starts again") == count
    assert server.stdout.startswith(said)
    server.end(signal.SIGTERM)


@pytest.mark.slow
def test_the_engine_process_is_killed_while_loading(launch):
    server = launch()
    engine = server.engine_process()
    # Before that the child of a few milliseconds is not yet known to the watch.
    wait_until(
        "the engine loads libraries", lambda: engine.memory_info().rss > 200 << 20 or not psutil.pid_exists(engine.pid)
    )
    engine.kill()
    server.end(None, code=1)
    assert "error: the engine process ended with code -9" in server.stderr
