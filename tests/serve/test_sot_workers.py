"""A server whose skeleton-of-thought answers are written by several engines."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.processes import command_line, wait_until, workers_below
from sagellm.demo_model import ensure_demo_model
from tests.serve.harness import ServerProcess

pytestmark = pytest.mark.slow  # `tests/accel/sot/test_group.py` has workers without a server

ASK = {"messages": [{"role": "user", "content": "How do I read a file?"}], "max_tokens": 24, "temperature": 0}
SOT = {"plan": "always"}
BACK_S = 300.0  # for a worker to be noticed and to come back, on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--model", ensure_demo_model(), "--device", "cpu", "--kv-blocks", 200, "--sot-workers", 1)
    process = ServerProcess(tmp_path_factory.mktemp("server"), *options)
    try:
        yield process.ready(BACK_S)
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
    def ask(_):
        return client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
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


def worker_of(server):
    """The process of the worker that was started last."""
    return [each for each in server.family() if "sagellm.accel.sot.workers" in command_line(each)][-1]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def restarts(server):
    names = ("sagellm_sot_workers", "sagellm_sot_worker_losses_total", "sagellm_sot_worker_restarts_total")
    return [server.metric(name) for name in names]


def check_it_comes_back(server, client, expected, worker, before):
    """The process that was lost is gone, and the one in its place writes points. `before`: `restarts` before the loss."""
    wait_until("its end", lambda: is_gone(worker), BACK_S)
    wait_until("its return", lambda: restarts(server) == [1, before[1] + 1, before[2] + 1], BACK_S)
    assert worker_of(server) != worker
    answer = client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.sot["stats"]["by_workers"] == expected.sot["stats"]["by_workers"]
    server.wait_idle()


def text_of(texts):
    return "".join(texts[index] for index in sorted(texts))


def test_a_worker_that_is_killed_in_the_middle_of_an_answer(server, client, expected):
    """It has its points, and has written none. The server's engine writes them, and another worker those of later answers."""
    worker, before = worker_of(server), restarts(server)
    worker.send_signal(signal.SIGSTOP)
    texts, facts = streamed(client, server, "written", on_plan=worker.kill)
    assert text_of(texts) == expected.choices[0].message.content and facts["stats"]["by_workers"] == 0
    check_it_comes_back(server, client, expected, worker, before)


def test_a_worker_that_is_stopped_is_replaced(server, client, expected):
    """It says nothing, and keeps the answer for `SILENCE_S`."""
    worker, before = worker_of(server), restarts(server)
    worker.send_signal(signal.SIGSTOP)
    texts, facts = streamed(client, server, "written")
    assert text_of(texts) == expected.choices[0].message.content and facts["stats"]["by_workers"] == 0
    check_it_comes_back(server, client, expected, worker, before)


def test_a_worker_that_is_killed_at_rest_comes_back(server, client, expected):
    worker, before = worker_of(server), restarts(server)
    worker.kill()
    check_it_comes_back(server, client, expected, worker, before)


@pytest.fixture
def start(tmp_path):
    """Starts a server with one worker and these options."""
    started = []

    def start(*options):
        common = ("--model", ensure_demo_model(), "--device", "cpu", "--kv-blocks", 200, "--sot-workers", 1)
        started.append(ServerProcess(tmp_path / "server", *common, *options))
        return started[0].ready(BACK_S)

    yield start
    for process in started:
        process.kill()


def answered_by_both(server, client):
    answer = client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})
    assert answer.sot["stats"]["by_workers"] > 0
    return answer


def test_a_worker_whose_engine_alone_hangs_is_replaced(start, tmp_path):
    """Its control connection still answers."""
    file = tmp_path / "stands still"
    options = json.dumps({"file": str(file)})
    server = start("--speculative", "tests.serve.plugins:StandsStill", "--speculative-options", options)
    with server.client() as client:
        expected, worker, before = answered_by_both(server, client), worker_of(server), restarts(server)
        texts, facts = streamed(client, server, "written", on_plan=file.touch)
        assert text_of(texts) == expected.choices[0].message.content and facts["stats"]["by_workers"] == 0
        assert re.search(r"worker sot://worker-0 leaves: its engine has points to write, and has ended no step", server.stderr)
        file.unlink()
        check_it_comes_back(server, client, expected, worker, before)
        server.end()


@pytest.mark.parametrize("fault", ["stop", "kill", "stop, and kill the worker"])
def test_a_worker_that_loses_a_process_of_its_engine_is_replaced(start, fault):
    """Its engine computes in two processes."""
    server = start("--tensor-parallel", 2, "--threads", 1)
    with server.client() as client:
        expected, worker, before = answered_by_both(server, client), worker_of(server), restarts(server)
        family = worker.children(recursive=True)
        memory = [Path(each.path) for each in worker.memory_maps() if "/dev/shm/psm_" in each.path]

        def hit():
            workers_below(worker)[1].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault.endswith("worker"):
                worker.kill()

        texts, _ = streamed(client, server, "written", on_plan=hit)
        assert text_of(texts) == expected.choices[0].message.content
        check_it_comes_back(server, client, expected, worker, before)
        wait_until("the end of all of it", lambda: all(map(is_gone, family)))
        assert memory and not any(file.exists() for file in memory)
        server.end()


def test_a_worker_that_cannot_come_back_is_tried_again_after_growing_pauses(start, tmp_path):
    """The server's engine writes all points meanwhile."""
    server = start()
    with server.client() as client:
        expected = answered_by_both(server, client)
        for times in range(1, 4):
            worker = worker_of(server)
            worker.kill()
            wait_until("another one", lambda times=times: restarts(server)[2] == times, BACK_S)
            wait_until("its process", lambda worker=worker: worker_of(server) != worker)
            answer = client.chat.completions.create(model=server.model, **ASK, extra_body={"sot": SOT})
            assert answer.choices[0].message.content == expected.choices[0].message.content
        wait_until("its return", lambda: restarts(server) == [1, 1, 3], BACK_S)
        assert re.findall(r"is started again in (\S+) s", server.stderr) == ["1", "2", "4"]
        server.end()


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
