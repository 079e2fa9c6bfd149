"""An engine in the manager's process on the demo model: its answers, its end, and errors in it."""

import gc
import itertools
import json
import os
import signal
import threading
import weakref

import httpx
import psutil
import pytest
from openai import APIError, OpenAI

from benchmarks.processes import can_listen, wait_until
from sagellm import UnifiedInferenceClient
from sagellm.control_plane.contract import ENGINE_SUITE
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.ray_engine import made_engine
from sagellm.core.errors import ConfigError
from sagellm.demo_model import ensure_demo_model
from tests.control_plane.test_cli import Up, run
from tests.control_plane.test_contract import broken
from tests.control_plane.test_gateway import metric

pytestmark = [  # LMDeploy's server is loaded here
    pytest.mark.filterwarnings(r"ignore:\s*on_event is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]
OF_OTHERS = {"PYTEST_CURRENT_TEST", "XDG_CACHE_HOME", "SAGELLM_URL", "TORCHINDUCTOR_CACHE_DIR"}  # of pytest, fixtures and torch
ASKED = "Write a function `add`."
SETTINGS = {"device": "cpu", "threads": 1, "kv_blocks": 128, "block_size": 16, "max_batch_size": 4, "place": "manager"}



@pytest.fixture(scope="module")
def spec():
    return {"kind": "sagellm", "model": str(ensure_demo_model()), "model_name": "demo"} | SETTINGS


@pytest.fixture(scope="module")
def before():
    """Threads and variables of this process before the manager."""
    return set(threading.enumerate()), dict(os.environ)


@pytest.fixture(scope="module")
def manager(spec, before):
    settings = {"port": 0, "publish": False, "check_interval_s": 0.1, "drain_timeout_s": 5.0, "wait_s": 60.0}
    with ControlPlaneManager(engines={"here": spec}, **settings) as manager:
        yield manager


@pytest.fixture
def client(manager):
    with client_of(manager.url) as client:
        yield client


@pytest.fixture
def room(manager, spec):
    """No engine is in this process meanwhile."""
    manager.unregister_engine("here")
    yield
    manager.register_engine("here", "sagellm", **options_of(spec))


def client_of(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def the_engine():
    """LMDeploy's `AsyncEngine` of the server in this process."""
    from lmdeploy.serve.openai.api_server import VariableInterface

    return VariableInterface.async_engine


def complete(client, prompt, num=16, **more):
    options = {"model": "demo", "max_tokens": num, "temperature": 0, "extra_body": {"ignore_eos": True}} | more
    return client.completions.create(prompt=prompt, **options)


def texts(stream):
    return "".join(each.choices[0].text for each in stream if each.choices)


def answers(client):
    """Answers of each kind, without ids and times."""
    chat = {"model": "demo", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 12}
    streamed = client.chat.completions.create(**chat, stream=True, temperature=0)
    found = [
        client.chat.completions.create(**chat, temperature=0, logprobs=True, top_logprobs=2),
        complete(client, ["def add(", "class A"], n=2, temperature=0.9, seed=5),
        complete(client, "def ", logprobs=1, echo=True),
        complete(client, "x = ", num=40, stop=["\n"], extra_body={}),
        client.chat.completions.create(**chat, temperature=0, response_format={"type": "json_object"}),
    ]
    said = [[choice.model_dump() for choice in each.choices] + [each.usage.total_tokens] for each in found]
    vectors = [each.embedding for each in client.embeddings.create(model="demo", input=["a b", ASKED]).data]
    return said, vectors, "".join(each.choices[0].delta.content or "" for each in streamed)  # pieces go by moments


@pytest.mark.slow
def test_answers_are_those_of_an_engine_that_is_a_process(manager, client, spec):
    with ControlPlaneManager(port=0, publish=False, engines={"there": spec | {"place": "process"}}) as other:
        with client_of(other.url) as asked:
            theirs = answers(asked)
        there = other.engines()[0]
    assert answers(client) == theirs
    here = manager.engines()[0]
    assert (here["pid"], here["place"]) == (os.getpid(), "manager") and there["pid"] != os.getpid()
    for name in ("models", "routes", "capabilities", "device", "kind"):
        assert here[name] == there[name]


def test_it_streams_and_is_asked_for_its_state(manager, client):
    whole = complete(client, "def add(a, b):").choices[0].text
    assert whole and texts(complete(client, "def add(a, b):", stream=True)) == whole
    wait_until("its load", lambda: {"running", "waiting", "kv_use"} <= manager.engines()[0]["load"].keys())
    assert manager.health() | {"share": 1.0} == {"healthy": True, "why": "", "engines": {"here": "ready"}, "share": 1.0}
    served = {"engine": "here", "outcome": "served"}
    wait_until("its requests", lambda: metric(manager, "sagellm_gateway_requests_total", **served) >= 2)
    pages = httpx.get(manager.engines()[0]["url"] + "/metrics").text
    assert 'sagellm_kv_blocks{state="active"} 0.0' in pages and "lmdeploy:generation_tokens_total" in pages
    assert 'sagellm_control_engine_load{engine="here"' in httpx.get(f"{manager.url}/metrics").text


@pytest.mark.parametrize(("options", "says"), [
    ({}, "this process has an engine already, and LMDeploy allows one. Start the other one as a process"),
    ({"place": "nowhere"}, "place is 'nowhere'; allowed are process and manager"),
    ({"kind": "openai", "url": "http://127.0.0.1:1"}, "place manager is not for the kind openai"),
    ({"resources": {"CPU": 1}}, "place manager is not for resources"),
    ({"tensor_parallel": 2, "sot_workers": 1}, "tensor_parallel 2, sot_workers 1: an engine in the manager's process is"),
    ({"restart_workers": True}, "restart_workers True: an engine in the manager.s process is a PyTorch engine"),
])  # fmt: skip
def test_what_cannot_be_there(manager, spec, options, says):
    wanted = ({} if "kind" in options else spec) | {"place": "manager"} | options
    with pytest.raises(ConfigError, match=says):
        manager.register_engine("other", wanted.pop("kind"), **wanted)
    assert manager.health()["engines"] == {"here": "ready"}


def test_a_pool_has_engines_that_are_processes(spec):
    with pytest.raises(ConfigError, match="scaling.a: a process has one engine with place manager; leave place out"):
        ControlPlaneManager(port=0, publish=False, engines={"a": spec}, scaling={"a": {"max": 2}}).start()


def fail(after):
    """Let the engine of this process fail in a step, after so many steps."""
    executor = the_engine().engine.executor
    forward, left = executor.forward_async, [after]

    async def planted(inputs):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("planted")
        return await forward(inputs)

    executor.forward_async = planted


def test_an_error_in_the_engine_ends_it_alone_and_it_starts_again(manager, client):
    whole = complete(client, "while True:", num=20).choices[0].text
    starts = manager.engines()[0]["starts"]
    fail(after=0)
    assert complete(client, "while True:", num=20).choices[0].text == whole, "nothing was sent, so it waits for the next start"
    first = manager.engines()[0]
    assert first["starts"] == starts + 1 and first["why"] == "the engine has stopped working; its log says why."
    fail(after=5)
    got = ""
    with pytest.raises(APIError, match="engine here failed in the middle of this answer.*the engine has stopped"):
        for each in complete(client, "while True:", num=20, stream=True):
            got += each.choices[0].text
    assert got and whole.startswith(got) and got != whole
    wait_until("its next start", lambda: manager.engines()[0]["starts"] == starts + 2)
    assert complete(client, "while True:", num=20).choices[0].text == whole


def test_it_is_drained_and_leaves_nothing_and_is_registered_again(manager, client, spec, before):
    whole = complete(client, "for i in", num=100).choices[0].text
    url = manager.engines()[0]["url"]
    others, variables = before
    names = {one.name for one in set(threading.enumerate()) - others}
    assert {"sagellm-control", "sagellm-embedded", "sagellm-cpu-step"} <= names
    left = [weakref.ref(one) for one in (the_engine(), the_engine().engine, the_engine().engine.executor.model_agent)]
    stream = iter(complete(client, "for i in", num=100, stream=True))
    text = next(stream).choices[0].text
    gc.freeze()  # as `sagellm up` does once its engines serve
    endless = (f"[a-z]{{{number}}}" for number in itertools.count(1))
    the_engine().engine.scheduler.sage.grammars.compile_ahead(endless)
    manager.drain_engine("here")
    assert manager.health()["engines"] == {"here": "draining"}
    manager.unregister_engine("here")
    assert text + texts(stream) == whole, "a request that it has ends first"
    assert can_listen(int(url.rpartition(":")[2])) and the_engine() is None
    assert [one() for one in left] == [None] * 3
    assert [one.name for one in set(threading.enumerate()) - others] == ["sagellm-control"]
    now = {name: value for name, value in os.environ.items() if name not in OF_OTHERS}
    assert now == {name: value for name, value in variables.items() if name not in OF_OTHERS}
    assert manager.register_engine("here", "sagellm", **options_of(spec))["state"] == "ready"
    assert complete(client, "for i in", num=100).choices[0].text == whole


def options_of(spec):
    return {name: value for name, value in spec.items() if name != "kind"}


@pytest.mark.slow
def test_a_stream_that_outlasts_the_grace_ends_with_an_error(manager, client, spec):
    stream = iter(complete(client, "import ", num=1500, stream=True))
    next(stream)
    manager.unregister_engine("here", drain_s=0.0)
    with pytest.raises(APIError, match="the server is shutting down"):
        texts(stream)
    manager.register_engine("here", "sagellm", **options_of(spec))


@pytest.mark.slow
def test_the_command_has_it_in_its_process_and_ends_in_order(spec, tmp_path):
    server = Up(tmp_path, {"here": spec})
    try:
        assert server.ready()["engines"][0]["pid"] == server.process.pid
        url = ("--url", server.url)
        assert run("infer", ASKED, "--max-tokens", "4", *url).exit_code == 0
        held = psutil.Process(server.process.pid).num_threads()
        assert run("engine", "stop", "here", *url).exit_code == 0
        wait_until("the end of its threads", lambda: psutil.Process(server.process.pid).num_threads() < held)
        options = json.dumps(options_of(spec))
        again = run("engine", "start", spec["model"], "--name", "again", "--options", options, *url)
        assert again.exit_code == 0 and "again serves demo" in again.output
        server.end(signal.SIGTERM)
        assert "Traceback" not in server.stderr
    finally:
        server.kill()


@pytest.mark.slow
def test_it_keeps_to_the_contract_of_engine_kinds(room, spec):
    assert not broken(ENGINE_SUITE.check(lambda: made_engine("sagellm", options_of(spec), None)))


@pytest.mark.slow
def test_the_client_starts_it_and_leaves_no_thread(room, spec):
    before = set(threading.enumerate())
    with UnifiedInferenceClient.create(**options_of(spec)) as client:
        assert client.chat(ASKED, max_tokens=4)
        assert client._manager.engines()[0]["place"] == "manager"
    assert not set(threading.enumerate()) - before and the_engine() is None
