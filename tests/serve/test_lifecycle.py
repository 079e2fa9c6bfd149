"""Start, stop and accidents: exit codes, and nothing left behind. `end` looks for children, the port and the folder."""

import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

from tests.serve.harness import wait_until

REQUEST = {"input_ids": [5] * 20, "ignore_eos": True, "temperature": 0, "stream": True}


class Stream(threading.Thread):
    """A streamed request that is read to its end, whatever that is."""

    def __init__(self, server, max_tokens):
        super().__init__(daemon=True)
        self.events, self.complete = [], False
        self._server, self._body = server, REQUEST | {"max_tokens": max_tokens}
        self.start()
        wait_until("the first chunk", lambda: self.events)

    def run(self):
        try:
            with httpx.stream("POST", f"{self._server.url}/generate", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                    self.complete |= line == "data: [DONE]"
        except httpx.HTTPError:
            pass


def refuses(server):
    try:
        httpx.get(f"{server.url}/health", timeout=5)
    except httpx.ConnectError:
        return True
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        pass  # it was still waiting to be accepted, or idle, when the server closed its socket: ask again
    return False


def test_interrupt_of_the_group_lets_a_running_request_finish(launch):
    """Ctrl-C in a terminal reaches every process of the group."""
    server = launch("--drain-timeout-s", 25).ready()
    stream = Stream(server, 300)
    server.send(signal.SIGINT, group=True)
    wait_until("new connections are refused", lambda: refuses(server))
    stream.join(30)
    assert stream.complete and stream.events[-1]["meta_info"]["completion_tokens"] == 300
    server.end(None)


def test_terminate_while_streaming_ends_within_the_drain_time(launch):
    server = launch("--drain-timeout-s", 0.5).ready()
    stream = Stream(server, 2000)
    server.end(signal.SIGTERM)
    stream.join(10)
    assert not stream.is_alive() and not stream.complete


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_the_server_itself_is_killed(launch):
    """Nobody is left to end the engine and its two workers; they have to notice."""
    server = launch("--tensor-parallel", 2).ready()
    family = server.family()
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert len(family) >= 4 and not alive


def test_the_engine_process_is_killed(launch):
    server = launch().ready()
    stream = Stream(server, 2000)
    server.engine_process().kill()
    server.end(None, code=1)
    assert "error: the engine process ended with code -9" in server.stderr
    stream.join(10)
    assert not stream.complete


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
