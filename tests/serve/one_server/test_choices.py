"""Several answers to one request, and fields that LMDeploy's own handlers leave out."""

import json
import socket

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serve.harness import KEY

CHAT = [{"role": "user", "content": 20 * "Write a function that adds two numbers, and one that multiplies them. "}]
WHOLE = {"extra_body": {"ignore_eos": True}}
HEADERS = {"Authorization": f"Bearer {KEY}"}


def test_answers_share_the_prompt_and_have_seeds_of_their_own(server, client):
    server.wait_idle()
    before = prefix_hits(server)
    options = dict(model=server.model, messages=CHAT, max_tokens=12, temperature=1.0, seed=3, **WHOLE)
    answer = client.chat.completions.create(n=3, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert prefix_hits(server) >= before + 2 * 256, "the others found the prompt of the first"
    alone = client.chat.completions.create(**options | {"seed": 4})
    assert alone.choices[0].message.content == texts[1], "the second answer has the next seed"
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == 36 and answer.usage.total_tokens == 36 + answer.usage.prompt_tokens
    server.wait_idle()


def prefix_hits(server):
    return server.metric("sagellm_prefix_tokens_total", kind="hit")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ask", "num"), [
    (dict(path="/v1/chat/completions", messages=CHAT, n=8), 7),
    (dict(path="/v1/completions", prompt=[CHAT[0]["content"][:500]], n=3), 2),
    (dict(path="/v1/completions", prompt=["import os, sys, re", "def f(x):"], n=2, best_of=3), 4),
])  # fmt: skip
def test_several_answers_are_branches_of_one_prefill(server, ask, num, stream):
    """The prompts are computed once, and the last token of each for every further answer."""
    ask = {"model": server.model, "max_tokens": 16, "temperature": 1.0, "seed": 2, "ignore_eos": True} | ask
    path, is_one = ask.pop("path"), len(ask.get("prompt", [""])) == 1
    server.wait_idle()
    names = ("sagellm_branches_total", "sagellm_shared_tokens_total")
    before = [server.metric(name) for name in names]
    answer = server.post(path, ask | {"stream": stream and is_one})
    assert answer.status_code == 200, answer.text
    server.wait_idle()
    made, shared = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert made == num
    if not (stream and is_one):
        num_shared = answer.json()["usage"]["prompt_tokens"] - len(ask.get("prompt", [""]))
        assert shared == (ask.get("best_of", ask["n"]) - 1) * num_shared


def test_a_client_that_leaves_before_the_first_token_ends_all_answers(server):
    body = json.dumps({"model": server.model, "messages": 3 * CHAT, "max_tokens": 900, "n": 6, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    before = server.metric("sagellm_branches_total")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        server.wait_for_metric("branches", lambda n: n == before + 5, "sagellm_branches_total")
    server.wait_idle()


def test_streams_are_merged(server, client):
    options = dict(model=server.model, messages=CHAT, max_tokens=8, temperature=1.0, seed=3, **WHOLE)
    whole = [choice.message.content for choice in client.chat.completions.create(n=2, **options).choices]
    texts, usages, ids = ["", ""], [], set()
    for chunk in client.chat.completions.create(n=2, stream=True, stream_options={"include_usage": True}, **options):
        ids.add(chunk.id)
        if not chunk.choices:
            usages.append(chunk.usage)
            continue
        assert not usages and chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole and len(ids) == 1
    assert [usage.completion_tokens for usage in usages] == [16]


def test_each_chunk_may_have_the_usage_up_to_it(server, client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = dict(model=server.model, messages=CHAT, max_tokens=8, temperature=1.0, seed=3, stream=True, **WHOLE)
    *chunks, last = client.chat.completions.create(n=2, stream_options=options, **ask)
    counts = [[chunk.usage.completion_tokens for chunk in chunks if chunk.choices[0].index == number] for number in (0, 1)]
    for found in counts:
        assert found == sorted(found) and found[-1] == 8 and len(set(found)) > 2
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage.completion_tokens} == {last.usage.prompt_tokens}
    assert last.usage.completion_tokens == 16


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_values_count_as_the_model_of_the_request_reads_them(server, path):
    body = {"model": server.model, "max_tokens": "2", "temperature": "1", "seed": 3.0}
    body |= {"messages": CHAT} if "chat" in path else {"prompt": "import ", "echo": "false"}
    for n in ("2", 2.0):
        answer = server.post(path, body | {"n": n})
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
        assert answer.json()["usage"]["completion_tokens"] == 4
    if "chat" not in path:
        assert not answer.json()["choices"][0]["text"].startswith("import ")
    stream = server.post(path, body | {"stream": "true", "stream_options": {"include_usage": "false"}})
    assert stream.status_code == 200 and '"choices": []' not in stream.text and "[DONE]" in stream.text


def test_fields_that_change_no_answer(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = {"tools": tools, "tool_choice": "none", "metadata": {"a": "b"}, "store": False, "modalities": ["text"], "user": "me"}
    more |= {"service_tier": "auto", "parallel_tool_calls": True, "messages": [CHAT[0] | {"name": "me", "refusal": None}]}
    ask = {"model": server.model, "messages": CHAT, "max_tokens": 4, "temperature": 0}
    answers = [server.post("/v1/chat/completions", ask | fields).json()["choices"] for fields in ({}, more)]
    assert answers[0] == answers[1]


def test_the_likeliest_answers_are_kept(server, client):
    options = dict(model=server.model, prompt=["import os\n", "def f("], max_tokens=6, temperature=1.0, seed=11, **WHOLE)
    every = client.completions.create(n=4, logprobs=1, **options).choices
    best = client.completions.create(n=2, best_of=4, **options)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    for prompt in range(2):
        own = every[4 * prompt : 4 * prompt + 4]
        ranked = sorted(own, key=lambda choice: -sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))
        assert [choice.text for choice in best.choices[2 * prompt : 2 * prompt + 2]] == [choice.text for choice in ranked[:2]]
    assert best.choices[0].logprobs is None and best.usage.completion_tokens == 2 * 4 * 6


def test_a_client_that_leaves_ends_all_answers(server):
    """Long before they would end themselves. So many that they take tens of seconds, whatever else the machine does."""
    body = {"model": server.model, "messages": CHAT, "max_tokens": 1500, "n": 64, "stream": True, "ignore_eos": True}
    before = server.metric("lmdeploy:generation_tokens_total")
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60) as response:
        next(response.iter_bytes())
    server.wait_idle()
    assert 0 < server.metric("lmdeploy:generation_tokens_total") - before < 64 * 1500
    refused = server.post("/v1/chat/completions", body | {"messages": [], "n": 2})
    assert refused.status_code == 400


def tokens_of(server, text):
    return server.post("/v1/encode", {"input": text, "add_bos": False}).json()["input_ids"]


def test_bias_and_penalties(server, client):
    (wanted,) = tokens_of(server, " import")[-1:]
    options = dict(model=server.model, prompt="x = ", max_tokens=6, temperature=0)
    text = client.completions.create(logit_bias={str(wanted): 100}, **options)
    answer = server.post("/generate", {"prompt": "x = ", "max_tokens": 6, "temperature": 0, "logit_bias": {str(wanted): 100}})
    assert answer.json()["output_ids"] == [wanted] * 6 and text.usage.completion_tokens == 6
    plain = server.post("/generate", {"prompt": "x = ", "max_tokens": 24, "temperature": 0, "ignore_eos": True}).json()
    varied = {"prompt": "x = ", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "presence_penalty": 2}
    varied = server.post("/generate", varied | {"frequency_penalty": 2}).json()
    assert len(set(varied["output_ids"])) >= len(set(plain["output_ids"]))
    banned = {str(token): -100 for token in set(plain["output_ids"][:4])}
    other = {"prompt": "x = ", "max_tokens": 8, "temperature": 0, "logit_bias": banned}
    assert not set(server.post("/generate", other).json()["output_ids"]) & set(map(int, banned))


def test_fields_that_lmdeploys_handlers_leave_out(server, client):
    raw = {"prompt": "import ", "max_tokens": 8, "temperature": 1.0}
    seeds = (5, 5, 6, 0, 2**32, -1, 2**32 - 1)
    answers = [server.post("/generate", raw | {"seed": seed}).json()["output_ids"] for seed in seeds]
    assert answers[0] == answers[1] != answers[2]
    assert answers[3] == answers[4] and answers[5] == answers[6], "the low 32 bits count"
    options = dict(max_tokens=8, temperature=1.0, seed=-1, extra_body={"top_k": 0})
    text = client.completions.create(model=server.model, prompt="import ", **options).choices[0].text
    assert server.post("/generate", raw | {"seed": -1}).json()["text"] == text, "as on the other routes"
    ends = server.post("/generate", {"prompt": "import ", "max_tokens": 8, "temperature": 0}).json()["output_ids"]
    body = {"model": server.model, "prompt": "import ", "max_tokens": 8, "temperature": 0}
    cut = server.post("/v1/completions", body | {"stop_token_ids": [ends[3]]}).json()
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["usage"]["completion_tokens"] <= 4
    longer = server.post("/v1/completions", body | {"stop_token_ids": [ends[0]], "min_tokens": 5}).json()
    assert longer["usage"]["completion_tokens"] >= 5
    wanted = {"type": "regex_schema", "regex_schema": "[a-c]{5}"}
    text = server.post("/v1/completions", body | {"response_format": wanted, "max_tokens": 40}).json()["choices"][0]["text"]
    assert len(text) == 5 and set(text) <= set("abc")
    answer = server.post("/generate", {"prompt": "x", "max_tokens": 60, "response_format": wanted, "temperature": 0})
    assert set(answer.json()["text"]) <= set("abc")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 129}, "n is 129; allowed: 1 to 128"),
        ({"n": 3, "best_of": 2}, "best_of is 2 with n 3"),
        ({"best_of": 2, "stream": True}, "in a stream not more"),
        ({"best_of": 2.5}, "best_of is 2.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
        ({"logit_bias": {"5": 101}}, "logit_bias of 5 is 101; allowed: -100 to 100"),
        ({"logit_bias": {"99999999": 1}}, "allowed are token ids from 0 to"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids holds 1000000"),
        ({"n": 2, "speculation_usage": True}, "speculation_usage is of one answer"),
        ({"response_format": {"type": "xml"}}, "response_format cannot be read"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "cannot be combined with ignore_eos or min_tokens"),
    ],
)
def test_values_out_of_range(server, fields, words):
    answer = server.post("/v1/completions", {"model": server.model, "prompt": "a", "max_tokens": 4} | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_prompts_of_token_ids(server, client):
    texts = ["import os\n", "def f(x):"]
    ids = server.post("/v1/encode", {"input": texts}).json()["input_ids"]
    options = dict(model=server.model, max_tokens=6, temperature=0)
    expected = [client.completions.create(prompt=text, **options) for text in texts]
    one = client.completions.create(prompt=ids[0], **options)
    both = client.completions.create(prompt=ids, **options)
    assert [one.choices[0].text] == [expected[0].choices[0].text]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in expected]
    assert both.usage.prompt_tokens == sum(map(len, ids)) and one.usage == expected[0].usage
    streamed = client.completions.create(prompt=ids[0], stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def test_the_prompt_is_echoed_with_the_scores_of_a_forward_pass(server, client, demo_model):
    prompts = ["import os\n\ndef f(x):", "class A:"]
    ids = server.post("/v1/encode", {"input": prompts}).json()["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    options = dict(model=server.model, temperature=0, logprobs=2, echo=True)
    for max_tokens in (0, 3):
        answer = client.completions.create(prompt=prompts, max_tokens=max_tokens, **options)
        assert answer.usage.completion_tokens == 2 * max_tokens
        for choice, prompt, tokens in zip(answer.choices, prompts, ids, strict=True):
            found = choice.logprobs
            assert choice.text.startswith(prompt) and (max_tokens or choice.text == prompt)
            assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(tokens) + max_tokens
            assert found.token_logprobs[0] is None and "".join(found.tokens)[: len(prompt)] == prompt
            with torch.no_grad():
                scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            expected = [scores[place, token].item() for place, token in enumerate(tokens[1:])]
            assert found.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-3)
            assert max(found.top_logprobs[1].values()) == pytest.approx(scores[0].max().item(), abs=1e-3)
            places = zip(found.text_offset, found.tokens, strict=True)
            assert [choice.text[at:][: len(piece)] for at, piece in places] == found.tokens
    plain = client.completions.create(model=server.model, prompt=ids[0], echo=True, max_tokens=3, temperature=0)
    assert plain.choices[0].text.startswith(prompts[0]) and plain.choices[0].logprobs is None
    long = client.completions.create(prompt=[ids[0] * 80], max_tokens=0, **options).choices[0].logprobs
    assert len(long.tokens) == 80 * len(ids[0]) > 512, "several forward passes score it"
    with torch.no_grad():
        scores = model(torch.tensor([ids[0] * 80])).logits[0].log_softmax(-1)
    expected = [scores[place, token].item() for place, token in enumerate((ids[0] * 80)[1:])]
    assert long.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    several = client.completions.create(model=server.model, prompt="a = ", echo=True, max_tokens=3, n=2, temperature=1.0)
    assert all(choice.text.startswith("a = ") for choice in several.choices) and len(several.choices) == 2


def test_no_likeliest_tokens_but_the_chosen_one(server, client):
    """`logprobs: 0` asks for log probabilities, of the chosen token alone."""
    options = dict(model=server.model, prompt="import os\n", max_tokens=4, temperature=1.0, seed=5)
    wanted = client.completions.create(logprobs=2, **options).choices[0].logprobs
    stream = [chunk.choices[0].logprobs for chunk in client.completions.create(logprobs=0, stream=True, **options)]
    for found in (client.completions.create(logprobs=0, **options).choices[0].logprobs, *filter(None, stream)):
        assert found.top_logprobs == [{token: value} for token, value in zip(found.tokens, found.token_logprobs, strict=True)]
    whole = client.completions.create(logprobs=0, **options).choices[0].logprobs
    assert whole.tokens == wanted.tokens and whole.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)
    best = client.completions.create(logprobs=0, best_of=3, echo=True, **options).choices[0].logprobs
    assert len(best.tokens) > 4 and best.token_logprobs[0] is None and None not in best.token_logprobs[1:]
