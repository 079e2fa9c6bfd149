"""A group whose engines have two worker processes each: answers, and the death of a worker."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.processes import free_port, workers_below
from tests.pd.harness import until
from tests.pd.real_group import RealGroup, tokens_of

pytestmark = pytest.mark.slow
PROMPT = "what was computed here is wanted there. " * 6


def workers(group, role):
    return workers_below(group.engine(role))


def test_workers_that_die(tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # both engines inherit it, and neither may meet the other there
    group = RealGroup(tmp_path, model_folder("llama"), "--tensor-parallel", "2")
    try:
        group.ready()
        until("the group is whole", group.is_whole, 60)
        first = group.expected("one: " + PROMPT)
        assert tokens_of(group.complete("one: " + PROMPT)) == first and group.arrived() == 1
        until("both engines are idle", group.is_idle, 10)
        # One that is read: its engine ends, the transfer fails, and the prompt is computed where it decodes.
        expected = group.expected("two: " + PROMPT)
        engine = group.engine("prefill")
        with ThreadPoolExecutor(1) as threads:
            with group.held() as held:
                answer = threads.submit(group.complete, "two: " + PROMPT)
                held()
                workers(group, "prefill")[1].kill()
                until("the engine has ended", lambda: not engine.is_running(), 20)
            assert tokens_of(answer.result(60)) == expected
        assert group.arrived() == 1
        assert "worker 1 has gone" in group.stderr
        until("the group is whole again", group.is_whole, 120)
        assert tokens_of(group.complete("three: " + PROMPT)) == group.expected("three: " + PROMPT)
        assert group.arrived() == 2
        # One that writes: its engine ends, and the request is sent to the one that takes its place.
        engine = group.engine("decode")
        with ThreadPoolExecutor(1) as threads:
            with group.held() as held:
                answer = threads.submit(group.complete, "one: " + PROMPT)
                held()
                workers(group, "decode")[0].kill()
                until("the engine has ended", lambda: not engine.is_running(), 20)
            assert tokens_of(answer.result(120)) == first
        assert "worker 0 has gone" in group.stderr
        until("the group is whole again", group.is_whole, 120)
        until("both engines are idle", group.is_idle, 10)
        seen = re.findall(r"worker \d has gone", group.stderr)
        group.end()
        assert re.findall(r"worker \d has gone", group.stderr) == seen, "no worker is missed that ends with its engine"
    finally:
        group.close()
