"""Streaming, and clients that leave."""

import json
import socket
import threading

import httpx
import pytest

from tests.serve.harness import KEY

LONG = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
HEADERS = {"Authorization": f"Bearer {KEY}"}


def events(lines):
    """Payloads of server-sent events."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


def test_chunks_add_up_to_the_answer(server, client):
    options = dict(
        model=server.model, messages=[{"role": "user", "content": "Write a function."}], max_tokens=40, temperature=0
    )
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    *chunks, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage and last.choices == [] and all(chunk.usage is None for chunk in chunks)
    # One a token, but for those whose text is not complete and those that came while another was written: on a busy
    # machine many.
    assert len(chunks) > 2


def test_the_first_chunk_comes_before_the_last_token_and_a_client_may_leave(server):
    """Blocks are held from the prompt to the last token: while some are, the answer is not finished."""
    server.wait_idle()
    with httpx.stream("POST", f"{server.url}/generate", json=LONG, headers=HEADERS, timeout=60) as response:
        chunks = events(response.iter_lines())  # kept: the connection closes when nothing refers to them
        first = next(chunks)
        assert first["text"] and first["meta_info"]["finish_reason"] is None
        assert first["meta_info"]["completion_tokens"] < LONG["max_tokens"] / 10
        server.wait_for_metric("active blocks", lambda n: n > 0, "sagellm_kv_blocks", state="active")
    server.wait_idle()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_leaves_without_streaming(server, path):
    body = json.dumps(LONG | {"stream": False, "model": server.model}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        server.wait_for_metric("active blocks", lambda n: n > 0, "sagellm_kv_blocks", state="active")
    server.wait_idle()
    assert "Traceback" not in server.stderr


def test_many_leave_at_once_and_one_stays(server, client):
    def leave():
        with httpx.stream("POST", f"{server.url}/generate", json=LONG, headers=HEADERS, timeout=60) as response:
            next(response.iter_bytes())

    options = dict(model=server.model, prompt="import ", max_tokens=60, temperature=0)
    alone = client.completions.create(**options).choices[0].text
    leavers = [threading.Thread(target=leave) for _ in range(8)]
    for thread in leavers:
        thread.start()
    assert client.completions.create(**options).choices[0].text == alone
    for thread in leavers:
        thread.join()
    server.wait_idle()
    server.wait_for_metric("nothing unfinished", lambda n: n == 0, "lmdeploy:num_requests_unfinished")
    assert "CancelledError" not in server.stderr
