"""`sagellm pd up` with stand-in engines: starts, restarts, ends and words."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from benchmarks.processes import ServerProcess, free_port
from sagellm.cli import main
from sagellm.comm_backend.topology.placement import available_cores
from sagellm.core.errors import EngineError
from sagellm.core.ports import free_ports, listen
from sagellm.pd.child import Child
from tests.pd.harness import until
from tests.pd.real_group import SAGELLM
from tests.pd.stand_in import tokens_of

KIND = "tests.control_plane.test_group:StandIns"

class Up(ServerProcess):
    def __init__(self, folder, tmp_path, *more):
        port = free_port()
        words = ["--port", port, "--drain-timeout-s", 5, "--policy", "always-split", "--model", folder, "--kind", KIND]
        super().__init__([*SAGELLM, "pd", "up", "--json", *words, *more], port, tmp_path)

    def complete(self, prompt):
        body = {"model": self.announcement["model"], "prompt": prompt, "max_tokens": 3}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()

    def end(self, number=signal.SIGTERM, code=0):
        try:
            super().end(number, code)
        finally:
            self.kill()
        return self.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder):
    """A model's folder, for its tokenizer."""
    return model_folder("llama")


def test_a_group_starts_serves_comes_back_and_ends(folder, tmp_path):
    up = Up(folder, tmp_path, *(["--pin"] if len(available_cores()) > 1 else []))
    facts = up.ready()
    assert facts["ready"] and facts["url"] == f"http://127.0.0.1:{up.port}/v1"
    assert [one["name"] for one in facts["engines"]] == ["pd-prefill-1", "pd-decode-1"]
    prompt = "a prompt of some length " * 10
    found = up.complete(prompt)
    assert found["loaded"] and found["choices"][0]["text"] == "".join(tokens_of(prompt, 3))
    if len(available_cores()) > 1:
        shares = [os.sched_getaffinity(one["pid"]) for one in facts["engines"]]
        assert not shares[0] & shares[1] and shares[0] | shares[1] == set(available_cores())
    shown = CliRunner().invoke(main, ["pd", "status", "--json", "--url", up.url])
    decode = next(one for one in json.loads(shown.output)["engines"] if one["role"] == "decode")
    assert shown.exit_code == 0 and f"{decode['connected'][0]}/v1" == facts["engines"][0]["url"]
    # An engine that dies comes back under its URL, and is connected again.
    os.kill(facts["engines"][0]["pid"], signal.SIGKILL)
    until("the prefill engine is there again", lambda: up.complete(prompt)["loaded"], 60)
    assert "engine pd-prefill-1 failed: it was ended by signal 9" in up.stderr
    engines = httpx.get(f"{up.url}/control/engines").json()["engines"]
    assert engines[1]["url"] == facts["engines"][0]["url"].removesuffix("/v1") and engines[1]["starts"] == 2
    text = up.end(signal.SIGINT)
    assert "Traceback" not in text and "killed" not in text
    listen("127.0.0.1", up.port).close()  # the port is free


@pytest.mark.slow  # `tests/control_plane/test_group.py` has the words
def test_an_engine_that_cannot_start_ends_all_in_its_words(folder, tmp_path):
    up = Up(folder, tmp_path, "--", "--fail-with", "the model does not fit; give a smaller one.")
    assert "cannot start: the model does not fit; give a smaller one." in up.end(None, 2)


@pytest.mark.slow
def test_an_engine_that_refuses_another_ends_all(folder, tmp_path):
    up = Up(folder, tmp_path, "--", "--weights", "random")
    text = up.end(None, 2)
    assert "does not load from" in text and "has weights random-" in text


@pytest.mark.slow
def test_without_restarts_one_death_is_the_end_of_all(folder, tmp_path):
    up = Up(folder, tmp_path, "--no-restart", "--prefill", 0, "--hybrid", 1, "--decode", 0)
    facts = up.ready()
    os.kill(facts["engines"][0]["pid"], signal.SIGKILL)
    assert "error: pd-hybrid-1 has gone: it was ended by signal 9" in up.end(None, 1)


@pytest.mark.slow
def test_the_group_ends_with_a_manager_that_is_killed(folder, tmp_path):
    up = Up(folder, tmp_path, "--prefill", 0)
    up.ready()
    up.end(signal.SIGKILL, -9)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--decode", "0"], "no engine decodes"),
        (["--model", "/nowhere"], "--model /nowhere: there is no such folder or file"),
        (["--policy", "fastest"], "unknown routing policy 'fastest'"),
        (["--port", "0"], "'--port': 0 is not in the range"),
        (["--", "--role", "decode"], "--role is set for each engine by its group"),
        (["--pin", "--prefill", "64"], "--pin: 65 engines for"),
    ],
)
def test_what_can_be_known_at_once(words, says):
    done = CliRunner().invoke(main, ["pd", "up", *words])
    assert done.exit_code == 2 and says in done.output and done.output.strip().count("\n") <= 3


def test_a_port_in_use_is_known_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(main, ["pd", "up", "--port", port])
        assert done.exit_code == 2 and f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.output


def test_the_proxy_says_what_it_lacks(tmp_path):
    key = tmp_path / "key"
    for words, says in (([], "cannot read the key file"), (["--policy", "x"], "unknown routing policy"),
                        (["--model", str(tmp_path / "none")], "there is no such folder")):  # fmt: skip
        done = CliRunner().invoke(main, ["pd", "proxy", "--pd-key-file", str(key), *words])
        assert done.exit_code == 2 and says in done.output
        key.touch(0o600)
        key.write_text("k" * 32)


def test_status_of_nobody():
    port = free_port()
    done = CliRunner().invoke(main, ["pd", "status", "--url", f"http://127.0.0.1:{port}"])
    assert done.exit_code == 1 and "does not answer as a sagellm proxy" in done.output


def test_what_a_process_says_of_its_end():
    """Its own error, whatever libraries say when the interpreter ends."""
    async def words(code):
        child = Child("one", [sys.executable, "-c", f"import sys; {code}"], say=lambda line: None)
        await child.start()
        return child.words(await child.wait())

    assert asyncio.run(words("print('error: no room.\\n' + 'leak\\n' * 50, file=sys.stderr)")) == "no room."
    assert asyncio.run(words("sys.exit(3)")) == "it ended with code 3, without a word."


def test_a_command_that_is_none_is_named():
    async def start():
        await Child("one", ["/nowhere/at/all"]).start()

    with pytest.raises(EngineError, match="it cannot be started: No such file or directory"):
        asyncio.run(start())


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_lines_longer_than_any_buffer_stop_nobody(stream):
    """Neither the process, which would wait for somebody to read, nor the lines behind them."""
    said = []
    code = f"import sys; print('x' * (3 << 20), 'behind it', 'y' * (1 << 18), sep='\\n', file=sys.{stream}, flush=True)"

    async def play():
        child = Child("one", [sys.executable, "-c", code], say=said.append)
        await child.start()
        assert await asyncio.wait_for(child.wait(), 30) == 0

    asyncio.run(play())
    assert "[one] behind it" in said and said[-1] == "[one] " + "y" * (1 << 18)


def test_ports_of_engines_are_none_that_the_kernel_gives_out():
    """Otherwise the control port of one engine, which is any free one, may be the HTTP port of the next."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50 and not any(low <= port <= high for port in ports)
    with listen("127.0.0.1", ports[0]):
        assert ports[0] not in free_ports(50)
