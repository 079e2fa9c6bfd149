"""Servers with a role, as processes: what they take from clients, their proxy, and others; how they come and go."""

import asyncio
import json

import httpx
import pytest

from sagellm.comm_backend.control import connect, sign_request
from sagellm.comm_backend.group_messages import EngineFacts, Hello
from sagellm.core.errors import PeerError
from tests.serve.endings import engine_killed
from tests.serve.harness import wait_until

KEY = b"a key of the tests"
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0, "logprobs": 1}


@pytest.fixture
def launch_role(launch, tmp_path):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    return lambda role, url, *options: launch("--role", role, "--proxy-url", url, "--pd-key-file", file, *options)


def post_signed(server, path, document, key=KEY):
    body = json.dumps(document).encode()
    headers = {"Content-Type": "application/json"} | sign_request(key, "POST", path, body)
    return httpx.post(server.url + path, content=body, headers=headers, timeout=60)


def info(server, key=KEY):
    return httpx.get(f"{server.url}/sage/pd/info", headers=sign_request(key, "GET", "/sage/pd/info"), timeout=30)


def tokens(answer):
    """Not the text: a special token that comes together with the one before it makes LMDeploy leave that one out of it."""
    return answer.json()["choices"][0]["logprobs"]["tokens"]


def facts(address, key=KEY):
    async def ask():
        connection = await connect(address, key)
        try:
            return await connection.call(Hello(engine_id="proxy"), 10, EngineFacts)
        finally:
            await connection.close()

    return asyncio.run(ask())


@pytest.mark.slow
def test_a_decode_engine_until_its_process_is_killed(launch_role, proxy):
    first = proxy(KEY)
    server = launch_role("decode", first.url).ready()
    wait_until("registration", lambda: first.nodes == {server.url: {"models": ["tiny"], "role": 3}})

    own = info(server).json()
    assert own | {"control": ""} == {"engine_id": server.url, "role": "decode", "control": "", "model": "tiny"}
    told = facts(own["control"])
    assert (told.engine_id, told.role, told.model, told.channel, told.block_size) == (server.url, "decode", "tiny", "shm", 16)
    assert told.weights.endswith("-float32") and len(told.weights) > 30
    with pytest.raises(PeerError, match="another key"):
        facts(own["control"], KEY + b"x")
    assert info(server, KEY + b"x").status_code == 401
    assert httpx.get(f"{server.url}/sage/pd/info", timeout=30).status_code == 401

    # A client without a key gets what a server without a role gives, and nothing more.
    plain = server.post("/v1/completions", ASK)
    assert plain.status_code == 200
    for path in ("/health", "/metrics", "/v1/models"):
        assert httpx.get(server.url + path, timeout=30).status_code == 200
    migration = {"protocol": 1, "remote_engine_id": "x", "remote_session_id": 1, "remote_token_id": 0, "remote_block_ids": []}
    for fields in ({"migration_request": migration}, {"with_cache": True}, {"preserve_cache": True}):
        answer = server.post("/v1/completions", ASK | fields)
        assert answer.status_code == 401 and "not signed with its key" in answer.text
    for path in ("/distserve/free_cache", "/distserve/p2p_connect"):
        answer = server.post(path, {"remote_engine_id": "x", "remote_session_id": 1})
        assert answer.status_code == 401 and "not signed with its key" in answer.text
    assert post_signed(server, "/v1/completions", ASK, KEY + b"x").status_code == 401

    # The proxy's requests; the other engine is unknown here, so this one computes the prompt itself.
    split = post_signed(server, "/v1/completions", ASK | {"migration_request": migration})
    assert split.status_code == 200 and tokens(split) == tokens(plain) and len(tokens(plain)) == 3
    bad = post_signed(server, "/v1/completions", ASK | {"migration_request": migration | {"protocol": 99}})
    assert bad.status_code == 400 and "migration_request.protocol" in bad.text
    two = post_signed(server, "/v1/completions", ASK | {"prompt": ["a", "b"], "migration_request": migration})
    assert two.status_code == 400 and "one prompt" in two.text

    # A proxy that is started anew knows no engine.
    first.nodes.clear()
    wait_until("registration again", lambda: server.url in first.nodes)
    assert "Traceback" not in server.stderr
    engine_killed(server)
    assert not first.nodes, "the server has taken leave for it"


@pytest.mark.slow
def test_a_prefill_engine_works_for_its_proxy_alone(launch_role, proxy):
    there = proxy(KEY)
    server = launch_role("prefill", there.url).ready()
    wait_until("registration", lambda: there.nodes == {server.url: {"models": ["tiny"], "role": 2}})
    for path, document in (("/v1/completions", ASK), ("/generate", {"prompt": "a"}), ("/v1/encode", {"input": "a"})):
        answer = server.post(path, document)
        assert answer.status_code == 403 and f"send the request to {there.url}" in answer.text
    assert post_signed(server, "/v1/completions", ASK | {"max_tokens": 1}).status_code == 200
    assert facts(info(server).json()["control"]).role == "prefill"
    server.end()
    assert not there.nodes and "Traceback" not in server.stderr


@pytest.mark.slow
def test_a_proxy_with_another_key_ends_the_start(launch_role, proxy):
    there = proxy(b"a key of somebody else")
    server = launch_role("hybrid", there.url)
    server.end(None, code=2)
    assert f"error: the proxy at {there.url} refuses this engine (status 401)" in server.stderr
    assert "Traceback" not in server.stderr
