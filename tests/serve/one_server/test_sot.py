"""Skeleton-of-thought in chats."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from transformers import AutoTokenizer

from sagellm.accel.sot.pipeline import SpecSoT
from sagellm.core.config import SageConfig
from sagellm.core.running import SamplingParams
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from tests.serve.harness import KEY

QUESTION = "How do I read a file?"
HISTORY = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good morning."}]
ASK = {"messages": [*HISTORY, {"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
SOT = {"plan": "always"}


@pytest.fixture(scope="module")
def expected(demo_model):
    """The answer of an engine in this process."""
    config = SageConfig(device="cpu", model=str(demo_model), dtype="float32", kv_blocks=200)
    with LMDeployEngine(config) as engine:
        sot = SpecSoT(engine, AutoTokenizer.from_pretrained(demo_model), may_be_direct=False, params=SamplingParams())
        return sot.generate(QUESTION, max_new_tokens=24, history=HISTORY)


def test_grammars_of_plans_are_compiled_at_the_start(server):
    server.wait_for_metric("both of them", lambda n: n == 2, "sagellm_grammars_ahead_total")


def streamed(client, server, order, **ask):
    """Texts by index, reasons by index, what the events say of the plan and of the answer, and the usage."""
    texts, reasons, facts, usage = {}, {}, [], None
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"sot": SOT | {"order": order}}}
    for event in client.chat.completions.create(model=server.model, **ASK | options | ask):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            assert choice.index not in reasons
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        facts += [event.sot] if hasattr(event, "sot") else []
        usage = event.usage or usage
    return texts, reasons, facts, usage


def test_a_chat_is_answered_as_by_the_library(server, client, expected):
    answer = client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})
    (choice,) = answer.choices
    assert choice.message.content == expected.text and answer.sot["mode"] == "plan"
    assert choice.finish_reason == ("length" if "length" in expected.finish_reasons.values() else "stop")
    points = answer.sot["points"]
    assert [point["title"] for point in points] == [task.title for task in expected.tasks] and len(points) >= 2
    assert [point["tokens"] for point in points] == [len(expected.branches[task.branch_id]) for task in expected.tasks]
    assert all(f"{point['index'] + 1}. {point['title']}\n{point['text']}" in expected.text for point in points)
    stats = expected.stats
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (stats["prompt_tokens"], stats["completion_tokens"])
    server.wait_idle()


@pytest.mark.parametrize("order", ["written", "plan"])
def test_a_stream_has_the_same_text(server, client, expected, order):
    texts, reasons, (plan, facts), usage = streamed(client, server, order)
    assert "".join(texts[index] for index in sorted(texts)) == expected.text
    assert [point["title"] for point in plan["points"]] == [task.title for task in expected.tasks]
    assert facts["mode"] == "plan" and facts["stats"]["branches"] == len(expected.tasks)
    assert usage.completion_tokens == expected.stats["completion_tokens"]
    if order == "written":
        assert reasons == expected.finish_reasons and sorted(texts) == [task.branch_id for task in expected.tasks]
    else:
        assert set(texts) == {0} and set(reasons) == {0}


def test_points_come_side_by_side(server, client):
    """A later point has text before the first one ends, as a choice of its own; in the order of the plan none has."""
    begun = {}
    for event in client.chat.completions.create(
        model=server.model, **ASK, stream=True, extra_body={"sot": SOT | {"schedule": "even"}}
    ):
        for choice in event.choices:
            begun.setdefault(choice.index, []).append(choice.finish_reason)
            if choice.finish_reason and len(begun) > 1 and choice.index == 0:
                assert len(begun[1]) > 2, "the second point is being written"


def test_without_a_plan(server, client):
    """The model may answer in one text; whichever way it goes, the facts say so."""
    ask = {"messages": [{"role": "user", "content": "1"}], "extra_body": {"sot": {}}}
    answer = client.chat.completions.create(model=server.model, **ASK | ask)
    texts, _, facts, _ = streamed(client, server, "plan", messages=ask["messages"], extra_body={"sot": {"order": "plan"}})
    assert answer.sot["mode"] == facts[-1]["mode"] and texts[0] == answer.choices[0].message.content


def test_beside_other_chats(server, client, expected):
    """Answers with plans and plain ones run at once, and each is what it is alone."""
    plain = client.chat.completions.create(model=server.model, **ASK).choices[0].message.content

    def ask(number):
        extra = {"sot": SOT} if number % 2 else {}
        return client.chat.completions.create(model=server.model, **ASK, extra_body=extra).choices[0].message.content

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(6))) == 3 * [plain, expected.text]
    server.wait_idle()


@pytest.mark.parametrize("moment", ["plan", "points"])
def test_a_client_that_leaves_ends_all_points(server, moment):
    body = {"model": server.model, "stream": True, "sot": SOT} | ASK | {"max_tokens": 1000}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
        for line in response.iter_lines():
            if moment == "plan" or '"content"' in line:
                break
    server.wait_idle()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sot": {"max_parallel": 0}}, "sot: Input should be greater than or equal to 1"),
        ({"sot": {"max_paralel": 2}}, "sot: Extra inputs are not permitted"),
        ({"sot": {"order": "random"}}, "sot: Input should be 'written' or 'plan'"),
        ({"sot": True}, "sot: "),
        ({"sot": SOT | {"max_kv_len": 100}}, "max_kv_len is 100. Raise it"),
        ({"n": 2}, "n is not supported together with sot"),
        ({"stop": ["x"]}, "stop is not supported together with sot"),
        ({"logprobs": True}, "logprobs is not supported together with sot"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported together with sot"),
        ({"messages": HISTORY}, "the last message is the question"),
        ({"messages": [{"role": "user", "content": "  "}]}, "the last message is the question"),
        ({"deadline": 1}, "deadline is 1"),
    ],
)  # fmt: skip
def test_bad_requests(server, change, words):
    body = {"model": server.model, "sot": SOT} | ASK | change
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    body = json.dumps({"model": server.model, "prompt": "x", "sot": SOT})
    assert "sot" in server.post("/v1/completions", body).json()["error"]["message"]
    server.wait_idle()


def test_harmless_fields_are_taken(server, client, expected):
    answer = client.chat.completions.create(
        model=server.model, **ASK, n=1, user="me", metadata={"a": "b"}, logprobs=False, extra_body={"sot": SOT, "priority": 5}
    )
    assert answer.choices[0].message.content == expected.text
