"""Two engines of this project on a tiny model behind one manager: answers, embeddings, and one that is killed under load."""

import concurrent.futures
import os
import signal

import pytest
from openai import APIError, OpenAI

from benchmarks.processes import wait_until
from sagellm import UnifiedInferenceClient
from sagellm.control_plane.manager import ControlPlaneManager
from tests.conftest import SHAPE
from tests.control_plane.test_gateway import metric

pytestmark = pytest.mark.slow  # `test_scaling.py` has a real engine behind a manager

NUM_PROMPTS, NUM_TOKENS = 6, 24
PROMPTS = [f"prompt {number} of the test" for number in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def manager(model_folder):
    settings = {"kind": "sagellm", "model": str(model_folder("llama")), "model_name": "tiny", "device": "cpu", "threads": 1,
                "kv_blocks": 128, "block_size": 16}  # fmt: skip
    with ControlPlaneManager(port=0, publish=False, check_interval_s=0.2, engines={"a": settings, "b": settings}) as manager:
        yield manager


@pytest.fixture(scope="module")
def client(manager):
    with OpenAI(base_url=f"{manager.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def complete(client, prompt, stream=False):
    """The greedy answer, as a text."""
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, stream=stream)
    return "".join(each.choices[0].text for each in answer) if stream else answer.choices[0].text


def is_right(client, number, expected, broken):
    """Ask, every other time for a stream. A stream that breaks is right so far, and `broken` gets its text and its error."""
    prompt, got = PROMPTS[number % NUM_PROMPTS], ""
    try:
        if number % 2:
            return complete(client, prompt) == expected[prompt]
        for each in client.completions.create(
            model="tiny", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, stream=True
        ):
            got += each.choices[0].text
    except APIError as error:
        broken.append((got, str(error)))
        return expected[prompt].startswith(got)
    return got == expected[prompt]


@pytest.fixture(scope="module")
def expected(client):
    return {prompt: complete(client, prompt) for prompt in PROMPTS}


def test_both_engines_serve_the_model(manager, client, expected):
    assert [one.id for one in client.models.list()] == ["tiny"]
    for one in manager.engines():
        assert (one["state"], one["device"], one["models"]) == ("ready", "cpu", ["tiny"]) and len(one["routes"]) == 3
        assert "bfloat16" in one["capabilities"]["dtypes"] and "ngram" in one["capabilities"]["speculation"]
    assert [complete(client, prompt, stream=True) for prompt in PROMPTS] == list(expected.values())
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True)
    assert [each.choices[0].finish_reason for each in chat][-1] == "length"
    assert len(client.embeddings.create(model="tiny", input=["a", "b"]).data) == 2
    wait_until("the use of the KV pool", lambda: all("kv_use" in one["load"] for one in manager.engines()))


def test_an_engine_that_is_killed_under_load_loses_no_request_that_had_sent_nothing(manager, client, expected):
    first = manager.engines()[0]
    broken = []

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(is_right, client, number, expected, broken) for number in range(60)]
        wait_until("requests on both", lambda: all(one["running"] and one["served"] for one in manager.engines()))
        os.kill(first["pid"], signal.SIGKILL)
        assert all(each.result() for each in asked)
    # A request that had sent nothing went elsewhere. A stream that had begun says which engine failed; its text is a prefix.
    assert all("engine a failed in the middle of this answer" in words for _, words in broken)
    assert metric(manager, "sagellm_gateway_requests_total", engine="a", outcome="failed") == 0
    wait_until("its state", lambda: "signal 9" in manager.engines()[0]["why"])
    manager.unregister_engine("a")  # while it starts again
    assert [complete(client, prompt) for prompt in PROMPTS] == list(expected.values())


def test_an_engine_comes_back(manager, client, expected):
    first = manager.engines()[0]
    os.kill(first["pid"], signal.SIGKILL)

    def is_back():
        engine = manager.engines()[0]
        return engine["starts"] == 2 and engine["state"] == "ready"

    wait_until("the engine is there again", is_back, 120)
    again = manager.engines()[0]
    assert again["starts"] == 2 and again["pid"] != first["pid"] and "signal 9" in again["why"]
    served = again["served"]
    with concurrent.futures.ThreadPoolExecutor(NUM_PROMPTS) as pool:
        assert list(pool.map(lambda prompt: complete(client, prompt), PROMPTS)) == list(expected.values())
    wait_until("requests there", lambda: manager.engines()[0]["served"] > served)


def test_the_client_embeds_and_chats(manager):
    with UnifiedInferenceClient(manager.url) as client:
        vectors = client.embed(["a", "b"])
        assert len(vectors) == 2 and len(vectors[0]) == SHAPE["hidden_size"] and vectors[0] != vectors[1]
        assert isinstance(client.chat("hello", max_tokens=4), str)
