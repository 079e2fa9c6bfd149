"""A server whose skeleton-of-thought answers are written by several engines."""

import re
import signal
import threading

import httpx
import psutil
import pytest

from benchmarks.processes import command_line, wait_until
from sagellm.demo_model import ensure_demo_model
from tests.serve.harness import ServerProcess

ASK = {"messages": [{"role": "user", "content": "How do I read a file?"}], "max_tokens": 24, "temperature": 0}
SOT = {"plan": "always"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--model", ensure_demo_model(), "--device", "cpu", "--kv-blocks", 200, "--sot-workers", 1)
    process = ServerProcess(tmp_path_factory.mktemp("server"), *options)
    try:
        yield process.ready()
        process.end()  # and no process and no file is left
    finally:
        process.kill()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def expected(server, client):
    """The answer whose points are written by both engines."""
    answer = client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})
    points, stats = answer.sot["points"], answer.sot["stats"]
    assert len(points) >= 2 and 0 < stats["by_workers"] < len(points)
    return answer


def test_both_engines_write_points(server, expected):
    assert server.metric("sagellm_sot_workers") == 1
    assert server.metric("sagellm_pd_requests_total", side="offers", outcome="read") == 1, "the plan has travelled once"
    server.wait_idle()


@pytest.mark.parametrize("order", ["written", "plan"])
def test_streams_have_the_same_text(server, client, expected, order):
    texts, facts = streamed(client, server, order)
    assert "".join(texts[index] for index in sorted(texts)) == expected.choices[0].message.content
    assert len(texts) == (len(expected.sot["points"]) if order == "written" else 1)
    assert facts["stats"]["by_workers"] == expected.sot["stats"]["by_workers"]
    server.wait_idle()


def streamed(client, server, order, on_plan=lambda: None):
    texts, facts = {}, []
    options = {"stream": True, "extra_body": {"sot": SOT | {"order": order}}}
    for event in client.chat.completions.create(model=server.model, **ASK, **options):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if hasattr(event, "sot"):
            facts.append(event.sot)
            if len(facts) == 1:
                on_plan()
    return texts, facts[-1]


def test_answers_at_once_go_to_both_engines(server, client, expected):
    found = []

    def ask():
        found.append(client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.choices[0].message.content for answer in found] == 4 * [expected.choices[0].message.content]
    assert [answer.usage for answer in found] == 4 * [expected.usage]
    server.wait_idle()


def test_a_client_that_leaves(server, client, expected):
    """Its points end on both engines, and the next answer is as ever."""
    body = {"model": server.model, "stream": True, "sot": SOT} | ASK | {"max_tokens": 1000}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    server.wait_idle()
    assert streamed(client, server, "written")[1]["stats"]["by_workers"] > 0


def test_a_worker_that_is_killed_in_the_middle_of_an_answer(server, client, expected):
    """It has its points, and has written none. The server's engine writes them, and all others from then on."""
    (worker,) = [each for each in server.family() if "sagellm.accel.sot.workers" in command_line(each)]
    worker.send_signal(signal.SIGSTOP)
    texts, facts = streamed(client, server, "written", on_plan=worker.kill)
    assert "".join(texts[index] for index in sorted(texts)) == expected.choices[0].message.content
    assert facts["stats"]["by_workers"] == 0
    server.wait_for_metric("no worker", lambda n: n == 0, "sagellm_sot_workers")
    wait_until("its end", lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    answer = client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})
    assert answer.choices[0].message.content == expected.choices[0].message.content
    server.wait_idle()


def test_a_worker_that_does_not_start(tmp_path):
    """Ends the server with a reason."""
    options = ("--model", ensure_demo_model(), "--device", "cpu", "--kv-blocks", 200, "--sot-workers", 1)
    process = ServerProcess(tmp_path / "server", *options)
    try:
        worker = wait_until("a worker", lambda: [p for p in process.family() if "sot.workers" in command_line(p)], 90)
        worker[0].kill()
        assert process.process.wait(60) == 2
        assert re.search("error: a worker ended at its start with exit code -9", process.stderr)
    finally:
        process.kill()
