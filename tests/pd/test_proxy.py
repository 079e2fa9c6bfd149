"""The proxy as a process among stand-in engines: real HTTP, real control connections, real deaths."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sagellm.comm_backend.control import new_key
from tests.pd.harness import TestGroup, until
from tests.pd.stand_in import tokens_of

LONG = "a prompt of some length " * 20


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A prefill and a decode engine behind a proxy that always splits."""
    folder = tmp_path_factory.mktemp("split")
    group = TestGroup(folder, folder, "--policy", "always-split", "--wait-s", "8")
    try:
        group.prefill, group.decode = group.start_engine("prefill"), group.start_engine("decode")
        group.proxy.ready()
        group.connected(2, 1)
        yield group
    finally:
        group.close()


@pytest.fixture
def own(tmp_path):
    """`own(*options)`: a proxy for one test."""
    groups = []

    def start(*options):
        groups.append(TestGroup(tmp_path, tmp_path, *options))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def answer(prompt, num=4):
    return "".join(tokens_of(prompt, num))


def test_a_split_request_goes_to_both_engines_at_once(split):
    done = split.complete(LONG, temperature=0.5, tenant="me", stream_options=None, min_new_tokens=2).json()
    assert done["choices"][0]["text"] == answer(LONG) and done["loaded"]
    first, second = split.seen(split.prefill)[-1], split.seen(split.decode)[-1]
    body = second["body"]
    assert body.pop("migration_request") == {
        "protocol": 1, "remote_engine_id": split.prefill, "remote_token_id": 0, "remote_block_ids": [],
        "remote_session_id": first["body"]["migration_request"]["remote_session_id"],
    }  # fmt: skip
    # Fields that LMDeploy's models do not know arrive as they were sent.
    sent = {"temperature": 0.5, "tenant": "me", "stream_options": None, "min_new_tokens": 2}
    assert body == {"model": "m", "prompt": LONG, "max_tokens": 4} | sent
    copy = first["body"]
    assert copy["migration_request"]["remote_engine_id"] == split.decode
    assert 0 <= copy["migration_request"]["remote_session_id"] < 2**63
    assert (copy["max_tokens"], copy["stream"], copy["with_cache"], copy["preserve_cache"]) == (1, False, True, True)
    # It draws a token as the request asks for it, which the decoding engine may take.
    assert (copy["tenant"], copy["temperature"], copy["min_new_tokens"]) == ("me", 0.5, 1) and "stream_options" not in copy
    line = split.lines("route")[-1]
    assert (line["kind"], line["decode_on"], line["prefill_on"]) == ("split", split.decode, split.prefill)
    assert "bytes moved" in line["reason"] and line["is_estimate"]
    assert split.metric("sagellm_proxy_decisions_total", kind="split") >= 1


def test_each_transfer_has_an_id_of_its_own(split):
    for _ in range(3):
        split.complete(LONG)
    ids = [each["body"]["migration_request"]["remote_session_id"] for each in split.seen(split.decode)[-3:]]
    assert len(set(ids)) == 3


def test_streams_come_token_by_token(split):
    times = []
    with split.http.stream("POST", "/v1/completions", json={
        "model": "m", "prompt": LONG, "max_tokens": 4, "stream": True, "stand_in": {"delay_s": 0.6, "on": ["decode"]}
    }) as response:  # fmt: skip
        texts = []
        for line in response.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
                texts.append(line[6:])
    assert texts[-1] == "[DONE]" and "".join(json.loads(text)["choices"][0]["text"] for text in texts[:-1]) == answer(LONG)
    assert times[-2] - times[0] > 0.5  # not all at the end: three delays of 0.6 s lie between the tokens


def test_an_error_event_of_an_engine_is_told_as_its_failure(split):
    failures = split.metric("sagellm_proxy_failures_total", side="decode", cause="mid-stream")
    body = {"model": "m", "prompt": LONG, "max_tokens": 8, "stream": True}
    text = split.http.post("/v1/completions", json=body | {"stand_in": {"error_after": 3, "delay_s": 0.05}}).text
    assert answer(LONG, 3)[:4] in text and "[DONE]" not in text and text.count('"error":') == 1
    last = json.loads(text.strip().rsplit("data: ", 1)[1])
    assert "failed in the middle of this answer (the engine has stopped)" in last["error"]["message"]
    assert split.metric("sagellm_proxy_failures_total", side="decode", cause="mid-stream") == failures + 1
    # Before the first token nothing was shown, so the request is sent again.
    retries = split.metric("sagellm_proxy_retries_total", cause="error event")
    split.http.post("/v1/completions", json=body | {"stand_in": {"error_after": 0, "on": ["decode"]}})
    assert split.metric("sagellm_proxy_retries_total", cause="error event") > retries


def test_headers_pass_and_signatures_of_clients_do_not(split):
    headers = {"Authorization": "Bearer mine", "x-sagellm-priority": "3", "x-sage-signature": "v1 forged"}
    split.http.post("/v1/completions", json={"model": "m", "prompt": "x y", "max_tokens": 1}, headers=headers)
    for url in (split.prefill, split.decode):
        seen = split.seen(url)[-1]["headers"]
        assert seen["authorization"] == "Bearer mine" and seen["x-sagellm-priority"] == "3"
        assert seen["x-sage-signature"] != "v1 forged"


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[1]", 400, "the body is a JSON list; send an object"),
        (b'{"model": "m", "prompt": "a", "migration_request": {"protocol": 1}}', 400, "migration_request is said by the proxy"),
        (b'{"model": "m", "prompt": "a", "with_cache": true}', 400, "with_cache is said by the proxy"),
        (b'{"model": "other", "prompt": "a"}', 404, "The model 'other' does not exist; served are m."),
    ],
)
def test_bad_requests_reach_no_engine(split, content, status, words):
    before = len(split.seen(split.decode))
    found = split.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert found.status_code == status and words in found.json()["error"]["message"]
    assert len(split.seen(split.decode)) == before


def test_a_refusal_of_the_engine_is_the_clients_answer(split):
    found = split.complete(LONG, stand_in={"status": 422, "on": ["decode"]})
    assert found.status_code == 422 and found.json()["error"]["message"] == "asked for"


def test_a_prefill_engine_that_fails_is_not_the_clients_problem(split):
    before = split.metric("sagellm_proxy_failures_total", side="prefill", cause="status 500")
    found = split.complete("p q r", stand_in={"status": 500, "on": ["prefill"]})
    assert found.status_code == 200 and found.json()["choices"][0]["text"] == answer("p q r") and not found.json()["loaded"]
    assert split.metric("sagellm_proxy_failures_total", side="prefill", cause="status 500") == before + 1
    # The transfer was given up at once, so that the decoding engine did not wait for its deadline.
    transfer = split.seen(split.decode)[-1]["body"]["migration_request"]["remote_session_id"]
    assert transfer in httpx.get(f"{split.prefill}/released").json()


def test_a_prompt_that_would_come_too_late_stays(split):
    """The decoding engine tells how long it waits: 5 s. A token takes 1 ms, by what is measured as by what holds before."""
    prompt = "a b " * 6000
    assert split.complete(prompt).json()["choices"][0]["text"] == answer(prompt)
    line = split.lines("route")[-1]
    assert line["kind"] == "stay" and f"{split.prefill} would be too late: 0 s of work wait there" in line["reason"]
    assert f"{split.decode} waits 5 s" in line["reason"]
    # One that would be in time by itself is not behind others that wait there.
    half = "c d " * 2600
    before = len(split.seen(split.prefill))
    body = {"model": "m", "prompt": "e f " * 2600, "stand_in": {"hang_s": 60}}
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(split.url).port)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        until("it is there", lambda: len(split.seen(split.prefill)) > before)
        assert not split.complete(half).json()["loaded"]
        line = split.lines("route")[-1]
        assert line["kind"] == "stay" and "would be too late" in line["reason"] and ": 0 s of work" not in line["reason"]
    until("its client has left", lambda: split.metric("sagellm_proxy_running_requests") == 0)
    assert split.complete(half).json()["loaded"]


def test_several_prompts_are_not_split(split):
    split.http.post("/v1/completions", json={"model": "m", "prompt": ["a b c d e", "b"], "max_tokens": 1})
    line = split.lines("route")[-1]
    assert line["kind"] == "stay" and "it cannot be split" in line["reason"]


def test_a_client_that_leaves_ends_the_request_on_both_sides(split):
    body = {"model": "m", "prompt": LONG, "max_tokens": 100}
    slow = body | {"stream": True, "stand_in": {"delay_s": 0.2, "on": ["decode"]}}
    with split.http.stream("POST", "/v1/completions", json=slow) as response:
        next(response.iter_lines())
    until("the decoding engine sees it", lambda: "cancelled" in split.seen(split.decode)[-1], 15)
    # While its prompt is computed, before any byte: nothing of it runs on in the proxy.
    with pytest.raises(httpx.ReadTimeout):
        split.http.post("/v1/completions", json=body | {"stand_in": {"hang_s": 20, "on": ["prefill"]}}, timeout=1.0)
    until("nothing runs", lambda: split.metric("sagellm_proxy_running_requests") == 0, 15)
    assert split.lines("end")[-1]["outcome"] == "client left"


def test_only_who_has_the_key_changes_the_registry(split):
    body = json.dumps({"url": split.decode}).encode()
    for path in ("/nodes/remove", "/nodes/add"):
        found = split.http.post(path, content=body, headers={"content-type": "application/json"})
        assert found.status_code == 401 and "not signed" in found.json()["error"]
        assert split.signed("POST", path, body, new_key()).status_code == 401
    assert len(split.status()["engines"]) == 2


def test_an_engine_that_is_none_does_not_join(split):
    body = json.dumps({"url": "http://127.0.0.1:9", "status": {"models": ["m"], "role": 3}}).encode()
    found = split.signed("POST", "/nodes/add", body)
    assert found.status_code == 503 and "cannot be asked who it is" in found.json()["error"]


def test_an_engine_joins_under_its_own_url_alone(split):
    body = json.dumps({"url": split.decode.replace("127.0.0.1", "localhost")}).encode()
    found = split.signed("POST", "/nodes/add", body)
    assert found.status_code == 409 and f"says that it is {split.decode}" in found.json()["error"]


def test_lmdeploys_own_endpoints_answer(split):
    assert [one["id"] for one in split.http.get("/v1/models").json()["data"]] == ["m"]
    nodes = split.http.get("/nodes/status").json()
    assert {url: node["role"] for url, node in nodes.items()} == {split.prefill: 2, split.decode: 3}
    assert split.http.post("/distserve/connection_warmup").status_code in (404, 405)


@pytest.mark.slow
def test_decode_engines_that_die_are_replaced_and_streams_end_with_words(own):
    group = own("--policy", "tests.pd.harness:Lowest")
    first, second = sorted([group.start_engine("decode"), group.start_engine("decode")])  # all come to the first that lives
    group.proxy.ready()
    group.connected(2, 0)
    # Nothing was shown to the client yet, so the request is sent again unnoticed.
    # The engine dies before the answer begins, and then in the middle of it.
    for number, after in enumerate((0, 2)):
        done = group.complete(LONG, stand_in={"die_after": after, "on": [first]})
        assert done.status_code == 200 and done.json()["choices"][0]["text"] == answer(LONG)
        assert group.engines[first].process.wait(10) == 9 and len(group.seen(second)) == number + 1
        assert group.metric("sagellm_proxy_retries_total", cause="connection lost") == number + 1
        group.engines[first].kill()
        group.engines[first].start()
        group.engines[first].ready()
        group.connected(2, 0)
    # A stream that has begun cannot be taken back.
    body = {"model": "m", "prompt": LONG, "max_tokens": 8, "stream": True, "stand_in": {"die_after": 3, "delay_s": 0.05}}
    text = group.http.post("/v1/completions", json=body).text
    assert answer(LONG, 3)[:4] in text and "[DONE]" not in text
    last = json.loads(text.strip().rsplit("data: ", 1)[1])
    assert "failed in the middle of this answer" in last["error"]["message"]
    assert group.metric("sagellm_proxy_failures_total", side="decode", cause="mid-stream") == 1
    until("it has left", lambda: [one["engine_id"] for one in group.status()["engines"]] == [second])
    assert group.complete(LONG).json()["choices"][0]["text"] == answer(LONG) and len(group.seen(second)) == 3
    assert group.metric("sagellm_proxy_retries_total", cause="connection lost") == 2


@pytest.mark.slow
def test_an_engine_that_hangs_is_given_up_and_its_requests_with_it(own):
    """It lives and keeps its connections: nothing but its silence says so."""
    group = own("--policy", "never-split")
    first = group.start_engine("decode")
    group.proxy.ready()
    group.connected(1, 0)
    body = {"model": "m", "prompt": LONG, "max_tokens": 1000, "stream": True, "stand_in": {"delay_s": 0.05}}
    with ThreadPoolExecutor(1) as pool, group.http.stream("POST", "/v1/completions", json=body) as stream:
        pieces = stream.iter_text()
        text = next(pieces)
        whole = pool.submit(group.complete, LONG, stand_in={"hang_s": 3, "on": [first]})
        until("both have come to it", lambda: len(group.seen(first)) == 2)
        group.engines[first].process.send_signal(signal.SIGSTOP)
        group.start_engine("decode")
        text += "".join(pieces)
        assert whole.result(60).json()["choices"][0]["text"] == answer(LONG)
    assert "does not answer any more" in text and "[DONE]" not in text
    assert group.metric("sagellm_proxy_retries_total", cause="hangs") == 1


@pytest.mark.slow
def test_a_request_that_ends_every_engine_does_not_meet_them_for_ever(own):
    group = own("--policy", "never-split", "--wait-s", "5")
    group.start_engine("hybrid")
    group.proxy.ready()
    group.connected(1, 0)
    found = group.complete(LONG, stand_in={"status": 503})
    assert found.status_code == 503 and found.json()["error"]["message"] == "asked for"
    assert group.lines("end")[-1]["attempts"] == 5


@pytest.mark.slow
def test_without_an_engine_that_decodes(own):
    group = own("--wait-s", "1")
    group.proxy.ready()
    found = group.complete()
    assert found.status_code == 503 and "no engine has joined" in found.json()["error"]["message"]
    assert found.headers["retry-after"] == "5"
    group.start_engine("prefill")
    group.connected(1, 0)
    found = group.complete()
    assert found.status_code == 503 and "only prefill engines have joined" in found.json()["error"]["message"]
    assert group.metric("sagellm_proxy_requests_total", outcome="no engine") == 2


@pytest.mark.slow
def test_requests_wait_for_an_engine_that_comes(own):
    group = own("--wait-s", "30")
    group.proxy.ready()
    url = group.start_engine("decode")  # joins a second or so after the request
    assert group.complete(LONG).json()["choices"][0]["text"] == answer(LONG)
    group.engines[url].kill()
    until("it leaves at once", lambda: not group.status()["engines"], 3)


@pytest.mark.slow
def test_a_pair_that_does_not_fit_is_kept_apart(own):
    group = own("--policy", "always-split")
    prefill, decode = group.start_engine("prefill", "--weights", "w2"), group.start_engine("decode")
    group.proxy.ready()

    def refused():
        found = {one["engine_id"]: one["refused"] for one in group.status()["engines"]}
        return found.get(decode)

    assert "has weights w, not w2" in until("a refusal", refused)[prefill]
    assert group.complete(LONG).json()["choices"][0]["text"] == answer(LONG)
    assert group.lines("route")[-1]["kind"] == "stay"


@pytest.mark.slow
def test_a_prefill_engine_that_comes_back_is_connected_again(own):
    group = own("--policy", "always-split")
    prefill, _ = group.start_engine("prefill"), group.start_engine("decode")
    group.proxy.ready()
    group.connected(2, 1)
    group.engines[prefill].kill()
    assert not group.complete(LONG).json()["loaded"]
    group.engines[prefill].start()
    group.connected(2, 1)
    assert group.complete(LONG).json()["loaded"]


@pytest.mark.slow
def test_a_proxy_that_is_killed_and_started_again_has_its_engines(own):
    group = own("--policy", "always-split")
    group.start_engine("prefill"), group.start_engine("decode")
    group.proxy.ready()
    group.connected(2, 1)
    group.proxy.kill()
    group.proxy.start()
    group.proxy.ready()
    group.connected(2, 1)
    assert group.complete(LONG).json()["loaded"]


@pytest.mark.slow
def test_running_requests_end_before_the_proxy_does(own):
    group = own("--policy", "never-split")
    group.start_engine("decode")
    group.proxy.ready()
    group.connected(1, 0)
    body = {"model": "m", "prompt": LONG, "max_tokens": 8, "stream": True, "stand_in": {"delay_s": 0.2}}
    with group.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        group.proxy.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert group.proxy.process.wait(10) == 0


@pytest.mark.slow
def test_clients_need_the_api_key_and_engines_do_not(own):
    group = own("--api-key", "secret")
    group.start_engine("decode")
    group.proxy.ready()
    group.connected(1, 0)
    assert group.complete().status_code == 401
    assert group.http.get("/pd/status").status_code == 401
    group.http.headers["Authorization"] = "Bearer secret"
    assert group.complete().status_code == 200


@pytest.mark.slow
def test_prompts_follow_what_engines_have_cached(own, model_folder):
    group = own("--policy", "pd", "--model", str(model_folder("llama")))
    group.model = model_folder("llama")
    decoders = [group.start_engine("hybrid", "--tokenizer") for _ in range(2)]
    group.proxy.ready()
    group.connected(2, 0)
    prompts = [f"{number} {LONG}" for number in range(4)]
    for prompt in prompts:
        assert group.complete(prompt).status_code == 200
    until("events", lambda: sum(one["cached_blocks"] for one in group.status()["engines"]) >= 4 * 20, 5)
    places = [line["decode_on"] for line in group.lines("route")]
    for prompt in prompts:
        group.complete(prompt)
    again = group.lines("route")[4:]
    assert [line["decode_on"] for line in again] == places
    for line in again:  # all but what does not fill a block, where it was computed
        assert line["cached"][line["decode_on"]] == (line["tokens"] - 1) // 16 * 16
        assert not line["is_estimate"]
    assert set(places) <= set(decoders)
