"""Engines on the nodes of a Ray cluster: settings that cannot work, places, a node that is lost, and the manager's death."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner
from openai import OpenAI

from benchmarks.processes import wait_until
from benchmarks.ray_nodes import HEAD, nodes, number_of
from sagellm.cli.main import main
from sagellm.comm_backend import config
from sagellm.control_plane import ray_engine
from sagellm.control_plane.contract import ENGINE_SUITE
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.members import RoleServer
from sagellm.control_plane.ray_engine import RayEngine, join_cluster, leave_cluster, made_engine
from sagellm.core.config import read_config
from sagellm.core.errors import ConfigError, EngineError
from sagellm.pd.routing import AlwaysSplit
from tests.control_plane.test_cli import Up
from tests.control_plane.test_gateway import metric
from tests.control_plane.test_real_engines import NUM_PROMPTS, PROMPTS, complete, is_right


@pytest.mark.parametrize(
    ("kind", "options", "address", "words"),
    [
        ("sagellm", {"resources": {"CPU": 1}}, None, "resources needs a ray_address"),
        ("openai", {"url": "http://h:1", "resources": {"CPU": 1}}, "auto", "not for the kind openai"),
        ("sagellm", {"resources": {}}, "auto", "resources is {}; give names and amounts"),
        ("sagellm", {"resources": {"GPU": 1.5}}, "auto", "a whole number, or between 0 and 1"),
        ("sagellm", {"resources": {"GPU": "1"}}, "auto", "give names and amounts, such as"),
    ],
)
def test_resources_that_cannot_work(kind, options, address, words):
    with pytest.raises(ConfigError, match=words):
        made_engine(kind, options, address)


@pytest.mark.parametrize(
    ("address", "words"), [("head", "'head'; give host:port"), ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1")]
)
def test_addresses_that_cannot_work(address, words):
    with pytest.raises(ConfigError, match=words):
        ControlPlaneManager(port=0, ray_address=address).start()


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray_address needs the package ray; install it: pip install 'sagellm\[ray\]'"):
        ControlPlaneManager(port=0, ray_address="auto").start()


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, {"CPU": 1}),
        ({"threads": 2, "tensor_parallel": 2, "device": "cpu"}, {"CPU": 4}),
        ({"device": "cuda", "tensor_parallel": 4}, {"CPU": 4, "GPU": 4}),
        ({"device": "ascend"}, {"CPU": 1, "ascend": 1}),
        ({"tensor_parallel": 2, "distributed_executor_backend": "ray", "ray_address": "auto"}, {"CPU": 1}),
        ({"threads": 2, "resources": {"CPU": 3, "big": 0.5}}, {"CPU": 3, "big": 0.5}),
    ],
)
def test_needs_of_an_engine(options, needs):
    engine = made_engine("sagellm", options, "auto")
    assert isinstance(engine, RayEngine) and engine._resources == needs
    assert not isinstance(made_engine("sagellm", options | {"resources": None}, None), RayEngine)


def test_a_placed_server_gets_address_key_and_cores():
    placed = made_engine("sagellm", {"tensor_parallel": 2, "resources": {"CPU": 6}}, "auto")
    engine = placed._engine
    engine.host = "10.0.0.9"
    command = engine.command(12345)
    found = read_config(Path(command[command.index("--config") + 1]), {})
    assert (found.threads, found.api_key) == (3, (placed.api_key,)) and command[command.index("--host") + 1] == "10.0.0.9"
    asyncio.run(engine.stop())
    placed = made_engine("vllm", {"model": "m", "executable": sys.executable, "device": "cuda"}, "auto")
    assert placed._resources == {"CPU": 1, "GPU": 1} and placed._engine.variables() == {"VLLM_API_KEY": placed.api_key}


def test_an_endpoint_of_others_is_not_placed():
    assert made_engine("openai", {"url": "http://h:1"}, "auto").name == "openai"
    assert not isinstance(made_engine("openai", {"url": "http://h:1"}, "auto"), RayEngine)


@pytest.fixture(scope="module")
def cluster():
    with nodes(3, num_cpus=2) as started:
        yield started


@pytest.fixture
def settings(model_folder):
    return {"kind": "sagellm", "model": str(model_folder("llama")), "model_name": "tiny", "device": "cpu", "kv_blocks": 128,
            "block_size": 16, "resources": {"CPU": 2}, "threads": 1}  # fmt: skip


def on_cluster(cluster, **settings):
    given = {"check_interval_s": 0.2, "ray_address": cluster.address} | settings
    return ControlPlaneManager(port=0, publish=False, **given)


def place(engine):
    """The number of its node in `Nodes`."""
    return number_of(engine["node"])


def is_joined():
    import ray

    return ray.is_initialized()


def wait_for_room(num_cpus=6):
    import ray

    wait_until("all is free again", lambda: ray.available_resources().get("CPU") == num_cpus, 60)


def is_back(manager, name, starts):
    (engine,) = (one for one in manager.engines() if one["name"] == name)
    return engine if (engine["starts"], engine["state"]) == (starts, "ready") else None


@pytest.mark.slow
def test_a_placed_engine_keeps_to_the_contract(cluster, settings):
    join_cluster(cluster.address)
    options = {name: value for name, value in settings.items() if name != "kind"}
    report = ENGINE_SUITE.check(lambda: made_engine("sagellm", options, cluster.address))
    assert not [result for result in report.results if not result.passed]
    wait_for_room()
    leave_cluster()


@pytest.mark.slow
def test_a_cluster_without_room(cluster, settings, monkeypatch):
    with on_cluster(cluster, engines={"a": settings}) as manager:
        monkeypatch.setattr(ray_engine, "NODES_WAIT_S", 1.0)
        options = {name: value for name, value in settings.items() if name != "kind"}
        with pytest.raises(EngineError) as raised:
            manager.register_engine("b", settings["kind"], **options | {"resources": {"CPU": 3, "GPU": 1}})
        words = str(raised.value)
        assert "engine b cannot start: no node of the Ray cluster had CPU 3, GPU 1 free within 1 s" in words
        assert "127.0.0.3 with CPU 2" in words and "free in all are CPU 4" in words and "ray start --address" in words
        assert [one["name"] for one in manager.engines()] == ["a"] and manager.health()["healthy"]
    assert not is_joined()


@pytest.mark.slow
def test_a_node_that_is_lost_under_load_loses_no_request_that_had_sent_nothing(cluster, settings):
    broken = []
    with on_cluster(cluster, engines={"a": settings, "b": settings}) as manager, OpenAI(
        base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        before = {one["name"]: one for one in manager.engines()}
        assert before["a"]["node"] != before["b"]["node"]
        assert all(one["url"].startswith(f"http://{one['node']}:") and one["device"] == "cpu" for one in before.values())
        refused = httpx.post(f"{before['a']['url']}/v1/completions", json={"model": "tiny", "prompt": "p"})
        assert refused.status_code == 401  # the gateway alone has its key
        expected = {prompt: complete(client, prompt) for prompt in PROMPTS}

        lost = next(name for name, one in before.items() if one["node"] != HEAD)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(is_right, client, number, expected, broken) for number in range(60)]
            wait_until("requests on both", lambda: all(one["running"] and one["served"] for one in manager.engines()))
            cluster.kill(place(before[lost]))
            assert all(each.result() for each in asked)
        assert all(f"engine {lost} failed in the middle of this answer" in words for _, words in broken)
        assert metric(manager, "sagellm_gateway_requests_total", engine=lost, outcome="failed") == 0
        again = wait_until("it is back", lambda: is_back(manager, lost, 2), 300)
        assert again["node"] not in (before["a"]["node"], before["b"]["node"]) and again["node"] in again["url"]
        assert not psutil.pid_exists(before[lost]["pid"])
        served = again["served"]
        with concurrent.futures.ThreadPoolExecutor(NUM_PROMPTS) as pool:
            assert list(pool.map(lambda prompt: complete(client, prompt), PROMPTS)) == list(expected.values())
        wait_until("requests there", lambda: is_back(manager, lost, 2)["served"] > served)

        os.kill(again["pid"], signal.SIGKILL)  # the process alone: it comes back in its place
        third = wait_until("it is back", lambda: is_back(manager, lost, 3), 120)
        assert third["node"] == again["node"] and third["pid"] != again["pid"] and "signal 9" in third["why"]
    cluster.add()


@pytest.mark.slow
def test_engines_on_nodes_tell_what_they_have_cached(cluster, settings):
    with on_cluster(cluster, router="prefix", engines={"a": settings, "b": settings}) as manager, OpenAI(
        base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        wait_until("the engines tell", lambda: all("cached_blocks" in one for one in manager.engines()), 60)
        asked = [[(7 * number + 13 * place) % 250 + 3 for place in range(90)] for number in range(4)]
        first = []
        for prompt in asked:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
            first.append(manager.status()["decisions"][-1]["engine"])
        assert set(first) == {"a", "b"}
        wait_until("requests settle", lambda: not any(one["expected_prefixes"] for one in manager.engines()), 60)
        for prompt, engine in zip(asked, first, strict=True):
            client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
            last = manager.status()["decisions"][-1]
            assert (last["engine"], last["reason"]) == (engine, "longest prefix cached")


@pytest.mark.slow
def test_a_machine_that_is_cut_off_loses_no_request_that_had_sent_nothing(cluster, settings):
    with on_cluster(cluster, engines={"a": settings, "b": settings}, check_interval_s=600) as manager, OpenAI(
        base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        expected = [complete(client, prompt) for prompt in PROMPTS]
        lost = next(one for one in manager.engines() if one["node"] != HEAD)
        cluster.freeze(place(lost))
        with concurrent.futures.ThreadPoolExecutor(NUM_PROMPTS) as pool:  # no health check comes; Ray says that it is lost
            assert list(pool.map(lambda prompt: complete(client, prompt), PROMPTS)) == expected
        assert metric(manager, "sagellm_gateway_retries_total", cause="hangs") > 0
        again = wait_until("it is back", lambda: is_back(manager, lost["name"], 2), 300)
        assert again["node"] != lost["node"]
        cluster.kill(place(lost))
    cluster.add()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_manager(cluster, settings, tmp_path, number):
    join_cluster(cluster.address)
    server = Up(tmp_path, {"a": settings, "b": settings}, "--ray-address", cluster.address)
    try:
        pids = [one["pid"] for one in server.ready()["engines"]]
        listed = CliRunner().invoke(main, ["engine", "list", "--json"])
        nodes_of = [one["node"] for one in json.loads(listed.output)]
        assert len(set(nodes_of)) == 2 and all(node.startswith("127.0.0.") for node in nodes_of)
        assert f"a: ready on node {nodes_of[0]}" in CliRunner().invoke(main, ["engine", "status"]).output
        families = [psutil.Process(pid) for pid in pids]
        families += [each for one in families for each in one.children(recursive=True)]
        if number == signal.SIGTERM:
            server.end(number)
        else:
            server.send(number)
        assert len(server.stdout.splitlines()) == 1  # the readiness line; Ray's messages go elsewhere
        assert not psutil.wait_procs(families, timeout=60)[1]
        wait_for_room()
    finally:
        server.kill()
        leave_cluster()


@pytest.mark.slow
def test_workers_of_a_placed_engine_and_a_group(cluster, settings, model_folder):
    two = settings | {"tensor_parallel": 2}
    del two["resources"]
    apart = two | {"distributed_executor_backend": "ray", "ray_address": cluster.address, "resources": {"CPU": 1}}
    flags = ["--device", "cpu", "--threads", "1", "--kv-blocks", "64", "--block-size", "16", "--model-name", "split"]
    group = {"kind": "group", "model": settings["model"], "flags": flags}
    others = {"two": two | {"model_name": "two"}, "apart": apart | {"model_name": "apart"}, "split": group}
    with on_cluster(cluster, engines={"one": settings | {"model_name": "one"}}) as manager, OpenAI(
        base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:

        def answer(name):
            return client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=8, temperature=0).choices[0].text

        for name, options in others.items():
            found = manager.register_engine(name, options.pop("kind"), **options)
            assert answer(name) == answer("one")
            assert bool(found["node"]) == (name != "split")  # its engines have nodes, the group has none
            manager.unregister_engine(name)


def engines_of(manager):
    return {one["name"]: one for one in manager.engines() if one["group"]}


class InTurn(AlwaysSplit):
    """Lets the decoding engines take turns. Policies of the package may send all requests where their prompts are cached."""

    name = "in-turn"

    def __init__(self):
        super().__init__()
        self._num_chosen = 0

    def choose(self, request, engines):
        decoders = [one for one in engines if one.role != "prefill"]
        self._num_chosen += 1
        taken = decoders[self._num_chosen % len(decoders)]
        return super().choose(request, [one for one in engines if one.role == "prefill" or one is taken])


@pytest.mark.slow
def test_engines_of_a_group_run_on_nodes_and_one_that_is_lost_comes_back(cluster, settings):
    flags = ["--device", "cpu", "--kv-blocks", "128", "--block-size", "16", "--model-name", "tiny", "--threads", "1"]
    group = {"engine": "group", "model": settings["model"], "flags": flags, "resources": {"CPU": 2}}
    group["policy"] = f"{__name__}:{InTurn.__name__}"
    broken = []
    with on_cluster(cluster, engines={"one": settings | {"resources": {"CPU": 1}}}) as manager, OpenAI(
        base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        expected = {prompt: complete(client, prompt) for prompt in PROMPTS}
        manager.unregister_engine("one")
        wait_for_room()
        manager.register_engine("split", decode=2, **group)
        before = engines_of(manager)
        assert len({one["node"] for one in before.values()}) == 3, "each needs all cores of a node"
        assert all(one["url"].startswith(f"http://{one['node']}:") for one in before.values())
        assert [complete(client, prompt) for prompt in PROMPTS] == list(expected.values())
        pages = [httpx.get(f"{one['url']}/metrics").text for one in before.values() if one["role"] == "decode"]
        assert sum(float(re.search(r"^sagellm_pd_transfer_bytes_total (\S+)", page, re.M)[1]) for page in pages) > 0

        lost = next(name for name, one in before.items() if one["role"] == "decode" and one["node"] != HEAD)
        is_killed = threading.Event()

        def ask(number):
            """Keep asking, so that the engine has requests at the moment of its death."""
            right = [is_right(client, number, expected, broken)]
            while not is_killed.is_set():
                right.append(is_right(client, number, expected, broken))
            return all(right)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, number) for number in range(8)]
            try:
                wait_until("requests there", lambda: engines_of(manager)[lost]["running"])
                cluster.kill(place(before[lost]))
            finally:
                is_killed.set()
            assert all(each.result() for each in asked)
        cluster.add()
        again = wait_until("it is back", lambda: is_back(manager, lost, 2), 300)
        assert again["node"] not in {one["node"] for one in before.values()}
        assert [complete(client, prompt) for prompt in PROMPTS] == list(expected.values())
        manager.unregister_engine("split")
        wait_for_room()


@pytest.mark.slow
def test_a_cluster_without_room_for_a_group(cluster, settings, monkeypatch):
    group = {"model": settings["model"], "flags": ["--device", "cpu"], "resources": {"CPU": 2}, "decode": 3}
    with on_cluster(cluster) as manager:
        monkeypatch.setattr(ray_engine, "NODES_WAIT_S", 1.0)
        with pytest.raises(EngineError, match="the nodes of the Ray cluster had no 4 times CPU 2 free within 1 s"):
            manager.register_engine("split", "group", **group)
        assert manager.engines() == []
        wait_for_room()


def test_a_group_on_a_cluster_that_cannot_work(settings):
    with pytest.raises(ConfigError, match="pin keeps engines on cores of this machine"):
        made_engine("group", {"model": settings["model"], "prefill": 1, "pin": True}, "auto")
    with pytest.raises(ConfigError, match="resources is 5; give names and amounts"):
        made_engine("group", {"model": settings["model"], "resources": 5}, "auto")


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ([], {"CPU": 1}),
        (["--threads", "3", "--tensor-parallel=2", "--device", "cpu"], {"CPU": 6}),
        (["--device=cuda", "--threads", "many"], {"CPU": 1, "GPU": 1}),
    ],
)
def test_needs_of_an_engine_of_a_group(flags, needs):
    assert RoleServer("decode", ["serve"], flags, b"key", 1, (), "http://h:1").resources() == needs


def test_the_gateway_of_a_group_on_other_machines(monkeypatch):
    places = ray_engine.GroupPlaces(None)
    monkeypatch.setattr(ray_engine.GroupPlaces, "host", "10.0.0.9")
    places.check_gateway("http://10.0.0.9:8000")
    with pytest.raises(ConfigError, match=r"which other machines cannot reach. Give host: 10.0.0.9, or 0.0.0.0"):
        places.check_gateway("http://127.0.0.1:8000")
