"""A strategy and a speculator in one server: what clients ask of them comes to their decisions, both are on record."""

import functools
import itertools
import json

import httpx
import pytest
from openai import OpenAI

from tests.serve.endings import interrupted
from tests.serve.harness import ServerProcess
from tests.serve.one_server.test_guided import COLOUR, ask
from tests.serve.one_server.test_streaming import LONG, events
from tests.serve.test_plugins import generate

PROMPT = "one two three one two three one two three"
COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


@pytest.mark.slow
def test_requests_of_the_api_are_scheduled_and_guessed_until_an_interrupt(launch, tmp_path):
    record = tmp_path / "record.jsonl"
    scheduled = ("--strategy", "priority", "--strategy-options", '{"ageing_s": 5}', "--record", record)
    guessed = ("--speculative", "suffix", "--speculative-options", '{"lookahead": 3}')
    server = launch(*scheduled, *guessed, "--drain-timeout-s", 25).ready()
    with server.client() as client:
        model = client.models.list().data[0].id
        asked = {"priority": -7, "tenant": "acme", "ttft_slo_ms": 900}
        body = {"max_tokens": 8, "extra_body": {"ignore_eos": True, **asked}}
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], **body)
        assert answer.usage.completion_tokens == 8
        generate(server)
        guesses_in_the_server(server, client, model)
        stop_strings_between_guesses(server, client, model)
    server.wait_idle()

    interrupted(server)
    assert json.loads(server.stdout)["ready"] is True  # one line, nothing else
    assert "Traceback" not in server.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    first, second, *_ = [line for line in lines if line["event"] == "arrive"]
    assert first["tenant"] == "acme" and first["service"] == {"priority": -7, "ttft_s": 0.9} and "service" not in second
    decisions = [line for line in lines if line["event"] == "schedule"]
    plans = [line for line in lines if line["event"] == "plan"]
    assert decisions and plans and {line["strategy"] for line in plans} == {"priority"}
    assert all(line["queue"] and line["reason"] for line in decisions)
    assert not [line for line in lines if line["event"] == "fault"]


def guesses_in_the_server(server: ServerProcess, client: OpenAI, model: str) -> None:
    """The same answers, and counts of guesses where they are asked for."""
    asked = {"max_tokens": 32, "temperature": 0, "extra_body": {"ignore_eos": True}}
    wish = asked | {"extra_body": {"ignore_eos": True, "speculation_usage": True}}

    plain = client.completions.create(model=model, prompt=PROMPT, **asked)
    assert getattr(plain.usage, "completion_tokens_details", None) is None
    told = client.completions.create(model=model, prompt=PROMPT, **wish)
    assert told.choices[0].text == plain.choices[0].text and told.usage.completion_tokens == 32
    accepted, rejected = (getattr(told.usage.completion_tokens_details, name) for name in COUNTS)
    assert accepted > 0 and rejected >= 0
    assert getattr(plain.usage, "speculation", None) is None
    told_more(told.usage.speculation, accepted, rejected, num_decoded=32 - 1)

    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model=model, messages=messages, logprobs=True, top_logprobs=2, **wish)
    assert len(chat.choices[0].logprobs.content) == 32 == chat.usage.completion_tokens
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **wish
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0  # it has seen the answer by now
    prompts = [PROMPT, PROMPT, "four five six"]
    several = client.completions.create(model=model, prompt=prompts, **wish)  # counted together
    counted = [getattr(several.usage.completion_tokens_details, name) for name in COUNTS]
    told_more(several.usage.speculation, *counted, num_decoded=len(prompts) * (32 - 1))

    with httpx.stream("POST", f"{server.url}/generate", json=LONG | {"prompt": PROMPT}, timeout=60) as response:
        chunks = events(response.iter_lines())  # kept: the connection closes when nothing refers to them
        assert next(chunks)["text"]
        choice = ask(client, model, COLOUR)  # beside requests that are guessed at one that is not
        assert choice.finish_reason == "stop" and json.loads(choice.message.content) in COLOUR["enum"]
    server.wait_idle()
    several = server.post("/v1/completions", {"model": model, "prompt": "a", "n": 2, "max_tokens": 4}).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1]

    drafted, right = (server.metric("sagellm_speculative_tokens_total", kind=kind) for kind in ("drafted", "accepted"))
    assert drafted >= right > accepted
    assert 0 < server.metric("sagellm_speculative_place_tokens_total", kind="drafted", place="3") < drafted
    bad = server.post("/v1/completions", {"model": model, "prompt": "a", "speculation_usage": "yes"})
    assert bad.status_code == 400 and "true or false" in bad.text
    generate(server)


def stop_strings_between_guesses(server: ServerProcess, client: OpenAI, model: str) -> None:
    """An answer ends behind the token that makes its stop string whole, also where a step gave more tokens."""
    asked = {"model": model, "max_tokens": 32, "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = functools.partial(
        client.chat.completions.create, messages=[{"role": "user", "content": PROMPT}], logprobs=True, **asked
    )
    tokens = [entry.token for entry in chat().choices[0].logprobs.content]
    words = {token for token in tokens[1:] if token.isascii()}
    assert len(words) > 7  # so that some stand within the four tokens of a step
    for word in sorted(words)[:6]:
        end = min(place for place, token in enumerate(tokens) if word in token) + 1
        whole = chat(stop=word)
        assert [entry.token for entry in whole.choices[0].logprobs.content] == tokens[:end]
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (end, "stop")
        chunks = list(chat(stop=word, stream=True, stream_options={"include_usage": True}))
        streamed = [entry.token for chunk in chunks if chunk.choices for entry in chunk.choices[0].logprobs.content]
        assert streamed == tokens[:end] and chunks[-1].usage == whole.usage

    complete = functools.partial(client.completions.create, prompt=PROMPT, logprobs=1, **asked)
    values = complete().choices[0].logprobs.token_logprobs
    texts = [complete(max_tokens=size).choices[0].text for size in range(1, 13)]
    words = {text[len(before) :] for before, text in itertools.pairwise(texts)}
    for word in sorted(word for word in words if word and word.isascii())[:3]:
        end = next(size for size, text in enumerate(texts, 1) if word in text)
        whole = complete(stop=word)
        assert whole.choices[0].logprobs.token_logprobs == pytest.approx(values[:end], abs=1e-5)
        chunks = list(complete(stop=word, stream=True, stream_options={"include_usage": True}))
        streamed = [value for chunk in chunks for choice in chunk.choices for value in choice.logprobs.token_logprobs]
        assert streamed == pytest.approx(values[:end], abs=1e-5)
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == end


def told_more(found: dict, accepted: int, rejected: int, num_decoded: int) -> None:
    assert (found["drafted"], found["accepted"]) == (accepted + rejected, accepted)
    drafted_at, accepted_at = found["drafted_at"], found["accepted_at"]
    assert len(drafted_at) == len(accepted_at) == 3 and sum(drafted_at) == found["drafted"] and sum(accepted_at) == accepted
    assert found["acceptance_at"] == [right / made for right, made in zip(accepted_at, drafted_at, strict=True)]
    # Each step with guesses has a first one; each step gives its right guesses, and a token more.
    assert found["mean_accepted"] == accepted / drafted_at[0]
    assert found["tokens_per_step"] == num_decoded / (num_decoded - accepted)
