"""`sagellm up`, `engine` and `infer`, and the client that finds the manager, with processes that compute nothing."""

import asyncio
import json
import signal
import sys

import pytest
import yaml
from click.testing import CliRunner

from benchmarks.processes import ServerProcess, free_port, wait_until
from sagellm import UnifiedInferenceClient
from sagellm.cli.control import SHIPPED
from sagellm.cli.main import main
from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.registry import make_engine
from sagellm.core.config import read_model
from sagellm.core.errors import ConfigError, EngineError
from tests.control_plane.endpoint import Endpoint

PACED = "tests.control_plane.endpoint:Paced"


def run(*words):
    return CliRunner().invoke(main, words)


class Up(ServerProcess):
    def __init__(self, folder, engines, *words, **settings):
        port = free_port()
        file = folder / "up.yaml"
        file.write_text(yaml.safe_dump({"port": port, "drain_timeout_s": 2, "engines": engines} | settings))
        command = [sys.executable, "-c", "from sagellm.cli import main; main()", "up", str(file), "--json", *words]
        super().__init__(command, port, folder / "server")


@pytest.fixture
def start_up(tmp_path):
    started = []

    def start(engines, *words, **settings):
        started.append(Up(tmp_path, engines, *words, **settings))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_a_manager_from_a_file_its_engines_and_its_end(start_up):
    server = start_up({"a": {"kind": PACED, "model": "one"}})
    facts = server.ready()
    assert facts["models"] == ["one"] and facts["url"] == f"{server.url}/v1"
    listed = json.loads(run("engine", "list", "--json").output)
    assert [(each["name"], each["state"]) for each in listed] == [("a", "ready")]
    assert "0 1 2 3 " in run("infer", "hello", "--max-tokens", "4").output
    started = run("engine", "start", "two", "--engine-kind", PACED, "--name", "b")
    assert started.exit_code == 0 and "b serves two" in started.output
    heading, *rows = run("engine", "list").output.splitlines()
    assert heading.split()[:5] == ["name", "kind", "state", "models", "load"] and len(rows) == 2  # one line an engine
    assert [row.split()[0] for row in rows] == ["a", "b"]
    several = run("infer", "hello")
    assert several.exit_code == 1 and "serves one, two; name one of them: model=NAME, or --model NAME." in several.output
    assert json.loads(run("infer", "hello", "--model", "two", "--raw", "--max-tokens", "2", "--json").output) == {
        "model": "two", "text": "0 1 "
    }  # fmt: skip
    assert "b: ready" in run("engine", "status").output
    assert run("engine", "drain", "b").exit_code == 0
    assert run("engine", "status", "b").exit_code == 1
    assert run("engine", "stop", "b").output == "b is stopped\n"
    again = run("engine", "stop", "b")
    assert again.exit_code == 1 and "there is no engine 'b'; registered are a" in again.output
    for words, says in (
        (("two", "--engine-kind", "nothing"), "unknown engine kind 'nothing'; known are: group, openai"),
        (("two", "--engine-kind", PACED, "--kv-schema", "int8"), "cannot be built with options"),
        (("--engine-kind", "openai", "--engine-url", "http://127.0.0.1:1"), "cannot be reached"),
        (("two", "--engine-kind", PACED, "--name", "a"), "an engine a is registered already"),
    ):  # fmt: skip
        refused = run("engine", "start", *words)
        assert refused.exit_code == 1 and says in refused.output
    server.end(signal.SIGINT)
    gone = run("engine", "list")
    assert gone.exit_code == 1 and "no manager runs; start one with `sagellm up`" in gone.output
    elsewhere = run("infer", "hello", "--url", server.url)
    assert elsewhere.exit_code == 1 and "does not answer as a manager" in elsewhere.output


@pytest.mark.parametrize(("settings", "says"), [
    ({"rooter": "x"}, "rooter: unknown key; known are"), ({"router": "x"}, "unknown router 'x'"),
    ({"engines": {"a": {"kind": "openai", "url": "http://127.0.0.1:1"}}}, "engine a cannot start: "),
])  # fmt: skip
def test_a_file_that_cannot_work_ends_with_words(start_up, settings, says):
    server = start_up(**{"engines": {}} | settings)
    server.end(None, 2)
    assert says in server.stderr and "error: " in server.stderr and "Traceback" not in server.stderr


def test_a_signal_during_the_start_ends_it(start_up):
    server = start_up({"a": {"kind": "tests.control_plane.endpoint:Never"}})
    wait_until("the engine", lambda: any("never ready" in one.cmdline() for one in server.family()))
    server.end(signal.SIGTERM)
    assert "Traceback" not in server.stderr


def test_only_the_owner_may_start_engines(start_manager):
    manager = start_manager(api_key=["k"])
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        words = ("engine", "start", "--engine-kind", "openai", "--engine-url", engine.url, "--api-key", "k")
        file = next((manager._file.parent).glob("*"))
        facts = json.loads(file.read_text())
        file.write_text(json.dumps(facts | {"control_key": "another"}))
        refused = run(*words)
        assert refused.exit_code == 1 and "only the owner of the manager may do this" in refused.output
        assert [one["name"] for one in json.loads(run("engine", "list", "--api-key", "k", "--json").output)] == ["a"]
        assert "API key is missing" in run("engine", "list").output


def test_the_shipped_file_is_valid():
    config = read_model(ManagerConfig, SHIPPED, {})
    (spec,) = (dict(each) for each in config.engines.values())
    assert make_engine(spec.pop("kind"), **spec).name == "sagellm"


def test_the_client_finds_the_manager_and_streams(start_manager, monkeypatch):
    manager = start_manager()
    manager.register_engine("a", PACED, model="one")
    with UnifiedInferenceClient.create() as client:
        assert client.url == manager.url and client.model == "one"
        assert client.chat("hello", max_tokens=3) == "0 1 2 "
        assert client.chat([{"role": "user", "content": "hello"}], max_tokens=1) == "0 "
        assert list(client.generate("hello", stream=True, max_tokens=3)) == ["0 ", "1 ", "2 "]

    async def ask():
        client = UnifiedInferenceClient.create(manager.url)
        try:
            streamed = [piece async for piece in await client.achat("hello", stream=True, max_tokens=2)]
            return streamed, await client.agenerate("hello", max_tokens=2)
        finally:
            await client.aclose()

    assert asyncio.run(ask()) == (["0 ", "1 "], "0 1 ")
    with pytest.raises(ConfigError, match="serves one, not 'two'"):
        UnifiedInferenceClient.create(model="two")
    monkeypatch.setenv("SAGELLM_URL", "http://127.0.0.1:1")
    with pytest.raises(EngineError, match="does not answer as a manager"):
        UnifiedInferenceClient.create()


def test_the_client_starts_a_manager_from_a_file_where_none_runs(tmp_path):
    file = tmp_path / "up.yaml"
    file.write_text(yaml.safe_dump({"engines": {"a": {"kind": PACED, "model": "one"}}}))
    with UnifiedInferenceClient.create(config=file) as client:
        assert client.generate("x", max_tokens=2) == "0 1 "
        manager = client._manager
    assert manager.stop_s > 0
    with pytest.raises(ConfigError, match="the manager is not started"):
        manager.engines()
