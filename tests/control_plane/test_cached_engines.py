"""The router `prefix` over engines that are processes, on a tiny model, with a client of OpenAI's API."""

import asyncio
import os
import signal

import httpx
import pytest
from openai import OpenAI

from benchmarks.processes import wait_until
from sagellm.comm_backend.control import connect, new_key, sign_request
from sagellm.comm_backend.group_info import EngineAddress
from sagellm.comm_backend.group_messages import PrefixChange, Subscribe
from sagellm.control_plane.manager import ControlPlaneManager
from tests.serve.harness import ServerProcess

pytestmark = pytest.mark.slow

SETTINGS = {"model_name": "tiny", "device": "cpu", "threads": 1, "kv_blocks": 40, "block_size": 16, "context_length": 512}
NUM = 90  # tokens of a prompt


def prompt(number):
    return [(7 * number + 13 * place) % 250 + 3 for place in range(NUM)]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.touch(0o600)
    file.write_bytes(new_key())
    return file


@pytest.fixture(scope="module")
def attached(model_folder, tmp_path_factory, key_file):
    """An engine that others have started."""
    options = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    folder = tmp_path_factory.mktemp("attached")
    server = ServerProcess(folder, "--model", model_folder("llama"), *options, "--pd-key-file", key_file)
    yield server.ready()
    server.kill()


@pytest.fixture(scope="module")
def manager(model_folder, attached, key_file):
    ours = {"kind": "sagellm", "model": str(model_folder("llama")), **SETTINGS}
    theirs = {"kind": "openai", "url": attached.url, "feed_key_file": str(key_file)}
    engines = {"a": ours, "b": ours, "c": theirs}
    with ControlPlaneManager(
        port=0, publish=False, check_interval_s=0.2, router="prefix", engines=engines
    ) as manager:
        wait_until("the engines tell", lambda: all("cached_blocks" in one for one in manager.engines()), 60)
        yield manager


@pytest.fixture(scope="module")
def client(manager):
    with OpenAI(base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def figure(manager, name, what):
    return next(one for one in manager.engines() if one["name"] == name).get(what)


def directly(manager, name, *numbers):
    """Ask an engine itself."""
    for number in numbers:
        body = {"model": "tiny", "prompt": prompt(number), "max_tokens": 2}
        assert httpx.post(f"{figure(manager, name, 'url')}/v1/completions", json=body, timeout=60).status_code == 200


def choice(manager, client, number):
    """Ask through the gateway; where the request went, and why."""
    client.completions.create(model="tiny", prompt=prompt(number), max_tokens=2)
    decision = manager.status()["decisions"][-1]
    return decision["engine"], decision["reason"]


def settled(manager):
    """All events are here, and what was sent counts no more."""
    wait_until("requests settle", lambda: not any(one["expected_prefixes"] for one in manager.engines()), 60)


def own(manager, name):
    """Return the prefix keys that the engine itself reports as cached, asked anew."""
    kind = manager._fleet.engines[name].kind

    async def ask():
        path = "/sage/pd/info"
        async with httpx.AsyncClient() as http:
            found = await http.get(kind.url + path, headers=sign_request(kind.feed_key, "GET", path))
        address = EngineAddress.model_validate_json(found.text).control
        connection = await connect(address, kind.feed_key, on_event=lambda *_: None)
        try:
            return set((await connection.call(Subscribe(), 10, PrefixChange)).stored)
        finally:
            await connection.close()

    return asyncio.run(ask())


def known(manager, name):
    return set(manager._fleet.prefixes.index(name) or ())


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_prefix_that_was_computed_for_others_is_found(manager, client, name):
    number = 10 + ord(name)
    directly(manager, name, number)
    wait_until("its events", lambda: known(manager, name) >= own(manager, name) and known(manager, name), 60)
    assert choice(manager, client, number) == (name, "longest prefix cached")
    assert manager.status()["decisions"][-1]["detail"] == f"80 of 90 tokens are cached on {name}"


def test_a_prefix_that_was_evicted_is_not_looked_for_there(manager, client):
    directly(manager, "b", 30)
    wait_until("its events", lambda: own(manager, "b") == known(manager, "b"), 60)
    assert choice(manager, client, 30) == ("b", "longest prefix cached")
    settled(manager)
    before = own(manager, "b")
    directly(manager, "b", *range(31, 42))  # more than its pool holds
    wait_until("its events", lambda: own(manager, "b") == known(manager, "b"), 60)
    assert before - known(manager, "b")
    # Its first block may be left; where all is gone, no engine has it.
    _, reason = choice(manager, client, 30)
    assert reason == "least load"


def test_requests_that_run_count(manager, client):
    """Before the engine's events are here; they come at most ten times a second."""
    settled(manager)
    first = choice(manager, client, 50)
    assert first[1] == "least load"
    again = choice(manager, client, 50)
    assert again[0] == first[0] and again[1] in ("longest prefix sent", "longest prefix cached")


def test_a_lost_event_is_repaired(manager, client):
    engine, dropped = manager._fleet.prefixes._engines["a"], []
    receive = engine.on_event

    def lose_one(event, costs):
        if isinstance(event, PrefixChange) and not dropped:
            dropped.append(event)
        else:
            receive(event, costs)

    engine.on_event = lose_one
    directly(manager, "a", 60)
    wait_until("the loss", lambda: dropped, 60)
    assert own(manager, "a") != known(manager, "a")
    directly(manager, "a", 61)
    wait_until("the repair", lambda: own(manager, "a") == known(manager, "a"), 60)
    assert figure(manager, "a", "resyncs") == 1
    assert choice(manager, client, 60) == ("a", "longest prefix cached")


def test_an_engine_that_is_killed_has_nothing(manager, client):
    directly(manager, "a", 70)
    wait_until("its events", lambda: own(manager, "a") == known(manager, "a"), 60)
    assert choice(manager, client, 70) == ("a", "longest prefix cached")
    os.kill(figure(manager, "a", "pid"), signal.SIGKILL)
    wait_until("its end", lambda: figure(manager, "a", "starts") == 2, 120)
    wait_until("it is there again", lambda: figure(manager, "a", "state") == "ready", 120)
    wait_until("it tells", lambda: figure(manager, "a", "cached_blocks") == 0, 60)
    assert choice(manager, client, 70)[1] == "least load"
    directly(manager, "a", 71)
    wait_until("its events", lambda: known(manager, "a") and own(manager, "a") == known(manager, "a"), 60)
    assert choice(manager, client, 71) == ("a", "longest prefix cached")


def test_a_server_with_the_key_tells_it_alone(attached):
    assert httpx.get(f"{attached.url}/sage/pd/info").status_code == 401
    other = sign_request(new_key(), "GET", "/sage/pd/info")
    assert httpx.get(f"{attached.url}/sage/pd/info", headers=other).status_code == 401
    with httpx.Client() as http:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "with_cache": True}
        assert http.post(f"{attached.url}/v1/completions", json=body).status_code == 400
