"""Tests of mistakes in a client's request: the answer is a clear 4xx, and the server goes on as before."""

import json
import re
import socket

import httpx
import pytest

from tests.serve.harness import KEY

ASK = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION, GENERATE, ENCODE = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/encode"
POLICY = "/sagellm/policy"
NO = {"model": "no-such-model"}

JSON = {"type": "json_object"}
MANY_ITEMS = {"type": "array", "minItems": 5000}
CHAT_CASES = {
    "best_of of a chat": ({"best_of": 2}, "best_of is not a field of this request"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens is 0"),
    "max_tokens -5": ({"max_tokens": -5}, "max_tokens is -5"),
    "max_tokens as text": ({"max_tokens": "-5"}, "max_tokens is -5"),
    "max_tokens huge": ({"max_tokens": 2**70}, "max_tokens"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens is 0"),
    "max_tokens a list": ({"max_tokens": [1]}, "max_tokens"),
    "messages missing": ({"messages": None}, "messages"),
    "messages empty": ({"messages": []}, "messages is empty"),
    "messages a number": ({"messages": 5}, "messages"),
    "message without role": ({"messages": [{"content": "x"}]}, "role"),
    "role unknown": ({"messages": [{"role": "nobody", "content": "x"}]}, "role"),
    "content a number": ({"messages": [{"role": "user", "content": 5}]}, "content holds 5; allowed are null"),
    "content an object": (
        {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
        "content holds {",
    ),
    "content an image": (
        {"messages": [ASK[0], {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        'messages[1].content holds {"type": "image_url"',
    ),
    "content a sound": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
    "content a list of strings": ({"messages": [{"role": "user", "content": ["x"]}]}, 'content holds "x"'),
    "content text of numbers": ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "holds"),
    "half a surrogate pair": ({"messages": [{"role": "user", "content": "\ud800"}]}, "not JSON"),
    "top_logprobs -1": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs is -1"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "n huge": ({"n": 10**9}, "n is 1000000000"),
    "n 0": ({"n": 0}, "n is 0"),
    "temperature": ({"temperature": 3}, "temperature"),
    "temperature tiny": ({"temperature": 1e-6}, "allowed: 0 (always the likeliest token)"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "min_p 2": ({"min_p": 2}, "min_p"),
    "top_k beyond the vocabulary": ({"top_k": 10**6}, "top_k is 1000000"),
    "top_k as text": ({"top_k": "1000000"}, "top_k is 1000000"),
    "top_k -1": ({"top_k": -1}, "top_k is -1"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "frequency_penalty out of range": ({"frequency_penalty": 77}, "frequency_penalty is 77; allowed: -2 to 2"),
    "input_ids": ({"input_ids": [3]}, "input_ids is not a field"),
    "unknown field": ({"temprature": 1}, "temprature is not a field of this request; did you mean temperature?"),
    "store": ({"store": True}, "store: Input should be False"),
    "metadata a number": ({"metadata": 5}, "metadata: Input should be a valid dictionary"),
    "service_tier": ({"service_tier": "flex"}, "service_tier: Input should be 'auto' or 'default'"),
    "web search": ({"web_search_options": {}}, "web_search_options is not supported by this server"),
    "reasoning_effort": ({"reasoning_effort": "low"}, "reasoning_effort is not read by the chat template of this model"),
    "enable_thinking": ({"enable_thinking": False}, "enable_thinking is not read by the chat template of this model"),
    "a message's unknown field": (
        {"messages": [ASK[0] | {"cache": 1}]},
        "messages[0].cache is not a field of this request; leave it out.",
    ),
    "a message's name": ({"messages": [ASK[0] | {"name": 5}]}, "messages[0].name is 5; send a string"),
    "calls in a message": ({"messages": [ASK[0], {"role": "assistant", "tool_calls": []}]}, "messages[1].tool_calls is not a"),
    "two limits": ({"max_completion_tokens": 5}, "max_tokens is 4 and max_completion_tokens is 5; send one of them"),
    "two minima": ({"min_tokens": 2, "min_new_tokens": 3}, "min_tokens is 2 and min_new_tokens is 3"),
    "min_tokens above max_tokens": ({"min_tokens": 5}, "min_tokens is 5 and max_tokens is 4; the minimum must not be above"),
    "min_new_tokens above max_tokens": ({"min_new_tokens": 5}, "min_tokens is 5 and max_tokens is 4"),
    "min_tokens with a format": ({"min_tokens": 2, "response_format": JSON}, "cannot be combined with ignore_eos or min_"),
    "n a fraction": ({"n": 2.5}, "n: Input should be a valid integer"),
    "n of a text too large": ({"n": "129"}, "n is 129; allowed: 1 to 128"),
    "seed beyond 64 bits": ({"seed": 2**63}, "seed is 9223372036854775808; allowed: -9223372036854775808 to"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0] of role user has no content"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream_options needs stream: true"),
    "an unknown stream option": (
        {"stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages is not a field of this request; did you mean include_usage?",
    ),
    "usage of every chunk alone": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "continuous_usage_stats needs include_usage: true",
    ),
    "usage of every chunk a number": (
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": 5}},
        "continuous_usage_stats is 5; allowed: true or false",
    ),
    "an unknown part of a format": ({"response_format": JSON | {"strict": True}}, "response_format.strict is not a field"),
    "a part of another format": ({"response_format": JSON | {"regex_schema": "a"}}, "response_format.regex_schema is not a"),
    "an unknown part of a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "stricter": True}}},
        "response_format.json_schema.stricter is not a field of this request; did you mean strict?",
    ),
    "a schema of many items": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": MANY_ITEMS}}},
        "minItems is greater than the number of prefixItems, but additional items are not allowed: 5000 > 0",
    ),
    "stop empty": ({"stop": ""}, "stop"),
    "stop a number": ({"stop": [5]}, "stop"),
    "session_id": ({"session_id": 1}, "session_id"),
    "with_cache": ({"with_cache": True}, "with_cache"),
    "migration": ({"migration_request": {"x": 1}}, "migration_request"),
    "stream a list": ({"stream": []}, "stream"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported by this server"),
    "tool_choice required": ({"tool_choice": "required"}, "tool_choice is 'required', which is not supported"),
    "tool_choice": (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice is a function, which is not supported by this server; send 'none', or leave it out",
    ),
}
OTHER_CASES = {
    "prompt empty": (COMPLETION, {"prompt": ""}, "prompt"),
    "one empty prompt": (COMPLETION, {"prompt": ["a", ""]}, "the prompt is empty"),
    "raw prompt empty": (GENERATE, {"prompt": ""}, "the prompt is empty"),
    "suffix": (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    "echo in a stream": (COMPLETION, {"prompt": "a", "echo": True, "stream": True}, "echo in a stream is not supported"),
    "no tokens without echo": (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    "metadata of a completion": (COMPLETION, {"prompt": "a", "metadata": {}}, "metadata is not a field of this request"),
    "best_of a boolean": (COMPLETION, {"prompt": "a", "best_of": True}, "best_of is true; allowed: 1 to 128"),
    "min_tokens as text": (COMPLETION, {"prompt": "a", "min_tokens": "5"}, 'min_tokens is "5"; allowed: 0 to'),
    "min_tokens above the default": (
        COMPLETION,
        {"prompt": "a", "max_tokens": None, "min_tokens": 20},
        "min_tokens is 20 and max_tokens is 16",
    ),
    "raw user": (GENERATE, {"prompt": "a", "user": "me"}, "user is not a field"),
    "raw seed": (GENERATE, {"prompt": "a", "seed": 2**63}, "seed is 9223372036854775808; allowed: -9223372036854775808 to"),
    "an empty image": (GENERATE, {"prompt": "a", "image_data": ""}, "image_data is not supported by this server"),
    "raw n": (GENERATE, {"prompt": "a", "n": 3}, "n is not a field"),
    "raw logprobs": (GENERATE, {"prompt": "a", "logprobs": 3}, "logprobs is not a field"),
    "raw min_new_tokens": (GENERATE, {"prompt": "a", "min_new_tokens": 3}, "min_new_tokens is not a field"),
    "encode unknown": (ENCODE, {"input": "a", "normalise": True, "max_tokens": None, "model": None}, "normalise is not a"),
    "encode with guesses": (ENCODE, {"input": "a", "max_tokens": None, "speculation_usage": True}, "speculation_usage is not"),
    "encode with a priority": (ENCODE, {"input": "a", "max_tokens": None, "priority": 5}, "priority is not a field"),
    "encode with a session": (ENCODE, {"input": "a", "max_tokens": None, "session_id": 5}, "session_id is not a field"),
    "prompt of large ids": (COMPLETION, {"prompt": [1, 10**6]}, "token ids must lie between 0 and"),
    "prompt of no ids": (COMPLETION, {"prompt": [[]]}, "the prompt is empty"),
    "prompts of both sorts": (COMPLETION, {"prompt": ["a", [1]]}, "prompt must be a string, a list of strings, a list of"),
    "prompts none": (COMPLETION, {"prompt": []}, "prompt"),
    "prompts mixed": (COMPLETION, {"prompt": ["a", None]}, "prompt"),
    "logprobs 1000": (COMPLETION, {"prompt": "a", "logprobs": 1000}, "logprobs is 1000"),
    "logprobs -1": (COMPLETION, {"prompt": "a", "logprobs": -1}, "logprobs is -1"),
    "streamed prompts": (COMPLETION, {"prompt": ["a", "b"], "stream": True}, "stream with 2 prompts"),
    "ids negative": (GENERATE, {"input_ids": [5, -1]}, "between 0 and"),
    "ids beyond the vocabulary": (GENERATE, {"input_ids": [5, 10**6]}, "between 0 and"),
    "ids beyond 64 bits": (GENERATE, {"input_ids": [2**80]}, "between 0 and"),
    "ids none": (GENERATE, {"input_ids": []}, "empty"),
    "ids as text": (GENERATE, {"input_ids": ["x"]}, "input_ids"),
    "ids and prompt": (GENERATE, {"input_ids": [1], "prompt": "a"}, "either"),
    "neither": (GENERATE, {}, "either"),
    "stop ids": (GENERATE, {"prompt": "a", "stop_token_ids": [10**6], "ignore_eos": True}, "stop_token_ids"),
    "an image": (GENERATE, {"prompt": "a", "image_data": "x.png"}, "image_data"),
}


def check(server, answer, words, status=400):
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    check_alive(server)


def check_alive(server):
    body = {"prompt": "import os", "max_tokens": 2, "temperature": 0}
    answer = server.post(GENERATE, body)
    assert answer.status_code == 200 and answer.json()["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", CHAT_CASES)
def test_chat(server, name):
    fields, words = CHAT_CASES[name]
    body = json.dumps({"model": server.model, "messages": ASK, "max_tokens": 4} | fields)
    check(server, server.post(CHAT, body), words)


@pytest.mark.parametrize("name", OTHER_CASES)
def test_completions_and_raw_generation(server, name):
    path, fields, words = OTHER_CASES[name]
    check(server, server.post(path, {"model": server.model, "max_tokens": 4} | fields), words)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"max_tokens": NaN}', b"[" * 50000])
def test_bodies_that_are_no_request(server, path, body):
    check(server, server.post(path, body), "the body is")


def test_prompts_longer_than_the_context(server):
    text = "word " * 3000
    for path, fields in ((CHAT, {"messages": [{"role": "user", "content": text}]}), (COMPLETION, {"prompt": text})):
        check(server, server.post(path, {"model": server.model} | fields), "--context-length")
    check(server, server.post(GENERATE, {"input_ids": [5] * 2048}), "has 2048 tokens")
    longest = server.post(GENERATE, {"input_ids": [5] * 2047, "max_tokens": 50, "ignore_eos": True})
    assert longest.status_code == 200
    check_alive(server)


def test_prompts_that_are_too_long_whatever_they_say(server):
    """They are not even tokenized, which would take seconds."""
    text = "word " * 1_600_000
    for path, fields in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (COMPLETION, {"prompt": ["", text]}),
    ):
        answer = server.post(path, {"model": server.model} | fields)
        check(server, answer, "characters; with a context of 2048 at most 2047 tokens")


def test_encoding(server):
    one = server.post(ENCODE, {"input": "import os"}).json()
    assert one["length"] == len(one["input_ids"]) > 1
    two = server.post(ENCODE, {"input": ["import os", "word " * 20000], "add_bos": False}).json()
    assert two["input_ids"][0] == one["input_ids"][-len(two["input_ids"][0]) :]
    assert two["length"] == [len(ids) for ids in two["input_ids"]] and two["length"][1] > 20000
    templated = server.post(ENCODE, {"input": "import os", "do_preprocess": True}).json()
    assert templated["length"] > one["length"]
    check(server, server.post(ENCODE, {"input": 5}), "input")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([f"Bearer  {KEY}"], 400),
        ([f"bearer {KEY}"], 400),
        ([f"Bearer {KEY}", "Bearer other"], 400),
        (["Bearer other", f"Bearer {KEY}"], 401),
        ([f"Basic {KEY}"], 401),
        (["Bearer \xe4"], 401),
        (["Bearer"], 401),
        ([], 401),
    ],
)
def test_keys_are_read_in_one_way(server, headers, status):
    """A request that is let in although its body was not checked could end the engine."""
    lines = [("Content-Type", "application/json"), *(("Authorization", text.encode("latin-1")) for text in headers)]
    answer = httpx.post(server.url + GENERATE, headers=lines, content=b'{"input_ids": [1000000]}', timeout=30)
    assert answer.status_code == status and answer.json()["error"]["code"] == status
    check_alive(server)


def test_without_a_key_no_body_is_read(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        lines = (f"POST {GENERATE} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {10**9}")
        connection.sendall("\r\n".join((*lines, "", "")).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
    check_alive(server)


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit(server, announced):
    """The rest of it is not read, whether its size is announced or not."""
    body = json.dumps({"input": "word " * 2_000_000}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    content = body if announced else (body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20))
    answer = httpx.post(server.url + ENCODE, headers=headers, content=content, timeout=10)
    check(server, answer, "larger than 8 MiB, the limit of this server (--max-body-mib)", 413)


def test_the_description_has_the_served_routes_and_needs_the_key(server):
    assert httpx.get(f"{server.url}/openapi.json").status_code == 401
    document = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert document["openapi"].startswith("3.") and CHAT in document["paths"] and POLICY in document["paths"]
    for path, operations in document["paths"].items():
        for method in operations:
            answer = httpx.request(method, server.url + path, headers={"Authorization": f"Bearer {KEY}"})
            assert answer.status_code not in (404, 405), path
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])


def test_an_unknown_model(server):
    for path, fields in ((CHAT, {"messages": ASK}), (COMPLETION, {"prompt": "a"}), (ENCODE, {"input": "a"})):
        answer = server.post(path, NO | fields)
        assert answer.status_code == 404 and "no-such-model" in answer.text
    check_alive(server)


def test_other_media_types_methods_and_paths(server):
    form = server.post(GENERATE, b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    check(server, form, "application/json", 415)
    check(server, server.post("/health", {}), "does not take POST", 405)
    # Paths of other kinds of deployment: one of them would put the engine to sleep, one would end it.
    for path in ("/sleep", "/update_weights", "/pooling", "/abort_request", "/v1/rerank"):
        check(server, server.post(path, {"input": [10**6]}), f"there is no {path}", 404)


def test_a_policy_that_cannot_be_exchanged(server):
    def ask(**fields):
        return server.post(POLICY, {"policy": "arc"} | fields)

    check(server, ask(), "no plug-in of this engine has eviction policies; start the engine with one (--kv-policy NAME).", 400)
    check(server, ask(policy="no-such"), "policy 'no-such': known are", 400)
    check(server, ask(policy="os:system"), "policy 'os:system': known are", 400)  # a client names no code
    check(server, ask(tier="tape"), "tier: Input should be 'gpu', 'cpu' or 'nvme'", 400)
    check(server, ask(more=1), "more: Extra inputs are not permitted", 400)
    check(server, httpx.post(server.url + POLICY, json={"policy": "arc"}, timeout=30), "valid API key", 401)


def test_what_engines_of_a_group_say_to_each_other(server):
    """This server is of no group: the fields are refused above."""
    for path in ("/distserve/free_cache", "/distserve/p2p_connect"):
        check(server, server.post(path, {"remote_session_id": 1}), "start it with --role", 400)
    check(server, server.post("/distserve/nothing", {}), "there is no /distserve/nothing", 404)
    answer = httpx.get(f"{server.url}/sage/pd/info", timeout=30)
    assert answer.status_code == 400 and "start it with --role" in answer.text


def test_nothing_of_it_is_in_the_log(server):
    """Mistakes of clients are no errors of the server."""
    assert "Traceback" not in server.stderr
    assert "Deprecat" not in server.stderr
