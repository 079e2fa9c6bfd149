"""Workers over gloo that die, hang, fail, or do not end: errors for requests, and no process and no memory left behind."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from lmdeploy.pytorch.engine.executor.mp_executor import ExecutorProc

from benchmarks.processes import command_line
from sagellm.core.errors import EngineError
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy import worker_processes
from sagellm.engines.lmdeploy.workers import Watch
from tests.engines.lmdeploy.test_exactness import CROWD
from tests.engines.lmdeploy.worker_helpers import children, workers_of

# A worker that dies can leave its parent waiting for it.
pytestmark = pytest.mark.timeout(120)


def test_a_worker_that_is_ended_later_than_another_reports_no_failure(two_workers, monkeypatch):
    """The first one wakes it with its end; what then lies in the shared memory are old messages."""
    failures = []
    engine = two_workers()
    before = signal.signal(signal.SIGUSR1, lambda *_: failures.append("a worker failed"))  # LMDeploy ends the process
    try:
        engine.generate(CROWD, SamplingParams(max_new_tokens=40, ignore_eos=True))  # more messages than it holds
        close = ExecutorProc.close
        monkeypatch.setattr(ExecutorProc, "close", lambda worker: (close(worker), time.sleep(1.5)))
        engine.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert failures == []


@pytest.mark.parametrize(
    ("number", "when", "how"),
    [(0, "busy", "SIGKILL"), (1, "busy", "SIGKILL"), (1, "idle", "SIGKILL"), (1, "busy", "SIGSTOP")],
)  # fmt: skip
def test_a_worker_that_is_killed_or_hangs_is_an_error_for_requests_and_the_engine_closes(two_workers, number, when, how):
    engine = two_workers()
    executor = engine.engine.executor
    shared = {buffer.shm.name for buffer in (executor.comm_buf, *executor.ret_bufs)}
    long = SamplingParams(max_new_tokens=900, ignore_eos=True)
    engine.generate(CROWD, SamplingParams(max_new_tokens=40, ignore_eos=True))  # the ring of messages is written over
    worker = workers_of(engine)[number]

    def kill():
        if when == "busy":
            time.sleep(0.8)  # decoding: how late a prompt may be is not known well
        os.kill(worker.pid, signal.Signals[how])
        return time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        if when == "idle":
            killed.result()
        said = "hangs: the result of a step is" if how == "SIGSTOP" else "was ended by signal SIGKILL"
        with pytest.raises(EngineError, match=rf"worker {number} \(process {worker.pid}\) {said}"):
            engine.generate(CROWD, long)
        assert time.monotonic() - killed.result() < (20 if how == "SIGSTOP" else 10)
    with pytest.raises(EngineError, match=said):
        engine.generate(CROWD[:1])
    engine.close()
    assert not any(each.is_alive() for each in workers_of(engine))
    assert not shared & set(os.listdir("/dev/shm"))


class IdleWatch(Watch):
    def _run(self):
        """Look at nothing: a test asks."""

    _kill = _run


def test_a_slow_first_prompt_does_not_hide_a_later_hang(monkeypatch):
    """A first step loads code: its time for each token, of every token of a long prompt, would be minutes."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("sagellm.engines.lmdeploy.workers.time", clock)
    watch = IdleWatch(executor=None)

    def send(num_tokens):
        step = SimpleNamespace(is_decoding=False, input_ids=torch.zeros(1, num_tokens))
        watch.sent({"inputs": step})

    send(10)
    assert watch._late_s(59) < 0 < watch._late_s(61)
    for clock.now, after in ((3.0, 200), (4.0, 400)):
        watch.received(1)
        send(after)
    assert watch._late_s(4 + 5.9) < 0 < watch._late_s(4 + 6.1)  # twice the tokens and the time of the slowest
    assert watch._forget()


def test_a_worker_that_fails_says_why(two_workers):
    engine = two_workers(comm_backend="tests.engines.lmdeploy.own_backends:LosesItsLink")
    said = rf"worker 1 \(process {workers_of(engine)[1].pid}\) failed: CommError: the link is down"
    with pytest.raises(EngineError, match=said):
        engine.generate(CROWD, SamplingParams(max_new_tokens=40, ignore_eos=True))


def test_a_worker_that_dies_while_the_engine_is_built(start_engine, monkeypatch):
    """The process that workers are forked from ends too, because it is not kept here."""
    load = worker_processes.load_early
    monkeypatch.setattr(worker_processes, "_is_kept", False)
    monkeypatch.setattr(worker_processes, "load_early", lambda keep=False: load())
    worker_processes.end_early()
    shared, before = set(), children()
    start = ExecutorProc.start

    def start_and_kill(worker, **kwargs):
        start(worker, **kwargs)
        shared.update((kwargs["comm_buf_name"], kwargs["ret_buf_name"]))
        if worker.proc_id == 1:
            worker._proc.kill()

    monkeypatch.setattr(ExecutorProc, "start", start_and_kill)
    with pytest.raises(EngineError, match=r"worker 1 \(process \d+\) was ended by signal SIGKILL while the engine was built"):
        start_engine(tensor_parallel=2)
    left = [psutil.Process(pid) for pid in children() - before]
    assert [each for each in left if "resource_tracker" not in command_line(each)] == []
    assert len(shared) == 3 and not shared & set(os.listdir("/dev/shm"))


def test_an_engine_closes_though_a_worker_does_not_end_when_it_is_told_to(two_workers, monkeypatch):
    monkeypatch.setattr("sagellm.engines.lmdeploy.workers.END_S", 1.0)
    engine = two_workers()
    os.kill(workers_of(engine)[0].pid, signal.SIGSTOP)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 10 and not any(each.is_alive() for each in workers_of(engine))
