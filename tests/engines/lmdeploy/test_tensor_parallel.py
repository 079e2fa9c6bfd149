"""Workers over gloo: exact output, collectives that plug-ins of both ranks see, guesses, branches, and many architectures."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from sagellm.comm_backend.topology import TopologyManager
from sagellm.core.config import PluginSpec
from sagellm.core.errors import EngineError
from sagellm.demo_model import ensure_demo_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.contract.architectures import ARCHITECTURES, write_model
from sagellm.engines.lmdeploy.workers import Pickling
from sagellm.models import find_model
from tests.comm_backend.sysfs_tree import Tree
from tests.engines.lmdeploy.test_branches import start_and_fork
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.engines.lmdeploy.worker_helpers import children, read

# A worker that dies can leave its parent waiting for it.
pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_tensors_in_messages_are_whole_and_can_be_written(dtype):
    tensors = {"flat": torch.arange(12).to(dtype), "none": torch.empty(0, dtype=dtype), "one": torch.tensor(1).to(dtype)}
    tensors |= {"turned": tensors["flat"].view(3, 4).T, "part": tensors["flat"][2:7:2]}
    found = Pickling.loads(Pickling.dumps({"tensors": tensors, "text": "x"}, Pickling.HIGHEST_PROTOCOL))
    assert found["text"] == "x"
    for name, tensor in tensors.items():
        assert found["tensors"][name].dtype == dtype and torch.equal(found["tensors"][name], tensor), name
    found["tensors"]["flat"][0] = 1


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
