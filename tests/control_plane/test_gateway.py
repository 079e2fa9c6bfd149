"""Requests at the gateway: relayed, retried, limited, refused; engines that fail, hang and come back."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from html.parser import HTMLParser

import httpx
import psutil
import pytest

from benchmarks.processes import wait_until
from sagellm.control_plane.relay import as_openai
from tests.control_plane.endpoint import Endpoint, Paced

PATH = "/v1/completions"
CHROMIUM = shutil.which("chromium")


def ask(manager, key=None, path=PATH, **fields):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "m", "prompt": "p", "max_tokens": 3} | fields
    return httpx.post(manager.url + path, json=body, headers=headers, timeout=20)


def texts(answer):
    """The tokens of a stream, in order."""
    events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]" and "error" not in event]


def metric(manager, name, **labels):
    return manager._fleet.metrics.registry.get_sample_value(name, labels) or 0.0


def wait_for_outcome(manager, engine, outcome):
    """A client may have its answer before it is counted."""
    labels = {"engine": engine, "outcome": outcome}
    wait_until(f"{labels}", lambda: metric(manager, "sagellm_gateway_requests_total", **labels) == 1)


def state(manager, name):
    return manager.health()["engines"][name]


def test_a_stream_is_relayed_byte_for_byte_and_at_once(start_manager):
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url + "/v1", api_key="of the engine")
        engine.is_gated = True
        body = {"model": "m", "prompt": "p", "max_tokens": 3, "stream": True}
        headers = {"Authorization": "Bearer of the client", "X-Other": "kept"}
        got = b""
        engine.gate()  # the headers come with the first token
        with httpx.stream("POST", manager.url + PATH, json=body, headers=headers, timeout=20) as answer:
            chunks = answer.iter_raw()
            for number in range(3):  # a token comes before the engine may send the next
                if number:
                    engine.gate()
                while b"p%d" % number not in got:
                    got += next(chunks)
            got += b"".join(chunks)
        assert answer.headers["content-type"] == "text/event-stream"
        engine.is_gated = False
        assert got == httpx.post(engine.url + PATH, json=body).content
        sent = engine.seen[0]
        assert sent["headers"]["authorization"] == "Bearer of the engine" and sent["headers"]["x-other"] == "kept"
        assert sent["body"] == body


FAILED = {"status": (500, '{"error": {"message": "no memory"}}', "application/json")}


@pytest.mark.parametrize(
    ("trouble", "stream"), [({"cut": 0}, True), ({"error": 0}, True), (FAILED, True), (FAILED, False)],
    ids=["connection", "error event", "status of a stream", "status"],
)
def test_a_request_goes_elsewhere_while_nothing_of_its_answer_was_sent(start_manager, trouble, stream):
    manager = start_manager(router="order", router_options={"order": ["bad", "good"]})
    with Endpoint() as bad, Endpoint() as good:
        manager.register_engine("bad", "openai", url=bad.url, device="bad")
        manager.register_engine("good", "openai", url=good.url, device="good")
        bad.trouble = trouble
        answer = ask(manager, stream=stream)
        assert answer.status_code == 200 and len(bad.seen) == len(good.seen) == 1
        assert texts(answer) == ["p0", "p1", "p2"] if stream else answer.json()["by"] == good.url
        assert [one["engine"] for one in manager.status()["decisions"]] == ["bad", "good"]
        wait_for_outcome(manager, "good", "served")


@pytest.mark.parametrize(("trouble", "says"), [({"cut": 2}, "was lost"), ({"error": 2}, "out of memory")])
def test_a_stream_that_has_begun_ends_with_an_error(start_manager, trouble, says):
    manager = start_manager()
    with Endpoint() as bad, Endpoint() as other:
        manager.register_engine("bad", "openai", url=bad.url)
        bad.trouble = trouble
        manager.register_engine("other", "openai", url=other.url)
        answer = ask(manager, stream=True)
        assert texts(answer) == ["p0", "p1"] and not other.seen
        error = json.loads(answer.text.split("data: ")[-1])["error"]
        assert "engine bad failed in the middle of this answer" in error["message"] and says in error["message"]
        assert "[DONE]" not in answer.text
        wait_for_outcome(manager, "bad", "broken")


def test_an_engine_that_hangs_loses_its_requests_to_others(start_manager, monkeypatch):
    import aiohttp

    monkeypatch.setattr("sagellm.control_plane.probe.TIMEOUT", aiohttp.ClientTimeout(total=1.0))
    manager = start_manager()
    with Endpoint() as one, Endpoint() as other:
        manager.register_engine("a", "openai", url=one.url)
        manager.register_engine("b", "openai", url=other.url)
        one.trouble = {"hang": True}
        answer = ask(manager)
        assert answer.json()["by"] == other.url and len(one.seen) == 1
        wait_until("its state", lambda: state(manager, "a") in ("failed", "restarting"))
        assert manager.health()["healthy"] and manager.health()["share"] < 1
        one.trouble = {}
        wait_until("its return", lambda: state(manager, "a") == "ready")


def test_requests_wait_for_an_engine_that_comes_back(start_manager):
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        engine.down()
        wait_until("its state", lambda: state(manager, "a") == "failed")
        assert httpx.get(manager.url + "/health").status_code == 503
        threading.Timer(0.3, engine.up).start()
        assert ask(manager).status_code == 200
        assert "cannot be reached" in manager.engines()[0]["why"]


def test_without_an_engine_a_request_is_told_so(start_manager):
    manager = start_manager(wait_s=0.2)
    answer = ask(manager)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert "none is registered" in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request_at_the_engine(start_manager):
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        engine.is_gated = True
        engine.gate()
        body = {"model": "m", "prompt": "p", "stream": True}
        with httpx.stream("POST", manager.url + PATH, json=body, timeout=20) as answer:
            next(answer.iter_raw())
        wait_until("the end at the engine", lambda: engine.num_left == 1)
        wait_for_outcome(manager, "a", "client left")
        assert manager.engines()[0]["running"] == 0


def test_a_client_that_leaves_at_the_end_of_a_stream_was_served(start_manager):
    """Clients close the connection when they read the mark of the end."""
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        engine.trouble["linger"] = 0.3
        body = {"model": "m", "prompt": "p", "stream": True}
        with httpx.stream("POST", manager.url + PATH, json=body, timeout=20) as answer:
            assert next(line for line in answer.iter_lines() if "[DONE]" in line)
        wait_for_outcome(manager, "a", "served")
        assert engine.num_left == 0


def test_keys_and_their_limits(start_manager):
    manager = start_manager(api_key=["open", {"key": "narrow", "max_running": 1}])
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        for key in (None, "unknown"):
            assert ask(manager, key).status_code == 401 and not engine.seen
            assert httpx.get(manager.url + "/control/engines").status_code == 401
        engine.is_gated = True
        body = {"model": "m", "prompt": "p", "stream": True, "max_tokens": 1}
        headers = {"Authorization": "Bearer narrow"}
        with contextlib.ExitStack() as stack:
            task = threading.Thread(target=lambda: httpx.post(manager.url + PATH, json=body, headers=headers, timeout=20))
            task.start()
            stack.callback(task.join)
            stack.callback(engine.gate)
            wait_until("the first request", lambda: engine.seen)
            refused = ask(manager, "narrow")
            assert refused.status_code == 429 and "1 requests of this key" in refused.json()["error"]["message"]
            assert ask(manager, "open").status_code == 200
            assert not any("authorization" in one["headers"] for one in engine.seen), "keys of clients are not the engine's"
        assert ask(manager, "narrow").status_code == 200  # its first one has ended
        assert httpx.get(manager.url + "/v1/models", headers=headers).json()["data"][0]["id"] == "m"


def test_models_and_routes_are_those_of_all_engines(start_manager):
    manager = start_manager()
    with Endpoint("m") as text, Endpoint("m", ("/v1/embeddings",)) as vectors, Endpoint("n") as other:
        for name, engine in (("text", text), ("vectors", vectors), ("other", other)):
            manager.register_engine(name, "openai", url=engine.url)
        assert [one["id"] for one in httpx.get(manager.url + "/v1/models").json()["data"]] == ["m", "n"]
        assert ask(manager).json()["by"] == text.url and ask(manager, model="n").json()["by"] == other.url
        assert ask(manager, path="/v1/embeddings", input="x").json()["data"][0]["embedding"] == [1.0]
        for fields, path, status, says in (
            ({"model": "x"}, PATH, 404, "served are m, n"), ({"model": None}, PATH, 400, "names no model"),
            ({"model": "n"}, "/v1/embeddings", 404, "no engine of the model n has /v1/embeddings"),
        ):  # fmt: skip
            answer = ask(manager, path=path, **fields)
            assert answer.status_code == status and says in answer.json()["error"]["message"]
        assert httpx.get(manager.url + PATH).status_code == 405
        assert httpx.get(manager.url + "/nothing").status_code == 404
        bad = httpx.post(manager.url + PATH, content="no JSON")
        assert bad.status_code == 400 and "not JSON" in bad.json()["error"]["message"]


@pytest.mark.parametrize(("content", "says", "code"), [
    ('{"error": {"message": "a", "type": "BadRequestError", "param": "n", "code": 40001}}', "a", 40001),  # vLLM's
    ('{"object": "error", "message": "b", "type": "invalid", "code": 40002, "param": null}', "b", 40002),  # LMDeploy's
    ('{"detail": [{"loc": ["body", "n"], "msg": "not a number"}]}', "body.n: not a number", 418),  # FastAPI's
    ('{"detail": "c"}', "c", 418), ('{"error": "d"}', "d", 418), ("plain", "plain", 418), ("", "the engine answered 418", 418),
])  # fmt: skip
def test_errors_of_all_engines_have_one_form(content, says, code):
    status, body, media = as_openai(418, content.encode(), "text/plain")
    error = json.loads(body)["error"]
    assert (status, media) == (418, "application/json") and (error["message"], error["code"]) == (says, code)
    assert set(error) == {"message", "type", "param", "code"}


def test_an_error_of_an_engine_reaches_the_client_in_that_form(start_manager):
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        engine.trouble = {"status": (422, '{"detail": "too long"}', "application/json")}
        answer = ask(manager)
        assert answer.status_code == 422 and answer.json()["error"]["message"] == "too long"
        engine.trouble = {"status": (500, '{"detail": "broken"}', "application/json")}
        answer = ask(manager)  # no other engine has it, so it is asked again
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "broken"


def test_a_drained_engine_finishes_and_gets_nothing_new(start_manager):
    manager = start_manager(wait_s=0.2)
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        engine.is_gated = True
        found = []
        task = threading.Thread(target=lambda: found.append(ask(manager, stream=True, max_tokens=2)))
        task.start()
        wait_until("the request", lambda: engine.seen)
        manager.drain_engine("a")
        assert state(manager, "a") == "draining" and ask(manager).status_code == 503
        ending = threading.Thread(target=manager.unregister_engine, args=("a", 30.0))
        ending.start()
        ending.join(0.3)
        assert ending.is_alive(), "the engine is ended while it has a request"
        engine.gate()
        engine.gate()
        task.join()
        ending.join()
        assert texts(found[0]) == ["p0", "p1"] and "[DONE]" in found[0].text and manager.engines() == []


def test_the_end_of_the_manager_ends_streams_with_an_error(start_manager):
    manager = start_manager(drain_timeout_s=0.2)
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        engine.is_gated = True
        engine.gate()
        found = []
        task = threading.Thread(target=lambda: found.append(ask(manager, stream=True)))
        task.start()
        wait_until("the first token", lambda: manager._fleet.metrics.registry.get_sample_value(
            "sagellm_gateway_first_byte_seconds_count", {"kind": ""}))  # fmt: skip
        manager.stop()
        task.join()
        assert texts(found[0]) == ["p0"] and "the gateway is ending" in found[0].text


def test_a_process_that_dies_is_started_again_and_ends_with_the_manager(start_manager):
    manager = start_manager()
    manager.register_engine("a", Paced())
    first = manager.engines()[0]["pid"]
    os.kill(first, signal.SIGKILL)
    assert ask(manager, model="paced").status_code == 200
    (engine,) = manager.engines()
    assert engine["starts"] == 2 and engine["pid"] != first and "signal 9" in engine["why"]
    manager.stop()
    assert not psutil.pid_exists(engine["pid"]) and manager.stop_s > 0


def test_the_page_and_its_figures(start_manager):
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url, device="cuda")
        ask(manager)
        page = httpx.get(manager.url + "/ui")
        assert page.headers["content-type"].startswith("text/html") and "Recent decisions" in page.text
        found = httpx.get(manager.url + "/control/engines").json()
        (one,) = found["engines"]
        assert (one["name"], one["device"], one["state"], one["served"]) == ("a", "cuda", "ready", 1)
        assert found["decisions"][0]["reason"] == "least load" and found["models"] == {"m": ["a"]}
        wait_until("a health check", lambda: metric(
            manager, "sagellm_control_health_checks_total", engine="a", result="ok"))  # fmt: skip
        text = httpx.get(manager.url + "/metrics").text
        for name in ("sagellm_control_start_seconds", 'sagellm_control_register_seconds{engine="a"}',
                     "sagellm_control_health_share 1.0", 'sagellm_control_engines{state="ready"} 1.0'):  # fmt: skip
            assert name in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt install chromium")
def test_the_page_in_a_browser(start_manager, tmp_path):
    """It shows what /control/engines says, as text: a name of a client is no HTML. With keys it asks for one."""
    manager = start_manager()
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url, device="cuda")
        manager.register_engine("<b>b", "openai", url=engine.url)
        manager.drain_engine("<b>b")
        ask(manager)
        shown = page_of(manager, tmp_path)
    (heads, first, second), routes, decisions = (shown[name] for name in ("engines", "routes", "decisions"))
    assert heads[:6] == ["engine", "group", "role", "kind", "state", "device"] and len(first) == len(second) == len(heads)
    assert first[:7] == ["a", "", "hybrid", "openai", "ready", "cuda", "0"] and first[heads.index("served")] == "1"
    assert second[:5] == ["<b>b", "", "hybrid", "openai", "draining"]
    assert routes[1:] == [["m", "a, <b>b"]]
    assert decisions[1][1:5] == ["m", PATH, "a", "least-load: least load"]
    assert "1 of health" not in shown["facts"] and "100% of health checks succeeded" in shown["facts"] and shown["note"] == ""
    guarded = start_manager(api_key="k")
    shown = page_of(guarded, tmp_path)
    assert "API key is missing" in shown["note"] and shown["engines"] == []


def page_of(manager, folder):
    """Return what a browser shows: by id, rows of cells of a table, and the text of anything else."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server", f"--user-data-dir={folder / 'browser'}",
        "--virtual-time-budget=3000", "--dump-dom", manager.url + "/ui",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    reader = PageReader()
    reader.feed(done.stdout)
    return reader.found


class PageReader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self._id = {}, None

    def handle_starttag(self, tag, attributes):
        if "id" in (given := dict(attributes)):
            self._id = given["id"]
            self.found[self._id] = [] if tag == "table" else ""
        elif self._id is None:
            return
        elif tag == "tr":
            self.found[self._id].append([])
        elif tag in ("td", "th"):
            self.found[self._id][-1].append("")

    def handle_endtag(self, tag):
        if tag in ("table", "p"):
            self._id = None

    def handle_data(self, data):
        if self._id is None or not data.strip():
            return
        if isinstance(self.found[self._id], list):
            self.found[self._id][-1][-1] += data
        else:
            self.found[self._id] += data


def test_decisions_and_ends_are_recorded(start_manager, tmp_path):
    file = tmp_path / "lines.jsonl"
    manager = start_manager(record=file)
    with Endpoint() as engine:
        manager.register_engine("a", "openai", url=engine.url)
        ask(manager)
        wait_for_outcome(manager, "a", "served")
    route, end = (json.loads(line) for line in file.read_text().splitlines())
    assert (route["event"], route["engine"], route["reason"]) == ("route", "a", "least load")
    assert (end["event"], end["outcome"], end["attempts"]) == ("end", "served", 1) and end["first_byte_s"] > 0
