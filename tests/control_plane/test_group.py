"""A prefill/decode group inside the manager: its engines, their health, load and routes are those of the manager."""

import asyncio
import concurrent.futures
import json
import os
import signal
import sys
from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner

from benchmarks.processes import ServerProcess, free_port, wait_until
from sagellm.cli import main
from sagellm.comm_backend.control import new_key, sign_request
from sagellm.control_plane.base import EngineState, ScalingDecision, ScalingPolicy, totals
from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.kinds.group import PDGroup
from sagellm.control_plane.manager import ControlPlaneManager
from sagellm.control_plane.members import JoiningMember
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.registry import make_engine
from sagellm.control_plane.routers.least_load import LeastLoad
from sagellm.core.config import read_model
from sagellm.core.errors import ConfigError, EngineError, PolicyError
from sagellm.pd.group import Group
from tests.control_plane.test_gateway import ask, metric, texts
from tests.pd.below import KEY, Below, soon
from tests.pd.stand_in import tokens_of

LONG = "a prompt of some length " * 20


class StandIns(PDGroup):
    """A group whose engines compute nothing."""

    name = "stand-ins"
    engine = (sys.executable, "-m", "tests.pd.stand_in")


class Told(ScalingPolicy):
    """As many engines of each role as the test says."""

    name = "told"
    engines = {"prefill": 1, "decode": 1}  # noqa: RUF012

    def decide(self, view):
        return ScalingDecision(self.engines[view.role], f"{view.num_running} are running")


KIND, POLICY = "tests.control_plane.test_group:StandIns", "tests.control_plane.test_group:Told"


def rows(manager):
    return {one["name"]: one for one in manager.engines()}


def states(manager):
    return {name: str(one["state"]) for name, one in rows(manager).items()}


def routes(manager):
    """Decisions inside the group, the oldest first."""
    return [one for one in manager.status()["decisions"] if one.get("group")]


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def settings(model_folder):
    return {"kind": KIND, "model": str(model_folder("llama")), "policy": "always-split", "flags": ["--model-name", "m"]}


@pytest.fixture(scope="module")
def manager(settings, tmp_path_factory):
    record = tmp_path_factory.mktemp("group") / "record.jsonl"
    pool = {"policy": POLICY, "max": 2, "interval_s": 0.2, "cooldown_s": 0.0, "down_after": 1}
    with ControlPlaneManager(
        port=0, publish=False, check_interval_s=0.05, drain_timeout_s=2.0, wait_s=60.0, record=record,
        engines={"split": settings}, scaling={"split-decode": pool, "split-prefill": pool},
    ) as manager:  # fmt: skip
        yield manager


def test_the_engines_of_a_group_are_engines_of_the_manager(manager):
    found = [(one["name"], one["group"], one["role"], one["state"]) for one in manager.engines()]
    assert found == [
        ("split", "", "hybrid", "ready"), ("split-prefill-1", "split", "prefill", "ready"),
        ("split-decode-1", "split", "decode", "ready"),
    ]  # fmt: skip
    assert manager.status()["models"] == {"m": ["split"]}, "a router may choose the group alone"
    shown = CliRunner().invoke(main, ["engine", "list", "--json", "--url", manager.url])
    assert [one["role"] for one in json.loads(shown.output)] == ["hybrid", "prefill", "decode"]
    told = CliRunner().invoke(main, ["engine", "status", "--url", manager.url]).output
    assert "split-decode-1, decode engine of split: ready" in told


def test_a_request_goes_to_both_engines_and_the_manager_says_why(manager):
    before = {name: one["served"] for name, one in rows(manager).items()}
    answer = ask(manager, prompt=LONG)
    assert text_of(answer) == "".join(tokens_of(LONG, 3)) and answer.json()["loaded"]
    chosen = routes(manager)[-1]
    assert (chosen["engine"], chosen["prefill_on"]) == ("split-decode-1", "split-prefill-1")
    assert (chosen["router"], chosen["reason"]) == ("always-split", "split")
    assert chosen["detail"].startswith("split-prefill-1 then split-decode-1: ") and "bytes moved" in chosen["detail"]
    wait_until("its count", lambda: all(one["served"] == before[name] + 1 for name, one in rows(manager).items()))
    line = json.loads([line for line in manager.config.record.read_text().splitlines() if '"prefill_on"' in line][-1])
    kind = manager._fleet.engines["split"].kind
    assert line["event"] == "route" and line["kind"] == "split" and kind.named(line["reason"]) == chosen["detail"]
    urls = [rows(manager)[name]["url"] for name in ("split-decode-1", "split-prefill-1")]
    assert [line["decode_on"], line["prefill_on"]] == urls
    told = {"engine": "split-decode-1", "router": "always-split", "reason": "split"}
    assert metric(manager, "sagellm_gateway_choices_total", **told) >= 1
    stream = ask(manager, prompt=LONG, stream=True)
    assert texts(stream) == tokens_of(LONG, 3) and "[DONE]" in stream.text


def test_the_load_of_a_group_is_that_of_its_engines(manager):
    """Requests and sums of the engines that decode, as the router and `/metrics` have them; a new process begins at 0."""
    assert [text_of(ask(manager, prompt=LONG)) for _ in range(3)]
    num = len(routes(manager))  # each has gone to the only engine that decodes
    expected = {"running": 0, "kv_use": 0.5} | dict.fromkeys(totals(""), num)
    wait_until("its load", lambda: [rows(manager)[name]["load"] for name in ("split", "split-decode-1")] == [expected] * 2)
    (view,) = manager._fleet.candidates("m", "/v1/completions")
    assert (view.engine_id, view.kv_use) == ("split", 0.5)
    page = httpx.get(f"{manager.url}/metrics").text
    for labels in ('engine="split",figure="ended",group="",role="hybrid"',
                   'engine="split-decode-1",figure="ended",group="split",role="decode"'):  # fmt: skip
        assert f"sagellm_control_engine_load{{{labels}}} {num:.1f}" in page


def test_what_clients_must_not_say(manager):
    refused = ask(manager, prompt="a", migration_request={"protocol": 1})
    assert refused.status_code == 400 and "migration_request is said by the proxy alone" in refused.json()["message"]


def test_a_prompt_that_fails_is_computed_where_it_is_decoded(manager):
    failed = rows(manager)["split-prefill-1"]["failed"]
    answer = ask(manager, prompt=LONG, stand_in={"status": 500, "on": ["prefill"]})
    assert text_of(answer) == "".join(tokens_of(LONG, 3)) and not answer.json()["loaded"]
    assert rows(manager)["split-prefill-1"]["failed"] == failed + 1
    told = {"engine": "split-prefill-1", "cause": "status 500"}
    assert metric(manager, "sagellm_gateway_prefill_failures_total", **told) == 1


def scaled(manager, what):
    lines = map(json.loads, manager.config.record.read_text().splitlines())
    return sorted(line["engine"] for line in lines if line["event"] == "scaled" and line["what"] == what)


def test_engines_come_and_go_and_no_stream_is_lost(manager):
    """An engine of each role is added, and taken away while streams run on it: they end whole."""
    first, new = ["split-decode-1", "split-prefill-1"], ["split-decode-2", "split-prefill-2"]
    begun, slow = len(routes(manager)), {"delay_s": 0.1, "on": ["decode"]}

    def stream(number):
        prompt = f"{number} {LONG}"
        answer = ask(manager, prompt=prompt, stream=True, max_tokens=80, stand_in=slow)
        return texts(answer) == tokens_of(prompt, 80) and "[DONE]" in answer.text

    Told.engines = {"prefill": 2, "decode": 2}
    wait_until("two engines of each role", lambda: [states(manager).get(name) for name in new] == ["ready"] * 2, 60)
    wait_until("their pairs", lambda: all(
        len(one["connected"]) == 2 for one in httpx.get(f"{manager.url}/pd/status").json()["engines"] if one["role"] == "decode"
    ))  # fmt: skip
    retries = metric(manager, "sagellm_gateway_retries_total", cause="status 503")
    for name in ("split-decode-1", new[0]):  # an engine that fails at once loses its request to the other one
        answer = ask(manager, prompt=LONG, stand_in={"status": 503, "on": [rows(manager)[name]["url"]]})
        assert text_of(answer) == "".join(tokens_of(LONG, 3))
    assert metric(manager, "sagellm_gateway_retries_total", cause="status 503") > retries

    def both_compute_prompts():
        """Two prompts at once, which are computed slowly: the second one goes to the engine with nothing to do."""
        held = {"delay_s": 0.3, "on": ["prefill"]}
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda number: ask(manager, prompt=f"pair {number} {LONG}", stand_in=held), range(2)))
        return {one["prefill_on"] for one in routes(manager)[begun:]} >= {first[1], new[1]}

    wait_until("prompts on both prefill engines", both_compute_prompts)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream, number) for number in range(4)]
        decoders = ("split-decode-1", new[0])
        wait_until("two on each", lambda: [rows(manager)[name]["running"] for name in decoders] == [2, 2])
        Told.engines = {"prefill": 1, "decode": 1}
        wait_until("its drain", lambda: states(manager)[new[0]] == "draining")
        assert rows(manager)[new[0]]["running"], "no stream ran when it was drained"
        last = len(routes(manager))
        streams += [threads.submit(stream, number) for number in range(4, 8)]  # the other engine has more to do soon
        wait_until("their routes", lambda: len(routes(manager)) == last + 4)
        assert {one["engine"] for one in routes(manager)[last:]} == {"split-decode-1"}
        assert all(each.result() for each in streams)
    used = {one[name] for one in routes(manager)[begun:last] for name in ("engine", "prefill_on")}
    assert used == {*first, *new}
    wait_until("their ends", lambda: not set(new) & set(states(manager)), 60)
    assert states(manager) == dict.fromkeys(("split", *first), "ready")
    assert scaled(manager, "started") == new and scaled(manager, "stopped") == new
    lines = map(json.loads, manager.config.record.read_text().splitlines())
    views = [line["view"] for line in lines if line["event"] == "scale" and line["view"]["role"] == "prefill"]
    assert sum(round(view["rate"] * view["interval_s"]) for view in views) >= 4, "its rate is that of its prompts"
    found = wait_until("the pool", lambda: manager.status()["scaling"]["split-decode"]["engines"] == first[:1])
    assert found


def test_engines_that_die_are_seen_and_started_again_and_their_requests_wait(manager):
    def ended(name):
        return rows(manager)[name]["load"].get("ended", 0)

    assert [text_of(ask(manager, prompt=LONG)) for _ in range(3)]
    num, first = wait_until("its sums", lambda: ended("split") > 2 and ended("split")), rows(manager)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        slow = {"delay_s": 0.1, "on": ["decode"]}
        stream = threads.submit(ask, manager, prompt=LONG, stream=True, max_tokens=1000, stand_in=slow)
        wait_until("its begin", lambda: rows(manager)["split-decode-1"]["running"])
        wait_until("the prompt", lambda: rows(manager)["split-prefill-1"]["running"] == 0)
        os.kill(first["split-decode-1"]["pid"], signal.SIGKILL)
        error = json.loads(stream.result(60).text.split("data: ")[-1])["error"]["message"]
    assert "engine split-decode-1 failed in the middle of this answer" in error
    wait_until("their states", lambda: states(manager)["split-decode-1"] in ("failed", "restarting"))
    assert states(manager)["split"] == "failed" and "no engine of the group decodes" in rows(manager)["split"]["why"]
    assert httpx.get(f"{manager.url}/health").status_code == 503
    answer = ask(manager, prompt=LONG)  # it waits for the engine
    assert text_of(answer) == "".join(tokens_of(LONG, 3))
    again = rows(manager)
    assert again["split-decode-1"]["starts"] == 2 and "signal 9" in again["split-decode-1"]["why"]
    assert again["split-decode-1"]["pid"] != first["split-decode-1"]["pid"]
    assert again["split-prefill-1"]["pid"] == first["split-prefill-1"]["pid"]
    assert again["split-decode-1"]["url"] == first["split-decode-1"]["url"]
    wait_until("sums of the new process", lambda: ended("split-decode-1") < num)
    assert [text_of(ask(manager, prompt=LONG)) for _ in range(5)]
    wait_until("a sum that goes on", lambda: ended("split") >= num + 6)
    wait_until("a pair", lambda: ask(manager, prompt=LONG).json().get("loaded"), 60)


def signed(manager, path, key, **body):
    content = json.dumps(body).encode() if body else b""
    method = "POST" if body else "GET"
    headers = sign_request(key, method, path, content)
    return httpx.request(method, manager.url + path, content=content, headers=headers, timeout=30)


def test_an_engine_that_somebody_else_starts_joins_by_the_key_of_the_group(manager, settings, tmp_path):
    file, port = manager._fleet.engines["split"].kind.key_file, free_port()
    key, url = file.read_bytes(), f"http://127.0.0.1:{port}"
    assert httpx.post(f"{manager.url}/nodes/remove", json={"url": url}).status_code == 401
    unknown = signed(manager, "/nodes/add", new_key(), url=url)
    assert unknown.status_code == 401 and "same --pd-key-file" in unknown.json()["error"]
    nothing = signed(manager, "/nodes/add", key, url=url)
    assert nothing.status_code == 503 and "cannot be asked who it is" in nothing.json()["error"]
    words = ["--role", "decode", "--proxy-url", manager.url, "--pd-key-file", file, "--model", settings["model"]]
    engine = ServerProcess(
        [*StandIns.engine, *words, "--model-name", "m", "--host", "127.0.0.1", "--port", port], port, tmp_path
    )
    try:
        wait_until("its place", lambda: states(manager).get("split-decode-2") == "ready", 60)
        assert url in signed(manager, "/nodes/status", key).json() and "pid" not in rows(manager)["split-decode-2"]
        slow = {"delay_s": 0.05, "on": ["decode"]}
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(ask, manager, prompt=LONG, max_tokens=40, stand_in=slow) for _ in range(2)]
            wait_until("a request there", lambda: rows(manager)["split-decode-2"]["running"])
            assert [text_of(each.result()) for each in streams] == ["".join(tokens_of(LONG, 40))] * 2
        engine.kill()
        wait_until("its end", lambda: states(manager)["split-decode-2"] in ("failed", "restarting"))
        assert "control connection" in rows(manager)["split-decode-2"]["why"] and text_of(ask(manager, prompt=LONG))
        engine.start()
        wait_until("its return", lambda: states(manager)["split-decode-2"] == "ready", 90)
    finally:
        engine.kill()
    assert signed(manager, "/nodes/remove", key, url=url).status_code == 200
    assert "split-decode-2" not in states(manager)


def test_an_engine_that_is_silent_below_a_healthy_server_is_given_up():
    """The one health check of the manager sees it, and ends its requests."""

    async def play():
        peers, fleet = Group(KEY, silent_s=0.3), Fleet(LeastLoad(), GatewayMetrics(), 0.05)
        below, owner = Below("decode"), SimpleNamespace(title="g", peers=peers)
        await peers.start()
        await fleet.start()
        await below.start()
        try:
            engine = await fleet.register("g-decode-1", JoiningMember(owner, "decode", below.url))
            await soon("checks", lambda: engine.status()["healthy_checks"] > 5)
            assert engine.state is EngineState.READY
            hangs, below.is_silent = engine.hangs, True
            await soon("its state", lambda: engine.state in (EngineState.FAILED, EngineState.RESTARTING))
            assert hangs.is_set() and "answered nothing for 0.3 s" in engine.why and not peers.engines
            below.is_silent = False
            await soon("its return", lambda: engine.state is EngineState.READY)
            assert not engine.hangs.is_set() and list(peers.engines) == [below.url]
        finally:
            await fleet.stop()
            await peers.close()
            await below.close()

    asyncio.run(play())


@pytest.mark.parametrize(("options", "says"), [
    ({"decode": 0}, "no engine decodes"), ({"prefill": -1}, "prefill is -1; give a number of engines from 0 to 64"),
    ({"flags": ["--role", "decode"]}, "--role is set for each engine by its group"),
    ({"policy": "x"}, "unknown routing policy"),
    ({"model": "/nowhere"}, "/nowhere: there is no such folder"), ({"pin": True, "prefill": 64}, "65 engines for"),
])  # fmt: skip
def test_options_that_make_no_sense(options, says):
    with pytest.raises((ConfigError, PolicyError), match=says):
        make_engine("group", **options)


@pytest.mark.parametrize(("flags", "says"), [
    (["--fail-with", "it does not fit"], "engine split cannot start: engine split-.* cannot start: it does not fit"),
    pytest.param(["--weights", "random"], "cannot start: split-decode-1 does not load from split-prefill-1: .* weights random-",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_a_group_that_cannot_start_says_why(start_manager, settings, flags, says):
    manager = start_manager()
    options = settings | {"flags": [*settings["flags"], *flags]}
    with pytest.raises(EngineError, match=says):
        manager.register_engine("split", options.pop("kind"), **options)
    assert manager.engines() == []


@pytest.mark.parametrize(("name", "engine"), [
    ("a-decode", {"kind": "openai", "url": "http://127.0.0.1:9"}), ("a-all", {"kind": "group", "model": "demo"}),
])  # fmt: skip
def test_scaling_of_what_is_no_role_of_a_group(name, engine):
    with pytest.raises(ConfigError, match="is no engine of"):
        scaling = {name: {"max": 2, "policy": "fixed"}}
        read_model(ManagerConfig, None, {"engines": {"a": engine}, "scaling": scaling})
        ControlPlaneManager(port=0, publish=False, engines={"a": engine}, scaling=scaling).start()
