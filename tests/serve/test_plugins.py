"""Plug-ins in the engine process and in its workers, seen from outside."""

import json
import os
from pathlib import Path

import pytest

from tests.serve.endings import terminated_while_streaming
from tests.serve.harness import ServerProcess

HERE = "tests.serve.plugins"
PROMPT = [5 + i for i in range(40)]


def generate(server: ServerProcess, tokens: int = 24) -> dict:
    answer = server.post("/generate", {"input_ids": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == tokens
    return answer.json()


def install(folder: Path, entry_point: str) -> str:
    """A distribution that announces a plug-in; what PYTHONPATH must be for a process to see it."""
    info = folder / "announced-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announced\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sagellm.plugins]\n{entry_point}\n")
    return os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])


@pytest.mark.slow
def test_calls_faults_the_record_and_a_pool_smaller_than_the_context(launch, reference, tmp_path):
    """An answer that outgrows the pool ends there, and requests that fill it one after the other all finish.

    One plug-in is found by its entry point, also in the engine process, and is told of the end there.
    """
    names = {name: f"{HERE}:{name}" for name in ("Counting", "Raising", "Hanging")}
    record, config = tmp_path / "record.jsonl", tmp_path / "server.yaml"
    goodbye = {"name": "goodbye", "options": {"folder": str(tmp_path)}}
    config.write_text(json.dumps({"plugins": [*names.values(), goodbye]}))
    path = install(tmp_path / "site", "goodbye = tests.plugins:SaysGoodbye")
    options = ("--config", config, "--plugin-time-limit-s", 0.6, "--record", record)
    server = launch(*options, "--kv-blocks", 17, "--context-length", 2048, env={"PYTHONPATH": path}).ready()
    answer = server.post("/generate", {"input_ids": [5] * 200, "max_tokens": 500, "ignore_eos": True})
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"] == {"type": "length"}
    assert server.post("/generate", {"input_ids": [5] * 300}).status_code == 400
    answers = {tuple(generate(server)["output_ids"]) for _ in range(3)}
    assert answers == set(reference([PROMPT], 24))
    server.wait_idle()

    counting, raising, hanging = names.values()
    for hook in ("schedule", "on_step_end"):
        server.wait_for_metric(hook, lambda n: n > 3, "sagellm_plugin_calls_total", plugin=counting, hook=hook)
    assert server.metric("sagellm_plugin_faults_total", plugin=counting) == 0
    assert server.metric("sagellm_plugin_faults_total", plugin=raising, hook="on_prefix_stored") == 1
    assert server.metric("sagellm_plugin_faults_total", plugin=hanging, hook="admit") == 1
    enabled = [server.metric("sagellm_plugin_enabled", plugin=name) for name in (*names.values(), "goodbye")]
    assert enabled == [1, 0, 0, 1]
    server.end()
    assert [file.read_text() for file in tmp_path.glob("closed-*")] == ["StepResult"]
    assert "raised on purpose" in server.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds.count("arrive") == 4 and kinds.count("end") == 4
    assert {line["plugin"] for line in lines if line["event"] == "fault"} == {raising, hanging}
    decided = [line for line in lines if line["event"] == "schedule"]
    assert decided and {line["reason"] for line in decided if line.get("policy") == counting} == {"as it came"}


@pytest.mark.slow
def test_tensor_parallel_and_a_fault_in_a_worker_until_it_is_terminated(launch, reference):
    name = f"{HERE}:CommRaises"
    server = launch("--tensor-parallel", 2, "--plugin", name, "--drain-timeout-s", 0.5).ready()
    assert len({process.pid for process in server.family()}) >= 3  # the engine and two workers
    assert [tuple(generate(server)["output_ids"])] == reference([PROMPT], 24)
    faults = dict(plugin=name, hook="comm_begin")
    server.wait_for_metric("a fault in a worker", lambda n: n >= 1, "sagellm_plugin_faults_total", **faults)
    counted = server.metric("sagellm_plugin_faults_total", **faults)
    generate(server)
    assert server.metric("sagellm_plugin_faults_total", **faults) == counted <= 2
    terminated_while_streaming(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options", "counted"),
    [
        ("h2o", {"share": 0.6, "last": 1}, ("sagellm_evicted_blocks_total", {"reason": "sparse"})),
        ("quest", {"share": 0.3, "whole_layers": 0, "by_head": False}, ("sagellm_sparse_blocks_total", {"kind": "read"})),
    ],
)  # fmt: skip
def test_sparse_policies_of_workers_answer_and_are_counted_as_in_one_process(launch, policy, options, counted):
    name, labels = counted
    prompt = [5 + i * i % 300 for i in range(200)]
    request = {"input_ids": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    found = []
    for workers in (1, 2):
        server = launch(
            "--tensor-parallel", workers, "--dtype", "float32", "--sparsity", policy, "--sparsity-options", json.dumps(options)
        ).ready()
        answer = server.post("/generate", request).json()["output_ids"]
        server.wait_for_metric("the counts of a policy", lambda number: number > 0, name, **labels)
        found.append((answer, server.metric(name, **labels), server.metric("sagellm_sparse_enabled")))
        server.kill()
    assert found[0] == found[1] and found[0][2] == 1
