"""A speculative strategy in the server: the same answers, and counts of guesses where they are asked for."""

import json

import httpx

from tests.serve.test_guided import COLOUR, ask
from tests.serve.test_plugins import generate
from tests.serve.test_streaming import LONG, events

PROMPT = "one two three one two three one two three"
COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


def test_guesses_in_the_server(launch):
    server = launch("--speculative", "ngram", "--speculative-options", json.dumps({"lookahead": 3})).ready()
    client = server.client()
    model = client.models.list().data[0].id
    asked = {"max_tokens": 32, "temperature": 0, "extra_body": {"ignore_eos": True}}
    wish = asked | {"extra_body": {"ignore_eos": True, "speculation_usage": True}}

    plain = client.completions.create(model=model, prompt=PROMPT, **asked)
    assert getattr(plain.usage, "completion_tokens_details", None) is None
    told = client.completions.create(model=model, prompt=PROMPT, **wish)
    assert told.choices[0].text == plain.choices[0].text and told.usage.completion_tokens == 32
    accepted, rejected = (getattr(told.usage.completion_tokens_details, name) for name in COUNTS)
    assert accepted > 0 and rejected >= 0

    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model=model, messages=messages, logprobs=True, top_logprobs=2, **wish)
    assert len(chat.choices[0].logprobs.content) == 32 == chat.usage.completion_tokens
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **wish
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens_details == chat.usage.completion_tokens_details

    with httpx.stream("POST", f"{server.url}/generate", json=LONG | {"prompt": PROMPT}, timeout=60) as response:
        chunks = events(response.iter_lines())  # kept: the connection closes when nothing refers to them
        assert next(chunks)["text"]
        choice = ask(client, model, COLOUR)  # beside requests that are guessed at one that is not
        assert choice.finish_reason == "stop" and json.loads(choice.message.content) in COLOUR["enum"]
    server.wait_idle()
    several = server.post("/v1/completions", {"model": model, "prompt": "a", "n": 2})
    assert several.status_code == 400 and "n is 2" in several.text

    drafted, right = (server.metric("sagellm_speculative_tokens_total", kind=kind) for kind in ("drafted", "accepted"))
    assert drafted >= right >= 2 * accepted
    assert 0 < server.metric("sagellm_speculative_place_tokens_total", kind="drafted", place="3") < drafted
    bad = server.post("/v1/completions", {"model": model, "prompt": "a", "speculation_usage": "yes"})
    assert bad.status_code == 400 and "true or false" in bad.text
    generate(server)
    server.end()
