"""How two workers carry out their collectives: backends, decisions of plug-ins and plans, halves, and what is measured."""

import math

import pytest

from benchmarks.processes import wait_until
from sagellm.core.config import PluginSpec
from sagellm.core.errors import ConfigError, EngineError
from sagellm.engines.base import SamplingParams
from sagellm.replay.schedule.verify import verify_schedule
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.engines.lmdeploy.worker_helpers import read, workers_of
from tests.pool import settle

# A worker that dies can leave its parent waiting for it.
pytestmark = pytest.mark.timeout(120)

ROW, LOGITS = 4 * 64, 4 * 160  # bytes of a token between two layers, and of half of its logits


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
