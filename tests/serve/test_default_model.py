"""A server without `--model`, as a new user starts it, and one on the demo model."""

import subprocess
import sys

import pytest

from tests.serve.endings import hurried

ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.slow
def test_the_default_model_holds_a_conversation(launch):
    server = launch(model=None).ready()
    assert server.model == "smollm2"
    with server.client() as client:
        answer = client.chat.completions.create(model=server.model, messages=ASK, max_tokens=40, temperature=0)
        (choice,) = answer.choices
        assert "Paris" in choice.message.content and choice.finish_reason == "stop"
        assert answer.usage.prompt_tokens == 37, "the template brings the only BOS"
        seeded = {"messages": ASK, "model": server.model, "max_tokens": 60, "seed": 7}
        texts = [
            server.post("/v1/chat/completions", seeded | values).json()["choices"][0]["message"]["content"]
            for values in ({}, {"temperature": None}, {"temperature": 0}, {"temperature": 2.0})
        ]
        assert texts[0] == texts[1] == texts[2] != texts[3], "the model's own sampling"
        ids = server.post("/v1/encode", {"input": "<|im_start|>user\nHi<|im_end|>", "add_bos": True}).json()["input_ids"]
        assert ids.count(1) == 1
    hurried(server)


@pytest.mark.slow
def test_the_demo_model_answers_with_python(launch):
    subprocess.run([sys.executable, "-m", "sagellm.demo_model"], check=True)  # longer than a server may take to start
    server = launch("--model", "demo", model=None).ready()
    ask = [{"role": "user", "content": "Write a function that returns the sum of two numbers."}]
    with server.client() as client:
        answer = client.chat.completions.create(model=server.model, messages=ask, max_tokens=60, temperature=0)
    (choice,) = answer.choices
    assert server.model == "sagellm-demo"
    assert "def " in choice.message.content and "\N{REPLACEMENT CHARACTER}" not in choice.message.content
    server.end()
