"""`/v1/embeddings` on the real server, next to transformers' hidden states."""

import base64

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.serve.harness import KEY

TEXTS = ["def add(a, b):\n    return a + b\n", 300 * "import os, sys\n", "x"]
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def reference(demo_model):
    """Returns the vectors of texts by pooling, not normalised, and their tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(demo_model), AutoModel.from_pretrained(demo_model, dtype=torch.float32)

    def of(text):
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        return {"mean": hidden.mean(0), "last": hidden[-1]}, ids

    return of


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_pooled_hidden_states(server, client, reference, pooling):
    wanted = [reference(text) for text in TEXTS]
    num_tokens = sum(len(ids) for _, ids in wanted)
    assert max(len(ids) for _, ids in wanted) > 512, "one takes several forward passes"
    for given in (TEXTS, [ids for _, ids in wanted]):
        answer = client.embeddings.create(model=server.model, input=given, extra_body={"pooling": pooling})
        assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == server.model
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
        for item, (vectors, _) in zip(answer.data, wanted, strict=True):
            vector = vectors[pooling] / np.linalg.norm(vectors[pooling])
            assert np.allclose(item.embedding, vector, atol=1e-5)


def test_they_may_be_cached_mixed_with_answers_and_encoded(server, client, reference):
    text = 60 * "return a + b\n"
    ask = {"model": server.model, "prompt": text, "max_tokens": 20, "temperature": 0, "stream": True}
    ask["extra_body"] = {"ignore_eos": True}
    with client.completions.create(**ask) as stream:  # its prompt is cached, and it runs on
        pieces = [next(iter(stream)).choices[0].text]
        vector = reference(text)[0]["mean"]
        for _ in range(2):
            body = {"model": server.model, "input": text, "encoding_format": "base64"}
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body, headers=HEADERS).json()
            found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
            assert np.allclose(found, vector / np.linalg.norm(vector), atol=1e-5)
        pieces += [chunk.choices[0].text for chunk in stream]
    alone = client.completions.create(**ask | {"stream": False})
    assert "".join(pieces) == alone.choices[0].text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": ""}, "the prompt is empty"),
        ({"input": []}, "input must be a string, a list of strings"),
        ({"input": ["a", 5]}, "input must be a string, a list of strings"),
        ({"input": 2049 * ["a"]}, "input has 2049 texts; allowed are up to 2048"),
        ({"input": [[10**6]]}, "token ids must lie between 0 and"),
        ({"input": 5000 * "import os\n"}, "are allowed. Shorten it"),
        ({"input": "a", "dimensions": 8}, "dimensions is not supported"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "poolings": "max"}, "did you mean pooling?"),
        ({"input": "a", "priority": "high"}, "priority is"),
        ({"input": "a", "speculation_usage": True}, "speculation_usage is not a field"),
        ({"input": "a", "session_id": 5}, "session_id is not a field"),
        ({"input": "a", "metadata": {}}, "metadata is not a field"),
        ({"input": "a", "user": 5}, "user"),
        ({}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused(server, fields, words):
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": server.model} | fields, headers=HEADERS)
    assert answer.status_code == 400 and words in answer.json()["message"]


def test_another_model_and_strangers(server):
    body = {"model": "other", "input": "a"}
    assert httpx.post(f"{server.url}/v1/embeddings", json=body, headers=HEADERS).status_code == 404
    assert httpx.post(f"{server.url}/v1/embeddings", json=body | {"model": server.model}).status_code == 401


def test_a_client_that_leaves_ends_its_work(server):
    body = {"model": server.model, "input": 200 * [400 * "import os\n"]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", json=body, headers=HEADERS, timeout=1.0)
    server.wait_idle()
