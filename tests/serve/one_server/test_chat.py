"""Answers of the server, through the client that users have."""

import os
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.serve.harness import KEY

ASK = [{"role": "user", "content": "Write a function that returns the sum of two numbers."}]
PROMPT = "def is_empty(path):\n"


def test_usage_and_ends(server, client):
    answer = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=60, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 60
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_models_and_health(server, client):
    assert [model.id for model in client.models.list()] == [server.model]
    assert server.announcement["pid"] == server.process.pid
    assert server.announcement["url"] == f"{server.url}/v1"


def test_the_engine_started_before_the_server_had_loaded_its_handlers(server):
    """A fork has the libraries that were loaded before it. The handlers load Harmony's."""

    def has_handlers(process):
        return any("openai_harmony" in each.path for each in process.memory_maps())

    whole, engine = psutil.Process(server.process.pid), server.engine_process()
    assert engine.cmdline() == whole.cmdline()
    assert has_handlers(whole) and not has_handlers(engine)


def test_the_server_waits_for_its_turn_and_its_engine_does_not(server):
    processes = (server.process.pid, server.engine_process().pid)
    assert [os.sched_getscheduler(each) & ~os.SCHED_RESET_ON_FORK for each in processes] == [os.SCHED_BATCH, os.SCHED_OTHER]


def test_completions_and_encoding(server, client):
    options = dict(model=server.model, max_tokens=12, temperature=0)
    one = client.completions.create(prompt=PROMPT, **options).choices[0].text
    two = client.completions.create(prompt=[PROMPT, "import os\n"], **options)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one
    encoded = server.post("/v1/encode", {"input": PROMPT}).json()
    raw = server.post("/generate", {"input_ids": encoded["input_ids"], "max_tokens": 12, "temperature": 0}).json()
    assert raw["text"] == one


def test_two_requests_of_several_prompts_at_once(server, client):
    """LMDeploy numbers requests, but uses one number for each prompt."""

    def ask(prompts):
        answer = client.completions.create(model=server.model, prompt=prompts, max_tokens=20, temperature=0)
        return [choice.text for choice in answer.choices]

    batches = [[f"def f{i}{j}(" for j in range(3)] for i in range(4)]
    expected = [ask(batch) for batch in batches]
    with ThreadPoolExecutor(len(batches)) as pool:
        assert list(pool.map(ask, batches)) == expected


def test_sixteen_at_once_answer_as_one_by_one(server, client):
    def ask(number):
        question = [{"role": "user", "content": f"Write a function number {number} that sorts a list."}]
        answer = client.chat.completions.create(model=server.model, messages=question, max_tokens=24, temperature=0)
        return answer.choices[0].message.content

    alone = [ask(number) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == alone
    server.wait_idle()


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_decides(server, client, seed):
    def sample(seed):
        options = dict(model=server.model, messages=ASK, max_tokens=30, temperature=1.5, seed=seed)
        return client.chat.completions.create(**options).choices[0].message.content

    assert sample(seed) == sample(seed)
    assert len({sample(seed + shift) for shift in range(4)}) > 1


def test_logprobs_of_chat(server, client):
    options = dict(model=server.model, messages=ASK, max_tokens=8, temperature=0, logprobs=True)
    answer = client.chat.completions.create(top_logprobs=3, **options).choices[0]
    tokens = answer.logprobs.content
    assert len(tokens) == 8
    assert "".join(token.token for token in tokens) == answer.message.content
    for token in tokens:
        ranked = [top.logprob for top in token.top_logprobs]
        assert len(ranked) == 3 and ranked == sorted(ranked, reverse=True)
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.logprob == ranked[0] <= 0
        assert bytes(token.bytes).decode() == token.token
    plain = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [token.logprob for token in plain] == pytest.approx([token.logprob for token in tokens], abs=1e-5)


def test_logprobs_of_completions(server, client):
    options = dict(model=server.model, prompt=PROMPT, max_tokens=6, temperature=0)
    found = client.completions.create(logprobs=2, **options).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    assert all(len(top) == 2 for top in found.logprobs.top_logprobs)
    assert all(value == max(top.values()) for value, top in zip(*_pairs(found), strict=True))
    raw = server.post("/generate", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_logprob": True}).json()
    values = [value for value, _ in raw["meta_info"]["output_token_logprobs"]]
    assert values == pytest.approx(found.logprobs.token_logprobs, abs=1e-5)


def _pairs(choice):
    return choice.logprobs.token_logprobs, choice.logprobs.top_logprobs


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stop_string_ends_the_answer_in_front_of_it(server, client, size):
    """Also one that begins and ends within tokens, and one of several tokens; streamed or not."""
    options = dict(model=server.model, messages=ASK, max_tokens=40, temperature=0)
    whole = client.chat.completions.create(**options).choices[0].message.content
    word = whole[11 : 11 + size]
    expected = whole[: whole.index(word)]
    stopped = client.chat.completions.create(stop=[word, "never written"], **options).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (expected, "stop")
    chunks = list(client.chat.completions.create(stop=word, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    kept = client.chat.completions.create(stop=word, extra_body={"include_stop_str_in_output": True}, **options)
    assert kept.choices[0].message.content == expected + word
    server.wait_idle()


def test_null_means_the_default(server):
    body = {"model": server.model, "messages": ASK, "max_tokens": 4, "temperature": None, "n": None, "stop": None}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_a_prefix_that_was_seen_is_found(server, client):
    text = "# " + " ".join(f"word{i}" for i in range(150)) + "\ndef f(x):\n"
    before = server.metric("sagellm_prefix_tokens_total", kind="hit")
    looked_up = server.metric("sagellm_prefix_lookups_total")
    hits = []
    for _ in range(2):
        client.completions.create(model=server.model, prompt=text, max_tokens=4, temperature=0)
        server.wait_idle()
        hits.append(server.metric("sagellm_prefix_tokens_total", kind="hit") - before)
    assert hits[0] == 0 and hits[1] >= 64, hits
    assert server.metric("sagellm_prefix_lookups_total") >= looked_up + 2
    assert server.metric("sagellm_prefix_cached_blocks", tier="gpu") >= 4


def test_keys(server):
    body = {"model": server.model, "messages": ASK, "max_tokens": 2}
    for key in (None, "wrong", KEY + "x", ""):
        assert server.post("/v1/chat/completions", body, key=key).status_code == 401
    assert server.post("/v1/chat/completions", body).status_code == 200
