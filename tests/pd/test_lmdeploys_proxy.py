"""LMDeploy's own DistServe proxy, as it is, before our engines: prompts move, answers are those of one engine."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.pd.harness import until
from tests.pd.lmdeploys_proxy import ProxiedByLMDeploy
from tests.pd.real_group import body_of, chat_of, choice_tokens, streamed_by, tokens_of

pytestmark = pytest.mark.slow  # three more processes, for a proxy that is not ours

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def started(tmp_path_factory, model_folder):
    group = ProxiedByLMDeploy(tmp_path_factory.mktemp("proxied"), model_folder("llama"))
    try:
        yield group.ready()
        group.end()
    finally:
        group.close()


@pytest.fixture
def group(started):
    """Every block is accounted for after each test."""
    yield started
    until("both engines are idle", started.is_idle)


WAYS = {
    "greedy": (COMPLETION, {}),
    "seed": (COMPLETION, {"temperature": 1.2, "top_p": 0.9, "seed": 7}),
    "chat": (CHAT, {}),
    "at least": (CHAT, {"min_new_tokens": 6, "temperature": 1.0, "seed": 3}),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_one_engine(group, prompt, way):
    path, fields = WAYS[way]
    body = (body_of(prompt, 12) if path is COMPLETION else chat_of(prompt)) | fields
    before = group.arrived()
    whole = httpx.post(group.url + path, json=body, timeout=60).json()
    in_pieces, _ = streamed_by(httpx, group.url + path, body)
    expected = choice_tokens(group.single(path, body).json()["choices"][0])
    assert choice_tokens(whole["choices"][0]) == in_pieces == expected
    assert group.arrived() == before + 2, "it was not split"


def test_several_at_once(group, prompt):
    before = group.arrived()
    prompts = [f"{number} {prompt}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(httpx.post, group.url + COMPLETION, json=body_of(one, 8), timeout=60) for one in prompts]
        found = [tokens_of(one.result()) for one in answers]
    assert found == [group.expected(one) for one in prompts]
    assert group.arrived() == before + 6


def test_an_answer_that_is_over_at_once(group, prompt):
    """The first token does not belong to the answer. LMDeploy's handler wants a token from the prompt's copy all the same."""
    body = chat_of(prompt, response_format={"type": "regex_schema", "regex_schema": "x{0,0}"})
    found = httpx.post(group.url + CHAT, json=body, timeout=60)
    expected = group.single(CHAT, body).json()["choices"][0]
    assert expected["finish_reason"] == "stop" and not expected["message"]["content"]
    assert found.json()["choices"][0] == expected


def test_several_prompts_are_not_split(group, prompt):
    before = group.arrived()
    body = body_of(prompt, 8) | {"prompt": [prompt, "another one"]}
    found = httpx.post(group.url + COMPLETION, json=body, timeout=60).json()
    assert [choice_tokens(one) for one in found["choices"]] == [group.expected(prompt), group.expected("another one")]
    assert group.arrived() == before


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_the_client_is_told_what_is_wrong(group, prompt, path):
    body = body_of(prompt, 8) if path is COMPLETION else chat_of(prompt)
    found = httpx.post(group.url + path, json=body | {"temperature": 9}, timeout=60).json()
    assert found["error"]["message"] == "temperature is 9.0; allowed: 0 to 2."


def test_blocks_that_the_proxy_frees(group, prompt):
    asked, stranger = body_of(prompt, 1, with_cache=True, preserve_cache=True), {"Origin": "http://a.page"}
    assert httpx.post(group.prefill + COMPLETION, json=asked, headers=stranger, timeout=60).status_code == 401
    kept = httpx.post(group.prefill + COMPLETION, json=asked, timeout=60).json()
    assert group.metric(group.prefill, "sagellm_pd_running", side="offers") == 1
    assert group.metric(group.prefill, "sagellm_kv_blocks", state="active") == len(kept["cache_block_ids"]) > 0
    freed = {"remote_engine_id": group.prefill, "remote_session_id": kept["id"]}
    assert httpx.post(group.prefill + "/distserve/free_cache", json=freed, timeout=60).status_code == 200
    until("both engines are idle", group.is_idle)


def test_an_engine_that_the_proxy_drops(group, prompt):
    """It comes back by itself, and they are connected anew."""
    ask = lambda: tokens_of(httpx.post(group.url + COMPLETION, json=body_of(prompt, 8), timeout=60))  # noqa: E731
    before, expected = group.arrived(), group.expected(prompt)
    assert ask() == expected  # they are connected
    assert httpx.post(f"{group.url}/nodes/remove", json={"url": group.decode}, timeout=60).status_code == 200
    until("both engines are registered", group.is_whole)
    assert ask() == expected and group.arrived() == before + 2
