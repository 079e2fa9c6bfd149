"""Two workers over gloo: exact output, collectives seen on both ranks, faults there, and no process left behind."""

import json
import math
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
from lmdeploy.pytorch.engine.executor.mp_executor import ExecutorProc

from benchmarks.processes import command_line, wait_until
from sagellm.comm_backend.topology import TopologyManager
from sagellm.core.config import PluginSpec
from sagellm.core.errors import ConfigError, EngineError
from sagellm.demo_model import ensure_demo_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy import worker_processes
from sagellm.engines.lmdeploy.contract.architectures import ARCHITECTURES, write_model
from sagellm.engines.lmdeploy.workers import Pickling, Watch, failure_of
from sagellm.models import find_model
from sagellm.replay.schedule.verify import verify_schedule
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan
from tests.comm_backend.sysfs_tree import Tree
from tests.engines.lmdeploy.test_branches import start_and_fork
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.pool import settle

# A worker that dies can leave its parent waiting for it.
pytestmark = pytest.mark.timeout(120)


def children():
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def two_workers(start_engine):
    """`two_workers(*plugins, **config)`; afterwards the workers must be gone."""
    worker_processes.load_early(keep=True)
    before = children()
    engines = []

    def start(*plugins, **config):
        engine = start_engine(*plugins, tensor_parallel=2, **config)
        engines.append(engine)
        assert len(children() - before) >= 2
        return engine

    yield start
    for engine in engines:
        if not engine._loop.is_closed():
            if not failure_of(engine.engine.executor):
                settle(engine)
            engine.close()
    left = [psutil.Process(pid) for pid in children() - before if psutil.pid_exists(pid)]
    left = [process for process in left if "resource_tracker" not in command_line(process)]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert alive == []


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_exact_output_and_every_collective_is_seen_and_measured_on_request(
    two_workers, reference, limits, tmp_path, monkeypatch
):
    monkeypatch.setenv("MASTER_PORT", "1")  # of somebody else: no worker may meet there, and it stays
    limits(run_dir=tmp_path, comm_metrics=True)
    record = tmp_path / "events.jsonl"
    plugin = PluginSpec(name="tests.plugins:CommLog", options={"folder": str(tmp_path)})
    engine = two_workers(plugin, kv_blocks=30, record=record)
    assert os.environ["MASTER_PORT"] == "1" and "MASTER_ADDR" not in os.environ
    assert answers(engine, CROWD) == reference(CROWD, 40)
    assert engine.hooks.report()["preempted"] > 0
    report = engine.hooks.report()
    assert report["faults"] == []
    logs = [read(tmp_path / f"comm{rank}.jsonl") for rank in (0, 1)]
    for rank, lines in enumerate(logs):
        assert {(line["rank"], line["world"]) for line in lines} == {(rank, 2)}
        assert all(line["token"] == {"begin": line["op"], "bytes": line["bytes"]} for line in lines)
        reduces = [line for line in lines if line["op"] == "all_reduce"]
        # Two layers with two each in every step; a row of 64 float32 numbers a token.
        assert len(reduces) >= 4 * 40
        sizes = [line["bytes"] for line in reduces if line["dtype"] == "float32"]
        assert min(sizes) > 0 and not any(size % (64 * 4) for size in sizes)
    seen = [Counter((line["op"], line["bytes"]) for line in lines if line["op"] == "all_reduce") for lines in logs]
    assert seen[0] == seen[1]
    assert len({line["pid"] for lines in logs for line in lines}) == 2
    assert {hook for name, hook, _ in report["calls"] if name == plugin.name} == {"attach", "comm_begin", "comm_end"}
    workers = {line["pid"] for lines in logs for line in lines}
    engine.close()  # writes the record to its end, and the workers leave their last counts
    comm = [line for line in read(record) if line["event"] == "comm"]
    assert {line["pid"] for line in comm} <= workers and {line["rank"] for line in comm} == {0, 1}
    assert all(line["duration_ns"] > 0 and line["world_size"] == 2 for line in comm)
    report = engine.hooks.report()
    waits = {(row["rank"], row["op"]): row["exposed_ns"] for row in report["comm"]}
    assert min(waits[rank, "all_reduce"] for rank in (0, 1)) > 0
    exposed_s = max(sum(spent for (rank, _), spent in waits.items() if rank == number) for number in (0, 1)) / 1e9
    assert 0 < exposed_s < report["step_s"]


@pytest.mark.slow
def test_plugins_that_raise_and_hang_are_switched_off_in_each_worker_and_every_instance_is_closed(
    two_workers, reference, limits, tmp_path
):
    limits(run_dir=tmp_path)
    raises, sleeps = "tests.plugins:CommRaises", "tests.plugins:CommSleeps"
    # The others are not disturbed: one moves blocks to the host cache of both workers and back, one hears of the end.
    listener = PluginSpec(name="tests.plugins:SaysGoodbye", options={"folder": str(tmp_path)})
    plugins = (raises, sleeps, "tests.plugins:OffloadInstead", listener)
    # Rounds of several steps: then the workers pass sampled tokens on by a collective of their own.
    engine = two_workers(*plugins, kv_blocks=30, host_kv_blocks=20, decode_round=4)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, 40)
    report = engine.hooks.report()
    assert min(report["migrated"].values()) > 0
    assert sorted(report["faults"]) == [[raises, "comm_begin", "raised", 1]] * 2 + [[sleeps, "comm_end", "overran", 1]] * 2
    assert [report["enabled"][name] for name in (raises, sleeps, "tests.plugins:OffloadInstead")] == [False, False, True]
    engine.close()
    heard = sorted(file.read_text() for file in tmp_path.glob("closed-*"))
    assert heard == ["NoneType", "NoneType", "StepResult"], "two workers and the engine, which heard of its steps"


def test_workers_need_the_main_thread(start_engine):
    with ThreadPoolExecutor(1) as pool, pytest.raises(EngineError, match="needs the main thread"):
        pool.submit(start_engine, tensor_parallel=2).result()


def test_one_rank_has_no_observer(start_engine, limits, tmp_path):
    limits(run_dir=tmp_path)
    engine = start_engine(PluginSpec(name="tests.plugins:CommLog", options={"folder": str(tmp_path)}))
    engine.generate(CROWD[:1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two NUMA nodes need two cores")
def test_each_worker_keeps_to_its_numa_node(two_workers, reference, monkeypatch, tmp_path):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    before = os.sched_getaffinity(0)
    tree = Tree(tmp_path / "sys")
    tree.node(0, str(first), "10 20")
    tree.node(1, str(second), "20 10")
    monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.runtime.TopologyManager", lambda: TopologyManager(tree.root))
    monkeypatch.setattr("sagellm.engines.lmdeploy.cpu.runtime.available_cores", lambda: [first, second])
    known = children()
    engine = two_workers(kv_blocks=30)
    workers = [psutil.Process(pid) for pid in sorted(children() - known)]
    bound = [process.cpu_affinity() for process in workers if len(process.cpu_affinity()) == 1]
    assert sorted(bound) == [[first], [second]]
    assert os.sched_getaffinity(0) == before
    assert answers(engine, CROWD) == reference(CROWD, 40)


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_tensors_in_messages_are_whole_and_can_be_written(dtype):
    tensors = {"flat": torch.arange(12).to(dtype), "none": torch.empty(0, dtype=dtype), "one": torch.tensor(1).to(dtype)}
    tensors |= {"turned": tensors["flat"].view(3, 4).T, "part": tensors["flat"][2:7:2]}
    found = Pickling.loads(Pickling.dumps({"tensors": tensors, "text": "x"}, Pickling.HIGHEST_PROTOCOL))
    assert found["text"] == "x"
    for name, tensor in tensors.items():
        assert found["tensors"][name].dtype == dtype and torch.equal(found["tensors"][name], tensor), name
    found["tensors"]["flat"][0] = 1


def workers_of(engine):
    return [worker._proc for worker in engine.engine.executor.procs]


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
    """Then the process that workers are forked from ends too, because nobody keeps it here."""
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


def test_sums_of_another_backend(two_workers, reference, limits, tmp_path):
    """The same bits as by the process group: answers are equal, and a worker that dies is found as before."""
    limits(run_dir=tmp_path)
    engine = two_workers(comm_backend="shm", kv_blocks=30)
    assert answers(engine, CROWD) == reference(CROWD, 40)
    assert {row["op"] for row in engine.hooks.report()["comm"]} >= {"all_reduce"}
    worker = workers_of(engine)[1]
    worker.kill()
    with pytest.raises(EngineError, match="was ended by signal SIGKILL"):
        engine.generate(CROWD[:1])


def test_a_backend_of_ones_own(two_workers, reference, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGELLM_TEST_FOLDER", str(tmp_path))
    engine = two_workers(comm_backend="tests.engines.lmdeploy.own_backends:CountingGloo", kv_blocks=30)
    assert answers(engine, CROWD[:2]) == reference(CROWD[:2], 40)
    engine.close()
    counts = [int(file.read_text()) for file in tmp_path.glob("sums-*")]
    assert len(counts) == 2 and counts[0] == counts[1] >= 4 * 40


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"comm_backend": "shm"}, "tensor_parallel above 1"), ({"comm_backend": "smh", "tensor_parallel": 2}, "smh"),
     ({"comm_backend": "memory", "tensor_parallel": 2}, "workers are processes on cpu"),
     ({"comm_backend": "nccl", "tensor_parallel": 2}, "works on cuda"),
     ({"comm_options": {"spin": 1}, "tensor_parallel": 2}, "known are ring_bytes"),
     ({"comm_backend": "group", "comm_options": {"spin_us": 1}, "tensor_parallel": 2}, "takes none")],
)  # fmt: skip
def test_backends_that_are_refused(start_engine, settings, why):
    with pytest.raises(ConfigError, match=why):
        start_engine(**settings)


# Greedy answers of a random model fall into circles, which ngram and suffix guess.
@pytest.mark.parametrize(
    ("name", "decode_round", "backend"),
    [("suffix", 1, "shm"), ("ngram", 4, "shm"), ("ngram", 1, "group")],
)
def test_guesses_of_worker_0_are_checked_by_all(two_workers, reference, name, decode_round, backend):
    engine = two_workers(kv_blocks=30, speculative=name, decode_round=decode_round, comm_backend=backend)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, 40)
    report = engine.hooks.report()["speculation"]
    assert report["faults"] == 0, report["first_fault"]
    assert report["accepted"] > 5


def test_worker_0_has_the_whole_draft_model(two_workers, reference, model_folder):
    options = {"model": str(model_folder("llama")), "lookahead": 3}
    engine = two_workers(kv_blocks=64, speculative="draft", speculative_options=options)
    assert answers(engine, CROWD) == reference(CROWD, 40)
    report = engine.hooks.report()["speculation"]
    assert report["faults"] == 0, report["first_fault"]
    assert report["accepted"] > 0.9 * report["drafted"] > 0


def test_the_quicker_backend_is_measured_and_taken(two_workers, reference, limits, tmp_path):
    limits(run_dir=tmp_path)
    engine = two_workers(kv_blocks=30)
    assert answers(engine, CROWD) == reference(CROWD, 40)
    engine.close()
    report = engine.hooks.report()
    choice = report["comm_choice"]
    assert choice["candidates"] == ["group", "shm"] and "share the memory of one host" in choice["reason"]
    assert choice["topology_s"] > 0 and choice["chosen"].keys() == {"all_reduce", "all_gather", "broadcast"}
    for name in ("all_reduce", "all_gather"):
        times = {backend: math.prod(each.values()) for backend, each in choice["measured"][name].items()}
        assert min(times, key=times.get) == choice["chosen"][name]  # which one that is depends on the machine
    assert sum(row["count"] for row in report["comm"] if row["op"] == "all_reduce") >= 2 * 4 * 40


def test_a_plugin_decides_once_for_each_sort_of_collective(two_workers, reference, tmp_path):
    """Two layers by two backends, each in two halves."""
    engine = two_workers(PluginSpec(name="tests.plugins:CommDecides", options={"folder": str(tmp_path)}), kv_blocks=30)
    assert answers(engine, CROWD) == reference(CROWD, 40)
    assert engine.hooks.report()["faults"] == []
    asked = read(tmp_path / "decisions.jsonl")
    assert len({pid for pid, *_ in asked}) == 1, "rank 0 alone"
    sorts = [tuple(sort) for _, *sort in asked]
    assert len(sorts) == len(set(sorts))
    assert {(layer, phase) for name, layer, phase, _ in sorts if layer is not None} == {
        (layer, phase) for layer in (0, 1) for phase in ("decode", "prompt")
    }


def test_halves_are_tried_where_sums_take_long(two_workers, reference, limits, tmp_path):
    limits(run_dir=tmp_path)
    engine = two_workers(kv_blocks=64, comm_backend="shm", comm_options={"delay_us": 300}, decode_round=1)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, 40)
    engine.close()
    tried = [each for each in engine.hooks.report()["comm_choice"]["overlap"] if each["halves_over_whole"] is not None]
    assert tried and all(each["share"] > 0.1 and each["pieces"] in (1, 2) for each in tried)
    assert "decode" in [each["sort"][0] for each in tried]


def test_a_decision_that_makes_no_sense_switches_the_plugin_off(two_workers, reference):
    engine = two_workers("tests.plugins:CommNonsense", kv_blocks=30)
    assert answers(engine, CROWD[:3]) == reference(CROWD[:3], 40)
    engine.close()
    (fault,) = engine.hooks.report()["faults"]
    assert fault[1:3] == ["comm_decide", "nonsense"]


HALVES = PluginSpec(name="benchmarks.noop_plugin:LastBackend", options={"pieces": 2, "fused": False})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("Llama", "GptOss", "DeepseekV2")])
def test_every_architecture_of_the_native_step_is_split(two_workers, start_engine, tmp_path, name):
    write_model(name, tmp_path)
    prompts = [[token % 60 for token in prompt] for prompt in CROWD]
    alone = answers(start_engine(model=tmp_path), prompts)
    for plugins in ((), (HALVES,)):
        assert answers(two_workers(*plugins, model=tmp_path), prompts) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"quantization": "awq", "quantization_options": {"group_size": 32}}, {"quantization": "int8"}, {"quantization": "fp8"},
     {"kv_schema": "int8"}, {"kv_schema": "fp8"}, {"sparsity": "streaming"}, {"sparsity": "a_shape"},
     {"sparsity": "xattention"}],
    ids=lambda settings: "-".join(map(str, settings.values())),
)  # fmt: skip
def test_few_bits_and_sparse_attention_are_split(two_workers, start_engine, settings):
    model = ensure_demo_model()
    alone = answers(start_engine(model=model, **settings), CROWD)
    for plugins in ((), (HALVES,)):
        assert answers(two_workers(*plugins, model=model, **settings), CROWD) == alone


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, workers, tokens", [("smollm2", 3, 12), ("demo", 4, 40)])
@pytest.mark.parametrize("plugins", [(), (HALVES,)], ids=["whole", "halves"])
def test_more_workers_than_cores_give_the_tokens_of_one_process(start_engine, name, workers, tokens, plugins):
    """Nine heads and three key heads are split by three, those of the demo model by four."""
    model = find_model(name).prepare()
    prompts = [[*range(1000 + 7 * row, 1000 + 7 * row + 5 * row + 3)] for row in range(4)] if name == "smollm2" else CROWD[:4]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    config = {"model": model, "dtype": "float32", "kv_blocks": 40}
    alone, split = (
        [each.token_ids for each in engine.generate(prompts, params)]
        for engine in (start_engine(**config), start_engine(*plugins, tensor_parallel=workers, **config))
    )
    assert split == alone


def test_each_worker_copies_blocks_of_branches(two_workers, start_engine):
    prompt, params = list(range(20, 61)), SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine = two_workers(prefix_caching=False)
    _, branches = start_and_fork(engine, [[], [], [5]], params, params, prompt)
    found = branches.join(60)
    assert engine.hooks.report()["forks"]["copied_blocks"] == 3
    alone = start_engine().generate([each.prompt for each in branches], params)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]


def steps_of(record, op, num_bytes):
    """Return the backends of a sort of collectives, a set for each step: of rank 0 after a check that rank 1 did the same."""
    ranks = {0: [], 1: []}
    for line in read(record):
        if line["event"] == "comm":
            ranks[line["rank"]].append((line["op"], line["bytes"], line["backend"]))
    count = min(map(len, ranks.values()))  # the engine may be closed in the middle of a step
    assert ranks[0][:count] == ranks[1][:count] and max(map(len, ranks.values())) < count + 10
    steps = [set()]
    for name, size, backend in ranks[0][:count]:
        if (name, size) == (op, num_bytes):
            steps[-1].add(backend)
        if name == "all_gather":  # the logits, with which a step ends
            steps.append(set())
    return [next(iter(step)) if len(step) == 1 else frozenset(step) for step in steps[:-1]]


def collective(name, op, num_bytes, backend, *inputs, **more):
    config = {"op": op, "bytes": num_bytes, "group": "tp", "backend": backend, **more}
    return IRNode(name, NodeType.COLLECTIVE, inputs, (f"{name}!",), config)


ROW, LOGITS = 4 * 64, 4 * 160  # bytes of a token between two layers, and of half of its logits


def test_a_plan_decides_about_collectives_on_all_ranks_from_the_same_step(two_workers, reference, tmp_path):
    """They go back when it ends or is cancelled, and a replay comes to the same decisions."""
    record, prompt = tmp_path / "events.jsonl", CROWD[0][:9]
    engine = two_workers(strategy="fifo", comm_backend="shm", record=record, kv_blocks=64, decode_round=1)
    chain = [IRNode("prompt", NodeType.PREFILL_CHUNK, (), ("v0",), {"request": 0, "start": 0, "tokens": 9})]
    chain += [IRNode(f"d{n}", NodeType.DECODE_STEP, (f"v{n}",), (f"v{n + 1}",), {"requests": [0]}) for n in range(6)]
    wishes = [
        collective("sums", "all_reduce", ROW - 1, "group", "v2"), collective("logits", "all_gather", LOGITS, "group", "v4"),
        collective("unknown", "all_reduce", ROW, "nvshmem"), collective("none", "reduce_scatter", ROW, "shm"),
        collective("again", "all_reduce", ROW, "shm", "v2"),
    ]  # fmt: skip
    engine.executor.submit_plan(ExecutionPlan("p", IRGraph([*chain, *wishes]), (0,)))
    assert answers(engine, [prompt]) == reference([prompt], 40)
    settle(engine)
    status = engine.executor.status("p")
    assert {name: status.nodes[name].detail for name in ("sums", "logits")} == {
        "sums": "by group from step 4 on", "logits": "by group from step 6 on"
    }  # fmt: skip
    refused = status.refused()
    assert sorted(refused) == ["again", "none", "unknown"] and status.state.value == "done"
    assert "all_reduce can be done by group, shm" in refused["unknown"] and "no backend does reduce_scatter" in refused["none"]
    assert "another node decides" in refused["again"]

    halves = collective("sums", "all_reduce", 2 * ROW, "group", pieces=2)
    engine.executor.submit_plan(ExecutionPlan("q", IRGraph([halves]), (1,)))
    requests = [engine.start(prompt, SamplingParams(max_new_tokens=900, ignore_eos=True)) for _ in range(2)]
    wait_until("some tokens", lambda: min(len(each.token_ids) for each in requests) > 5)
    assert engine.executor.status("q").state.value == "running"
    node = engine.executor.cancel("q").nodes["sums"]
    assert (node.state.value, node.detail) == ("cancelled", "by group in 2 pieces from step 41 on; the plan was cancelled")
    num_tokens = max(40, *(len(each.token_ids) for each in requests))
    wait_until("more tokens", lambda: min(len(each.token_ids) for each in requests) > num_tokens + 5)
    for request in requests:
        assert tuple(request.token_ids[:40]) == reference([prompt], 40)[0]
        request.cancel()
    settle(engine)
    assert engine.hooks.report()["faults"] == []
    engine.close()

    sums, of_two = steps_of(record, "all_reduce", ROW), steps_of(record, "all_reduce", 2 * ROW)
    assert sums[:40] == [*["shm"] * 3, *["group"] * 4, *["shm"] * 33]
    assert steps_of(record, "all_gather", LOGITS)[:40] == [*["shm"] * 5, *["group"] * 2, *["shm"] * 33]
    halved = [number for number, backend in enumerate(sums) if backend == "group" and number >= 40]  # a row of two each
    assert len(halved) > 5 and set(of_two[halved[0] : halved[-1] + 1]) == {frozenset()}
    assert "group" not in of_two and "shm" in of_two[halved[-1] :]
    found = verify_schedule(record)
    assert found.agrees and found.num_plans == 2
