"""Priority, tenant, deadline and latency targets: how they are read, what is refused, and that they reach the engine."""

import asyncio
import copy
import json
import pickle
import socket
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.service import LONGEST_MS, ServiceRequest
from sagellm.serve.generation import GuardedGeneration
from sagellm.serve.parameters import Refused
from sagellm.serve.service import ALLOWED, HEADERS, LONGEST_WAIT_S, SERVICE, take_service
from tests.serve.harness import ServerProcess, wait_until

ASK = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SECONDS_TO_COME = 3600

WRONG = {
    "priority 101": ({"priority": 101}, "priority is 101; allowed: a whole number from -100 to 100"),
    "priority -101": ({"priority": -101}, "priority is -101"),
    "priority a fraction": ({"priority": 1.5}, "priority is 1.5; allowed: a whole number"),
    "priority a text": ({"priority": "5"}, 'priority is "5"; allowed: a whole number'),
    "priority true": ({"priority": True}, "priority is true"),
    "priority a list": ({"priority": [1]}, "priority is a list"),
    "priority of many digits": ({"priority": 10**400}, "priority is 1000"),
    "tenant with a space": ({"tenant": "a b"}, 'tenant is "a b"; allowed: up to 64 of the letters'),
    "tenant with a line": ({"tenant": "a\n"}, 'tenant is "a\\n"'),
    "tenant in other letters": ({"tenant": "\u00e4"}, 'tenant is "\\u00e4"'),
    "tenant too long": ({"tenant": "a" * 65}, "tenant is"),
    "tenant a number": ({"tenant": 5}, "tenant is 5"),
    "deadline past": ({"deadline": 1.5}, "deadline is 1.5; allowed: Unix time in seconds, later than now"),
    "deadline below 0": ({"deadline": -5}, "deadline is -5"),
    "deadline in milliseconds": ({"deadline": 4_000_000_000_000}, "deadline is 4000000000000; allowed"),
    "deadline of many digits": ({"deadline": 10**400}, "deadline is 1000"),
    "deadline endless": ('{"deadline": 1e999}', "deadline is Infinity"),
    "deadline a text": ({"deadline": "2999-01-01"}, 'deadline is "2999-01-01"'),
    "ttft 0": ({"ttft_slo_ms": 0}, "ttft_slo_ms is 0; allowed: a number of milliseconds above 0"),
    "ttft -1": ({"ttft_slo_ms": -1.0}, "ttft_slo_ms is -1.0"),
    "ttft of days": ({"ttft_slo_ms": LONGEST_MS + 1}, f"at most {LONGEST_MS}"),
    "tpot 0": ({"tpot_slo_ms": 0}, "tpot_slo_ms is 0"),
    "tpot false": ({"tpot_slo_ms": False}, "tpot_slo_ms is false"),
    "tpot an object": ({"tpot_slo_ms": {}}, "tpot_slo_ms is an object"),
    "two at once": ({"priority": 500, "tenant": "!"}, 'priority is 500; allowed: a whole number from -100 to 100, lower is '),
}
WRONG_HEADERS = {
    "priority a fraction": ([("x-sagellm-priority", "1.0")], {}, 'priority is "1.0"'),
    "priority empty": ([("x-sagellm-priority", "")], {}, 'priority is ""'),
    "priority with underscores": ([("x-sagellm-priority", "1_0")], {}, 'priority is "1_0"'),
    "priority 101": ([("X-SageLLM-Priority", "101")], {}, "priority is 101"),
    "priority of many digits": ([("x-sagellm-priority", "9" * 5000)], {}, 'priority is "999'),
    "priority twice": ([("x-sagellm-priority", "1"), ("x-sagellm-priority", "2")], {}, "is there twice, as 1 and 2"),
    "tenant": ([("x-sagellm-tenant", "a b")], {}, 'tenant is "a b"'),
    "deadline past": ([("x-sagellm-deadline", "1700000000.5")], {}, "deadline is 1700000000.5"),
    "deadline endless": ([("x-sagellm-deadline", "inf")], {}, 'deadline is "inf"'),
    "ttft": ([("x-sagellm-ttft-slo-ms", "-3")], {}, "ttft_slo_ms is -3"),
    "tpot": ([("x-sagellm-tpot-slo-ms", "soon")], {}, 'tpot_slo_ms is "soon"'),
    "unknown": ([("x-sagellm-prio", "1")], {}, "there is no header \"x-sagellm-prio\"; known are x-sagellm-priority"),
    "another in the body": ([("x-sagellm-priority", "1")], {"priority": 2}, "is 2 in the body and 1 in the header"),
    "another tenant": ([("x-sagellm-tenant", "a")], {"tenant": "b"}, 'is "b" in the body and "a" in the header'),
}


def read(body, headers=()):
    """The request as it would come out at the engine, and what is left of the body."""
    body = dict(body)
    text = take_service(body, [(name.encode(), value.encode("latin-1")) for name, value in headers])
    return text if text is None else ServiceRequest.model_validate_json(text), body


@st.composite
def services(draw):
    """Fields of a request, any of them left out."""
    milliseconds = st.one_of(st.integers(1, LONGEST_MS), st.floats(0.001, LONGEST_MS).map(lambda x: round(x, 3)))
    letters = "abzABZ09_.:@-"
    known = {
        "priority": st.integers(-100, 100),
        "tenant": st.text(letters, max_size=64),
        "deadline": st.integers(60, LONGEST_WAIT_S - 60).map(lambda wait: int(time.time()) + wait),
        "ttft_slo_ms": milliseconds,
        "tpot_slo_ms": milliseconds,
    }
    return {name: draw(known[name]) for name in draw(st.sets(st.sampled_from(sorted(known))))}


@given(services(), st.data())
def test_from_body_and_headers_the_same_comes_out(fields, data):
    in_headers = data.draw(st.sets(st.sampled_from(sorted(fields)))) if fields else set()
    doubled = data.draw(st.sets(st.sampled_from(sorted(in_headers)))) if in_headers else set()
    body = {name: value for name, value in fields.items() if name not in in_headers or name in doubled}
    headers = [(name, str(fields[field])) for name, field in HEADERS.items() if field in in_headers]
    asked, rest = read({"model": "m", **body}, [*headers, ("user-agent", "x")])
    expected = ServiceRequest(**fields)
    assert rest == {"model": "m"}
    assert asked == (None if expected == ServiceRequest() else expected)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=80), st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from(sorted(ALLOWED)), JUNK), st.dictionaries(st.sampled_from(sorted(HEADERS)), st.text(
    st.characters(max_codepoint=255), max_size=30)))
def test_whatever_comes_is_read_or_refused(body, headers):
    """A request that is let through stands in every range, so that the engine can rely on it."""
    try:
        asked, rest = read(body, headers.items())
    except Refused as refused:
        assert (refused.status == 400 and "; allowed: " in str(refused)) or "send " in str(refused)
        return
    assert rest == {}
    if asked is not None:
        assert -100 <= asked.priority <= 100 and type(asked.priority) is int
        assert not asked.is_past() and asked.level() is not None


def test_every_field_has_a_header_and_a_range():
    assert set(ALLOWED) == set(HEADERS.values()) == set(ServiceRequest.model_fields)


def test_what_is_no_header_of_ours_is_left_alone():
    assert read({}, [("x-priority", "!"), ("x-sage", "!"), ("authorization", "Bearer x")]) == (None, {})


def test_nothing_is_asked_by_a_field_that_says_what_holds_anyway():
    assert read({"priority": 0, "tenant": ""}) == (None, {})


@pytest.mark.parametrize("name", WRONG)
def test_bodies_that_are_refused(name):
    fields, words = WRONG[name]
    with pytest.raises(Refused) as caught:
        read(json.loads(fields) if isinstance(fields, str) else fields)
    assert words in str(caught.value) and caught.value.status == 400
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_headers_that_are_refused(name):
    headers, body, words = WRONG_HEADERS[name]
    with pytest.raises(Refused) as caught:
        read(body, [(header.lower(), value) for header, value in headers])
    assert words in str(caught.value) and caught.value.status == 400


def test_it_outlives_what_happens_to_the_configuration_of_a_generation():
    """Stop words have it replaced, LMDeploy copies it, and sends it to another process."""
    from lmdeploy.messages import GenerationConfig

    seen = []

    async def generate(messages, session_id, gen_config=None):
        seen.append(pickle.loads(pickle.dumps(copy.deepcopy(gen_config))))
        yield SimpleNamespace(response="", finish_reason="stop", generate_token_len=0)

    engine = SimpleNamespace(generate=generate, id2step={}, id2inst={})

    async def run(gen_config):
        async for _ in GuardedGeneration(engine, lambda: None)([], 1, gen_config):
            pass

    for text in ('{"priority":3}', None):
        SERVICE.set(text)
        for config in (GenerationConfig(), GenerationConfig(stop_words=["x"])):
            asyncio.run(run(config))
    SERVICE.set(None)
    assert [getattr(config, "sage", None) for config in seen] == ['{"priority":3}'] * 2 + [None] * 2
    assert seen[0] == GenerationConfig()


# The real server.


@pytest.fixture(scope="module")
def door(model_folder, tmp_path_factory):
    """A server whose engine process writes down what comes in: `read()` gives [longest answer, what is asked for]."""
    folder = tmp_path_factory.mktemp("door")
    file = folder / "door.jsonl"
    process = ServerProcess(
        folder, "--device", "cpu", "--block-size", 16, "--max-batch-size", 4, "--model", model_folder("llama"),
        "--model-name", "tiny", "--plugin", "tests.serve.plugins:Door", env={"SAGELLM_TEST_DOOR": str(file)},
    )  # fmt: skip
    try:
        process.ready().seen = lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        yield process
        process.end()
    finally:
        process.kill()


def asked(door, max_tokens):
    """Return what came in with each prompt of this `max_tokens`. The number tells the tests' requests apart."""
    return [text and json.loads(text) for longest, text in door.seen() if longest == max_tokens]


def post(door, path, body, headers=()):
    prompt = {CHAT: {"messages": ASK}, COMPLETION: {"prompt": "import"}, GENERATE: {"prompt": "import"}}[path]
    base = {"model": "tiny", "max_tokens": 3} if path != GENERATE else {"max_tokens": 3}
    text = body if isinstance(body, str) else json.dumps(body)
    return door.post(path, json.dumps(base | prompt)[:-1] + ", " * (len(text) > 2) + text[1:], headers=dict(headers))


@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE])
def test_refused_bodies(door, path):
    before = len(door.seen())
    for fields, words in WRONG.values():
        answer = post(door, path, fields)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert len(door.seen()) == before
    assert post(door, path, {}).status_code == 200


def test_refused_headers(door):
    for headers, body, words in WRONG_HEADERS.values():
        answer = httpx.post(door.url + GENERATE, headers=headers, json={"prompt": "import"} | body, timeout=30)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert post(door, GENERATE, {}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_openai_client(door, stream):
    deadline = int(time.time()) + SECONDS_TO_COME
    extra = {"priority": -7, "tenant": "team.a", "deadline": deadline, "ttft_slo_ms": 300, "tpot_slo_ms": 40.5}
    tokens = 10 + stream
    with door.client() as client:
        common = {"model": "tiny", "stream": stream, "max_tokens": tokens, "extra_body": extra}
        chat = client.chat.completions.create(messages=ASK, **common)
        assert not stream or len(list(chat)) > 1
        text = client.completions.create(prompt="import", extra_headers={"x-sagellm-tenant": "team.a"}, **common)
        assert not stream or len(list(text)) > 1
    assert asked(door, tokens) == [extra, extra]


def test_openai_client_is_told_what_is_allowed(door):
    with door.client() as client, pytest.raises(openai.BadRequestError, match="a whole number from -100 to 100"):
        client.chat.completions.create(model="tiny", messages=ASK, extra_headers={"x-sagellm-priority": "1000"})


@pytest.mark.parametrize(("path", "stream", "tokens"), [
    (path, stream, 20 + 2 * number + stream) for number, path in enumerate((CHAT, COMPLETION, GENERATE)) for stream in (0, 1)
])
def test_fields_reach_the_engine(door, path, stream, tokens):
    body = {"stream": bool(stream), "stop": ["never there"], "max_tokens": tokens, "priority": 5}
    assert post(door, path, body, [("x-sagellm-ttft-slo-ms", "250")]).status_code == 200
    assert post(door, path, {"max_tokens": tokens, "priority": None}).status_code == 200
    assert asked(door, tokens) == [{"priority": 5, "ttft_slo_ms": 250}, None]


def test_every_prompt_of_a_request_asks_for_it(door):
    with door.client() as client:
        client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=30, extra_body={"priority": 9})
    assert asked(door, 30) == [{"priority": 9}] * 3


def test_requests_at_once_keep_to_themselves(door):
    """Also on one connection without waiting for answers, where a request begins in the context of the one before it."""
    wanted = [1, None, 3, 0, -4, None]
    bodies = [json.dumps({"prompt": "import", "max_tokens": 40 + n} | ({} if p is None else {"priority": p}))
              for n, p in enumerate(wanted)]  # fmt: skip
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.create_connection(("127.0.0.1", door.port), timeout=30) as connection:
        connection.sendall("".join(f"{head}{len(body)}\r\n\r\n{body}" for body in bodies).encode())
        wait_until("all requests to come in", lambda: all(asked(door, 40 + n) for n in range(len(wanted))))
    assert [asked(door, 40 + n) for n in range(len(wanted))] == [[{"priority": p} if p else None] for p in wanted]


def test_fields_are_no_part_of_the_prompt(door):
    plain, asking = (post(door, CHAT, extra).json() for extra in ({}, {"priority": 3, "tenant": "team.a"}))
    assert plain["usage"]["prompt_tokens"] == asking["usage"]["prompt_tokens"]
