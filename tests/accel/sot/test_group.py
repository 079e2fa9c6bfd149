"""Points that workers write, on other engines, for a master."""

import contextlib
import json
import signal
import threading

import psutil
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from sagellm.accel.sot import group as groups
from sagellm.accel.sot import workers
from sagellm.accel.sot.group import Master, Worker, WorkerResult, group_hooks
from sagellm.accel.sot.pipeline import SpecSoT
from sagellm.accel.sot.results import SkeletonParseResult, TaskData
from sagellm.accel.sot.skeleton import ask_for_point
from sagellm.accel.sot.workers import open_group
from sagellm.comm_backend.control import new_key
from sagellm.core.config import SageConfig
from sagellm.core.errors import ConfigError, EngineError, PeerError
from sagellm.core.running import SamplingParams
from sagellm.demo_model import ensure_demo_model
from tests.accel.sot.test_pipeline import QUESTION, SIZES, Telling
from tests.engines.lmdeploy.pd.pair import wait_until
from tests.pool import settle
from tests.sweeps import slow_but

TITLES = ("Open it", "Read a line", "Close it", "Handle errors", "Name it", "Print it")


class Six(SpecSoT):
    """Six points of the same length, whatever the model has planned. Does not let the model end a point before."""

    def __init__(self, *args, num_tokens=24, **options):
        super().__init__(*args, params=SamplingParams(ignore_eos=True), **options)
        self._length = num_tokens

    def skeleton_parse(self, skeleton_text, task_prompt):
        tasks = tuple(TaskData(number, title, self._length) for number, title in enumerate(TITLES))
        return SkeletonParseResult("plan", tasks, tuple(map(ask_for_point, tasks)))


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_demo_model())


class Group:
    """A master and workers in this process, each with an engine of its own."""

    def __init__(self, start_engine, folder, tokenizer, num_workers=1, **config):
        self.key, config = folder / "key", {"model": ensure_demo_model(), **SIZES, **config}
        self.key.touch(0o600)
        self.key.write_bytes(new_key())
        names = [f"sot://{number}" for number in range(1 + num_workers)]
        self.engines = [start_engine(pd=group_hooks(name, self.key), **config) for name in names]
        wait_until(lambda: all(engine.group_address for engine in self.engines))
        self.master = Master(self.engines[0].group_address, names[0], self.key)
        others = zip(self.engines[1:], names[1:], strict=True)
        self.workers = [Worker(engine, name, self.key, self.master.address) for engine, name in others]
        pipelines = [Six(worker.engine, tokenizer).worker_pipeline for worker in self.workers]
        self.threads = [
            threading.Thread(target=run, args=(worker,)) for run, worker in zip(pipelines, self.workers, strict=True)
        ]
        for thread in self.threads:
            thread.start()
        self.master.wait_for_workers(num_workers, 10)

    def close(self):
        self.master.close()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        for worker in self.workers:
            worker.close()
        for engine in self.engines:
            settle(engine)  # and the fixture counts the blocks

    def pd(self, number):
        return self.engines[number].hooks.report()["pd"]


@pytest.fixture
def group(start_engine, tmp_path, tokenizer):
    made = []

    def make(**options):
        made.append(Group(start_engine, tmp_path, tokenizer, **options))
        return made[0]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def alone(start_engine, tokenizer):
    return Six(start_engine(model=ensure_demo_model(), **SIZES), tokenizer).generate(QUESTION, max_new_tokens=24)


@pytest.mark.parametrize(
    "options", slow_but([{}, {"num_workers": 2}, {"speculative": "suffix"}, {"prefix_caching": False}], {})
)
def test_points_of_workers_are_those_of_one_engine(group, tokenizer, alone, options):
    group, told = group(**options), Telling()
    answer = Six(group.engines[0], tokenizer, group=group.master).generate(QUESTION, max_new_tokens=24, listener=told)
    assert answer.branches == alone.branches and answer.text == alone.text and answer.finish_reasons == alone.finish_reasons
    num_workers = options.get("num_workers", 1)
    assert answer.stats["by_workers"] == 6 * num_workers // (1 + num_workers)
    same = ("prompt_tokens", "completion_tokens", "branch_tokens", "branches")
    assert [answer.stats[name] for name in same] == [alone.stats[name] for name in same]
    assert dict(told.ends) == answer.finish_reasons
    assert {(each, token) for each, token in told.tokens} == {(each, t) for each, ts in answer.branches.items() for t in ts}
    # The keys and values of the plan have travelled once to each worker.
    assert group.pd(0)["offers"] == {"offered": num_workers, "read": num_workers}
    for number in range(1, 1 + num_workers):
        assert group.pd(number)["arrivals"] == {"done": 1}
        assert group.engines[number].hooks.report()["forks"]["branches"] == 6 // (1 + num_workers)


def ask_at_once(group, tokenizer, count, listens=False):
    """Answers to one question, in the order in which they came, and what their listeners have heard."""
    found, heard = [], [Telling() if listens else None for _ in range(count)]

    def ask(told):
        sot = Six(group.engines[0], tokenizer, group=group.master)
        found.append((sot.generate(QUESTION, max_new_tokens=24, listener=told), told))

    threads = [threading.Thread(target=ask, args=(told,)) for told in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_several_answers_at_once_are_shared_out(group, tokenizer, alone):
    found = ask_at_once(group(), tokenizer, 4)
    assert len(found) == 4
    for answer, _ in found:
        assert (answer.branches, answer.text, answer.mode) == (alone.branches, alone.text, "plan")
        assert answer.tasks == alone.tasks and answer.finish_reasons == alone.finish_reasons
        assert answer.stats["completion_tokens"] == alone.stats["completion_tokens"]
    assert sum(answer.stats["by_workers"] == 6 for answer, _ in found) == 2


@pytest.mark.slow
def test_answers_that_are_listened_to_are_planned_here(group, tokenizer, alone):
    """So their tokens are heard as they come, and workers write points alone."""
    for answer, told in ask_at_once(group(), tokenizer, 2, listens=True):
        assert answer.branches == alone.branches and answer.stats["by_workers"] == 3
        assert told.plans == [answer.tasks] and dict(told.ends) == answer.finish_reasons


@pytest.mark.slow
def test_whole_answers_of_a_worker_that_leaves_or_fails_are_written_by_the_master(group, tokenizer, alone):
    group = group()
    start = group.engines[1].start

    def fails(*args, **options):
        raise RuntimeError("no room")

    group.engines[1].start = fails
    assert [answer.branches for answer, _ in ask_at_once(group, tokenizer, 3)] == 3 * [alone.branches]

    def leaves(*args, **options):
        (worker,) = group.workers
        worker._loop.run(worker._connection.close())
        return start(*args, **options)

    group.engines[1].start = leaves
    assert [answer.branches for answer, _ in ask_at_once(group, tokenizer, 3)] == 3 * [alone.branches]
    assert group.master.num_workers == 0


@pytest.mark.parametrize("moment", ["tasks", "point"])
def test_points_of_a_worker_that_leaves_are_written_by_the_master(group, tokenizer, alone, moment):
    group = group()
    (worker,) = group.workers
    if moment == "tasks":
        receive = worker.receive_tasks_from_master

        def leave():
            message = receive()
            worker._loop.run(worker._connection.close())
            return message

        worker.receive_tasks_from_master = leave
    else:
        send = worker.send_results_to_master

        def leave(result):
            send(result)
            worker._loop.run(worker._connection.close())

        worker.send_results_to_master = leave
    if moment == "tasks":  # the thread waits in the old one already
        group.master.notify_workers_complete(None, "direct")
        wait_until(lambda: group.master.num_workers == 0 or worker.receive_tasks_from_master is leave)
    answer = Six(group.engines[0], tokenizer, group=group.master).generate(QUESTION, max_new_tokens=24)
    assert answer.branches == alone.branches and answer.stats["by_workers"] < 3


def test_points_that_a_worker_cannot_write_are_written_by_the_master(group, tokenizer, alone):
    group = group()
    fork = group.engines[1].fork

    def fails(*args, **options):
        raise RuntimeError("no room")

    group.engines[1].fork = fails
    sot = Six(group.engines[0], tokenizer, group=group.master)
    assert sot.generate(QUESTION, max_new_tokens=24).branches == alone.branches
    group.engines[1].fork = fork
    again = sot.generate(QUESTION, max_new_tokens=24)
    assert again.branches == alone.branches and again.stats["by_workers"] == 3


def test_an_answer_that_is_given_up_ends_at_the_workers(group, tokenizer):
    """And the worker sends none of its points, which are not whole."""
    group, sent = group(), []
    (worker,) = group.workers
    send = worker.send_results_to_master
    worker.send_results_to_master = lambda result: sent.append(result) or send(result)

    def leave(branch_id, token):
        wait_until(lambda: group.engines[1].hooks.report()["forks"]["branches"] == 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Six(group.engines[0], tokenizer, num_tokens=900, group=group.master).generate(
            QUESTION, max_new_tokens=900, listener=Telling(leave)
        )
    wait_until(lambda: not any(thread.name.startswith("sagellm-sot-0") for thread in threading.enumerate()))
    settle(group.engines[1])
    assert sent == []


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_is_cancelled_from_another_thread(group, tokenizer, whole):
    """The cancellation ends the wait of the master for a worker, and also every later call of `generate`."""
    group, begun = group(), threading.Event()
    (worker,) = group.workers
    worker.send_results_to_master = lambda result: begun.set() or None  # the master hears of nothing
    sot = Six(group.engines[0], tokenizer, group=group.master)
    threading.Thread(target=lambda: begun.wait(60) and sot.cancel()).start()
    with pytest.raises(EngineError, match="was cancelled"), group.master.placed() if whole else contextlib.nullcontext():
        sot.generate(QUESTION, max_new_tokens=4)
    with pytest.raises(EngineError, match="was cancelled"):
        sot.generate(QUESTION, max_new_tokens=4)


@pytest.mark.parametrize("mode", ["direct", "error"])
def test_answers_without_a_plan_end_cleanly_at_the_workers(group, tokenizer, mode):
    class Useless(SpecSoT):
        def skeleton_parse(self, skeleton_text, task_prompt):
            return SkeletonParseResult(mode)

    group, heard = group(), []
    receive = group.workers[0].receive_tasks_from_master
    group.workers[0].receive_tasks_from_master = lambda: heard.append(receive()) or heard[-1]
    for _ in range(2):  # the first may be heard by the old method
        answer = Useless(group.engines[0], tokenizer, group=group.master).generate(QUESTION, max_new_tokens=8)
        assert answer.mode == mode and answer.stats["by_workers"] == 0
    wait_until(lambda: heard and heard[-1].mode == mode)


def test_bad_groups(start_engine, tmp_path, group):
    config = SageConfig(device="cpu", model=str(ensure_demo_model()), **SIZES)
    with pytest.raises(ConfigError, match="workers is 0; allowed are 1 to 64"), open_group(config, 0):
        pass
    group = group()
    with pytest.raises(PeerError, match="1 of 2 workers have joined"):
        group.master.wait_for_workers(2, 0.05)
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_bytes(new_key())
    with pytest.raises(PeerError):
        Worker(group.engines[1], "sot://1", other, group.master.address)
    late = WorkerResult(answer=99, branch_id=1, token_ids=(1,), finish_reason="stop")
    group.workers[0].send_results_to_master(late)  # of an answer that is over: taken, and dropped


@pytest.mark.slow
def test_worker_processes(tokenizer, alone):
    """A worker is killed between two answers and one in the middle of an answer; nothing stays behind."""
    config = SageConfig(device="cpu", model=str(ensure_demo_model()), **SIZES | {"kv_blocks": 100})
    with open_group(config, 2) as (engine, master, processes):
        sot = Six(engine, tokenizer, group=master)
        assert sot.generate(QUESTION, max_new_tokens=24).stats["by_workers"] == 4
        processes[0].kill()
        wait_until(lambda: master.num_workers == 1)
        assert sot.generate(QUESTION, max_new_tokens=24).stats["by_workers"] == 3

        def kill(branch_id, token):
            processes[1].kill()

        answer = sot.generate(QUESTION, max_new_tokens=24, listener=Telling(kill))
        assert answer.branches == alone.branches
        family = [process.pid for process in processes]
    assert not any(psutil.pid_exists(pid) for pid in family)


@pytest.mark.slow
def test_a_worker_process_that_hangs_is_given_up(tokenizer, alone, monkeypatch):
    """While it writes points; it does not keep the master from its end."""
    monkeypatch.setattr(groups, "SILENCE_S", 2.0)
    monkeypatch.setattr(workers, "END_S", 1.0)
    config = SageConfig(device="cpu", model=str(ensure_demo_model()), **SIZES | {"kv_blocks": 100})
    with open_group(config, 1) as (engine, master, (process,)):
        answer = Six(engine, tokenizer, group=master).generate(
            QUESTION, max_new_tokens=24, listener=Telling(lambda *_: process.send_signal(signal.SIGSTOP))
        )
        assert answer.branches == alone.branches and answer.stats["by_workers"] < 3
        assert master.num_workers == 0 and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    assert not psutil.pid_exists(process.pid)


def test_a_worker_whose_engine_hangs_leaves(group, tokenizer, alone, monkeypatch):
    """Its control connection still answers; the master writes its points."""
    for name, seconds in (("BEAT_S", 0.1), ("STALL_S", 0.5), ("LOST_S", 1.0)):
        monkeypatch.setattr(groups, name, seconds)
    group, release = group(), threading.Event()
    group.engines[1]._loop.call_soon_threadsafe(release.wait)
    sot = Six(group.engines[0], tokenizer, group=group.master)
    limit = threading.Timer(60, sot.cancel)
    limit.start()
    try:
        answer = sot.generate(QUESTION, max_new_tokens=24)
    finally:
        limit.cancel()
        release.set()
    assert answer.branches == alone.branches and answer.stats["by_workers"] == 0
    wait_until(lambda: group.master.num_workers == 0)


def test_an_engine_stalls_if_it_has_work_and_ends_no_step():
    spent = [0.0]

    def turns(stalls, count, progress, has_work=True, is_busy=False):
        """Turns until it is given up; None if it is not."""
        for turn in range(1, count + 1):
            spent[0] += is_busy
            if stalls.look(has_work, progress, lambda: spent[0]):
                return turn
        return None

    rests, lost = int(groups.STALL_S), int(groups.LOST_S)
    assert turns(groups.Stalls(), 500, 0.0, has_work=False) is None
    assert turns(groups.Stalls(), rests, 0.0) is None and turns(groups.Stalls(), rests + 1, 0.0) == rests + 1
    busy = groups.Stalls()
    assert turns(busy, lost, 0.0, is_busy=True) is None and turns(busy, 1, 0.0, is_busy=True) == 1
    slow = groups.Stalls()
    for step in range(1, 10):  # of 50 turns each
        assert turns(slow, 50, float(step), is_busy=True) is None
    assert turns(slow, lost + 4 * 49 - 49, 9.0, is_busy=True) is None and turns(slow, 1, 9.0, is_busy=True) == 1


@pytest.mark.slow
def test_the_command_with_workers():
    arguments = ["--model", "demo", "--device", "cpu", "--workers", "1", "--always-plan", "--max-tokens", "8", "--json"]
    done = CliRunner().invoke(command(), [QUESTION, *arguments], catch_exceptions=False)
    answer = json.loads(done.stdout)
    assert done.exit_code == 0 and answer["mode"] in ("plan", "error")
    assert answer["mode"] == "error" or answer["stats"]["by_workers"] > 0


def command():
    from sagellm.cli.sot import sot

    return sot


@pytest.mark.slow
def test_workers_are_killed_at_random_moments(tokenizer, alone):
    """20 kills; `benchmarks.sot_kills` makes 200."""
    from benchmarks.sot_kills import sweep

    found = sweep(kills=20, seed=1)
    assert found["wrong"] == 0 and found["answers"] >= 20 and found["left_processes"] == 0

