"""How a server ends that is ready and works: told to, or by an accident. Each ending is that of a server that other tests have
started anyway; `test_lifecycle.py` has those of a server that is not ready."""

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

from tests.serve.harness import ServerProcess, wait_until

REQUEST = {"input_ids": [5] * 20, "ignore_eos": True, "temperature": 0, "stream": True}


class Stream(threading.Thread):
    """A streamed request that is read to its end, whatever that is."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.events, self.complete = [], False
        self._server, self._body = server, REQUEST | {"max_tokens": max_tokens}
        self.start()
        wait_until("the first chunk", lambda: self.events)

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._server.url}/generate", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                    self.complete |= line == "data: [DONE]"
        except httpx.HTTPError:
            pass


def refuses(server: ServerProcess) -> bool:
    try:
        httpx.get(f"{server.url}/health", timeout=5)
    except httpx.ConnectError:
        return True
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        pass  # it was still waiting to be accepted, or idle, when the server closed its socket: ask again
    return False


def interrupted(server: ServerProcess) -> None:
    """Ctrl-C in a terminal reaches every process of the group; a running request is finished, for which it has time."""
    stream = Stream(server, 300)
    server.send(signal.SIGINT, group=True)
    wait_until("new connections are refused", lambda: refuses(server))
    stream.join(30)
    assert stream.complete and stream.events[-1]["meta_info"]["completion_tokens"] == 300
    server.end(None)


def terminated_while_streaming(server: ServerProcess) -> None:
    """It has a short time to drain, and ends within it. The client learns why its stream ends."""
    stream, before = Stream(server, 2000), len(server.stderr)
    server.end(signal.SIGTERM)
    check_error_event(stream, "the server is shutting down")
    check_quiet(server, before)


def hurried(server: ServerProcess) -> None:
    """A second signal ends a server that would drain for long: answers, embeddings, prompts that are scored to be echoed, and
    requests that do not come to their end."""
    stream, before = Stream(server, 4000), len(server.stderr)
    words = {"model": server.model, "input": 500 * [[5] * 400]}
    scores = {"model": server.model, "prompt": 128 * [[5] * 400], "echo": True, "logprobs": 1, "max_tokens": 0}
    pool = ThreadPoolExecutor(2)
    others = [pool.submit(server.post, path, body) for path, body in (("/v1/embeddings", words), ("/v1/completions", scores))]
    with pool, socket.create_connection(("127.0.0.1", server.port), timeout=30) as half:
        half.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        server.wait_for_metric("blocks of other prompts", lambda n: n > 40, "sagellm_kv_blocks", state="active")
        server.send(signal.SIGTERM)
        wait_until("new connections are refused", lambda: refuses(server))
        assert not stream.complete, stream.events[-3:]
        start = time.monotonic()
        server.end(signal.SIGTERM)
        assert time.monotonic() - start < 8, "the drain time is ten seconds"
        check_error_event(stream, "the server is shutting down")
        for answer in (other.result(10) for other in others):
            assert answer.status_code == 503, answer.text + server.stderr[before:]
            assert answer.json()["error"]["type"] == "server_error", answer.text
            assert answer.json()["error"]["message"] == "the server is shutting down"
    check_quiet(server, before)


def check_error_event(stream: Stream, message: str) -> None:
    stream.join(10)
    assert not stream.is_alive() and stream.complete
    assert stream.events[-1] == {"error": {"message": message, "type": "server_error", "param": None, "code": 503}}


def check_quiet(server: ServerProcess, before: int) -> None:
    """`before`: length of the log when the end began; a plug-in may have raised earlier."""
    said = server.stderr[before:]
    for noise in ("Traceback", "CancelledError", "nanobind", "exceeded"):
        assert noise not in said, said


def killed(server: ServerProcess, num_processes: int) -> None:
    """Kill the server. No process is left to end the others, at least `num_processes` of them; they have to notice."""
    family = server.family()
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert len(family) >= num_processes and not alive


def engine_killed(server: ServerProcess) -> None:
    stream = Stream(server, 2000)
    server.engine_process().kill()
    server.end(None, code=1)
    assert "error: the engine process ended with code -9" in server.stderr
    check_error_event(stream, "the engine has stopped: the engine process ended with code -9")
    assert "Traceback" not in server.stderr, server.stderr
