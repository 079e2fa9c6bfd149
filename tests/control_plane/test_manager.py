"""The manager: engines that are not what they should be, restarts, settings, and what is left when it is killed."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import can_listen, free_port, wait_until
from sagellm.control_plane.base import Router
from sagellm.control_plane.found import find_manager, run_folder
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.registry import make_engine
from sagellm.core.config import read_config
from sagellm.core.errors import ConfigError, EngineError, PolicyError
from tests.control_plane.endpoint import Endpoint, Never, Paced
from tests.control_plane.test_gateway import ask


@pytest.mark.parametrize(("models", "options", "says"), [
    ("no JSON", {}, "is no OpenAI server: /v1/models answers 200, 'no JSON'"),
    ({"data": []}, {}, "names no model"),
    (None, {"model": "another"}, "engine a has no model 'another': its server at"),
], ids=["other server", "without models", "other model"])  # fmt: skip
def test_a_lying_endpoint_is_not_registered(start_manager, models, options, says):
    manager = start_manager()
    with Endpoint(models=models) as engine, pytest.raises(ConfigError, match=says.replace("/", ".")):
        manager.register_engine("a", "openai", url=engine.url, **options)
    assert manager.engines() == [] and not manager.health()["healthy"]


def test_a_dead_endpoint_a_server_without_routes_and_an_unknown_key(start_manager):
    manager = start_manager()
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match="engine a cannot start: .* cannot be reached"):
        manager.register_engine("a", "openai", url=url)
    with Endpoint(routes=()) as engine, pytest.raises(ConfigError, match="it has none of /v1/chat/completions"):
        manager.register_engine("a", "openai", url=engine.url)
    with pytest.raises(ConfigError, match="no URL of a server"):
        manager.register_engine("a", "openai", url="localhost:80")


def test_names_are_taken_once_and_kinds_are_known(start_manager):
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        with pytest.raises(ConfigError, match="an engine a is registered already"):
            manager.register_engine("a", "openai", url=engine.url)
        with pytest.raises(ConfigError, match="no name of an engine"):
            manager.register_engine("a/b", "openai", url=engine.url)
        with pytest.raises(ConfigError, match="unknown engine kind 'x'; known are: group, openai, sagellm, vllm"):
            manager.register_engine("b", "x")
        with pytest.raises(ConfigError, match="kv_blokcs: unknown key; known are .*kv_blocks"):
            manager.register_engine("b", "sagellm", kv_blokcs=3)
        with pytest.raises(ConfigError, match="the manager sets this"):
            manager.register_engine("b", "sagellm", port=3)
        with pytest.raises(ConfigError, match="there is no command no-vllm"):
            manager.register_engine("b", "vllm", model="m", executable="no-vllm")
        with pytest.raises(ConfigError, match="there is no engine 'c'; registered are a"):
            manager.unregister_engine("c")
        assert [one["name"] for one in manager.engines()] == ["a"]
        manager.unregister_engine("a")
        manager.register_engine("a", "openai", url=engine.url)


def test_engines_of_one_model_have_one_tokenizer(start_manager):
    manager = start_manager()
    with Endpoint(encode=[1, 2]) as one, Endpoint(encode=[1, 3]) as other, Endpoint() as silent:
        manager.register_engine("a", "openai", url=one.url)
        manager.register_engine("silent", "openai", url=silent.url)  # it cannot be asked
        with pytest.raises(ConfigError, match="engines b and a both serve m, with different tokenizers"):
            manager.register_engine("b", "openai", url=other.url)
        other.models["data"].append({"id": "n"})
        manager.register_engine("b", "openai", url=other.url, model="n")
        assert manager.status()["models"] == {"m": ["a", "silent"], "n": ["b"]}


class Stubborn(Paced):
    """Its process cannot be started again."""

    def command(self, port):
        self.num = getattr(self, "num", 0) + 1
        good = super().command(port)
        return good if self.num == 1 else [sys.executable, "-c", "import sys; sys.exit('error: no memory is left')"]


def test_an_engine_of_ours_gets_the_settings_that_were_given(tmp_path):
    given = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "plugins": "mine:Mine", "kv_blocks": 64,
             "kv": {"policy": "arc", "quotas": {"a": {"gpu": 0.5}}}, "device": "cpu"}  # fmt: skip
    engine = make_engine("sagellm", model=str(tmp_path), **given)
    command = engine.command(12345)
    file = Path(command[command.index("--config") + 1])
    assert read_config(file, {}) == read_config(None, given | {"model": str(tmp_path)})
    assert file.parent.stat().st_mode & 0o777 == 0o700 and command[command.index("--port") + 1] == "12345"
    asyncio.run(engine.stop())
    assert not file.parent.exists()


@pytest.mark.parametrize(("healthy_s", "pauses"), [(3600.0, ["0.5", "1"]), (0.0, ["0", "0.5"])])
def test_restarts_are_tried_later_each_time(start_manager, monkeypatch, caplog, healthy_s, pauses):
    """The first one of an engine that served for long comes at once."""
    monkeypatch.setattr("sagellm.control_plane.engine.HEALTHY_S", healthy_s)
    manager = start_manager(wait_s=0.1)
    manager.register_engine("a", Stubborn())
    os.kill(manager.engines()[0]["pid"], 9)
    wait_until("three starts", lambda: manager.engines()[0]["starts"] >= 3, 60)
    (engine,) = manager.engines()
    assert "no memory is left" in engine["why"] and engine["state"] in ("failed", "restarting")
    assert re.findall(r"It is tried again in (\S+) s", caplog.text)[:2] == pauses
    assert ask(manager, model="paced").status_code == 503
    manager.unregister_engine("a")
    assert manager.engines() == []


def test_an_engine_that_is_starting_can_be_stopped(start_manager):
    manager = start_manager()
    never = Never()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        registering = pool.submit(manager.register_engine, "a", never)
        pid = wait_until("its process", lambda: manager.engines() and manager.engines()[0].get("pid"))
        manager.unregister_engine("a")
        with pytest.raises(EngineError, match="engine a cannot start: it was stopped while it started"):
            registering.result()
    assert manager.engines() == [] and not psutil.pid_exists(pid)


class Faulty(Router):
    name = "faulty"

    def choose(self, request, engines):
        raise RuntimeError("planted")


def test_a_faulty_router_is_replaced(start_manager):
    manager = start_manager(router="tests.control_plane.test_manager:Faulty")
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        assert ask(manager).status_code == 200
        assert manager.status()["router"] == "least-load"


def test_settings_are_checked_before_anything_starts(start_manager):
    for settings, says in (
        ({"prot": 3}, "prot: unknown key; known are .*port"), ({"port": 70000}, "port: "),
        ({"api_key": [{"key": "k", "limit": 3}]}, "api_key.0.limit: unknown key; leave it out"),
        ({"api_key": "a b"}, "api_key.0.key: "),
        ({"engines": {"a": {"kind": "nothing"}}}, "engine a: unknown engine kind 'nothing'"),
        ({"engines": {"a": {"kind": "openai"}}}, "engine a: .* cannot be built with options"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            start_manager(**settings)
    with pytest.raises(PolicyError, match="unknown router 'x'; known are: least-load, order, prefix, round-robin"):
        start_manager(router="x")
    manager = start_manager()
    with pytest.raises(ConfigError, match="Address already in use"):
        start_manager(port=int(manager.url.rpartition(":")[2]))
    with pytest.raises(ConfigError, match="not started"):
        ControlPlaneManager().engines()


def test_a_start_that_fails_leaves_nothing(start_manager):
    port = free_port()
    dead = {"kind": "openai", "url": f"http://127.0.0.1:{free_port()}"}
    good = {"kind": "tests.control_plane.endpoint:Paced"}
    with pytest.raises(EngineError, match="engine dead cannot start"):
        start_manager(port=port, engines={"good": good, "dead": dead})
    assert can_listen(port) and not list(run_folder().glob("*"))
    below = [one.cmdline() for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    assert not [words for words in below if "benchmarks.paced" in words]


def test_a_full_disk_is_told(start_manager, tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with pytest.raises(ConfigError, match="by which commands find the manager: Not a directory"):
        start_manager()


def test_it_is_found_by_its_user_until_it_stops(start_manager, monkeypatch):
    assert find_manager() is None
    manager = start_manager()
    assert find_manager() == (manager.url, manager.control_key)
    assert (next(run_folder().glob("*")).stat().st_mode & 0o777) == 0o600
    assert find_manager(manager.url + "/v1") == (manager.url, manager.control_key)
    monkeypatch.setenv("SAGELLM_URL", "http://elsewhere:1/v1")
    assert find_manager() == ("http://elsewhere:1", None)
    monkeypatch.delenv("SAGELLM_URL")
    manager.stop()
    assert find_manager() is None
    manager.start()
    assert find_manager() == (manager.url, manager.control_key) and manager.engines() == []
    manager.stop()
    stale = run_folder() / "1.json"
    stale.write_text(json.dumps({"url": manager.url, "pid": os.getpid(), "control_key": "x"}))
    assert find_manager() is None


KILLED = """
import sys, time
from sagellm.control_plane.manager import ControlPlaneManager
manager = ControlPlaneManager(port=0, engines={"a": {"kind": "tests.control_plane.endpoint:Paced"}}).start()
print(manager.engines()[0]["pid"], flush=True)
time.sleep(60)
"""


def test_engines_end_with_a_manager_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()

    def has_gone():
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    wait_until("the end of the engine", has_gone)
    assert find_manager() is None
