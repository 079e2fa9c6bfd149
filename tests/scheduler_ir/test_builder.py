"""From a queue and a decision to a graph."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, ScheduleDecision, StepView
from sagellm.scheduler_ir.builder import IRBuilder
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType, kv_value, logits_value, token_value
from sagellm.scheduler_ir.passes import PassSettings, merge_decode_steps, merge_samples
from tests.scheduler_ir.made import decided, node, queues, running, waiting


def test_a_request_from_cache_to_sample():
    lower = {7: {"cpu": 16, "nvme": 8}}
    graph = IRBuilder.build([waiting(7, 100)], cached={7: 32}, lower=lower, bytes_per_token=10, device="g")
    load = dict(request=7, dst_tier="gpu")
    assert list(graph) == [
        node("fetch:7", NodeType.PREFIX_FETCH, "", "kv:7:32", "g", request=7, tokens=32),
        node("load:7:32", NodeType.KV_LOAD, "kv:7:32", "kv:7:48", "g", start=32, tokens=16, src_tier="cpu", bytes=160, **load),
        node("load:7:48", NodeType.KV_LOAD, "kv:7:48", "kv:7:56", "g", start=48, tokens=8, src_tier="nvme", bytes=80, **load),
        node("prefill:7:56", NodeType.PREFILL_CHUNK, "kv:7:56", "kv:7:100 logits:7:100", "g",
             request=7, start=56, tokens=44, phase="engine"),
        node("sample:7:100", NodeType.SAMPLE, "logits:7:100", "token:7:100", "g", requests=[7]),
    ]  # fmt: skip


def test_a_request_that_decodes():
    graph = IRBuilder.build([running(3, 9)], ScheduleDecision(phase=Phase.DECODE, token_budget=5))
    assert list(graph) == [
        node("decode:3:9", NodeType.DECODE_STEP, "kv:3:8 token:3:8", "kv:3:9 logits:3:9", requests=[3], token_budget=5),
        node("sample:3:9", NodeType.SAMPLE, "logits:3:9", "token:3:9", requests=[3]),
    ]
    assert (kv_value(3, 9), logits_value(3, 9), token_value(3, 9)) == ("kv:3:9", "logits:3:9", "token:3:9")


def test_a_decision_orders_holds_and_cuts():
    requests = [waiting(1, 10), waiting(2, 10, 4), waiting(3, 10), running(4, 5)]
    decision = ScheduleDecision(
        order=(4, 2, 3, 1), hold=frozenset({3}), chunk_tokens={2: 4, 1: 10}, phase=Phase.PREFILL
    )
    graph = IRBuilder.build(requests, decision)
    assert [each.node_id for each in graph] == [
        "decode:4:5", "sample:4:5", "prefill:2:4", "prefill:2:8", "sample:2:10", "prefill:1:0", "sample:1:10",
    ]  # fmt: skip
    assert (graph["prefill:2:4"].outputs, graph["prefill:2:8"].inputs) == (("kv:2:8",), ("kv:2:8",))
    assert graph["decode:4:5"].config == {"requests": [4], "phase": "prefill"}


def test_the_last_token_is_computed_whatever_is_cached():
    (fetch, prefill, _) = IRBuilder.build([waiting(1, 10)], cached={1: 64}, lower={1: {"cpu": 5}})
    assert (fetch.config["tokens"], prefill.config["start"], prefill.config["tokens"]) == (9, 9, 1)
    (load, prefill, _) = IRBuilder.build([waiting(1, 10)], lower={1: {"none": 0, "cpu": 50}})
    assert (load.config["tokens"], load.inputs, prefill.config["start"]) == (9, (), 9)
    (prefill, _) = IRBuilder.build([waiting(1, 1)], cached={1: 1})
    assert (prefill.config["start"], prefill.config["tokens"], prefill.inputs) == (0, 1, ())


def test_who_has_begun_has_what_there_was():
    (prefill, _) = IRBuilder.build([waiting(1, 10, 4)], cached={1: 8}, lower={1: {"cpu": 2}})
    assert prefill.config["start"] == 4


def test_nobody_to_compute():
    assert len(IRBuilder.build([])) == 0 == len(IRBuilder.build([waiting(1, 2)], ScheduleDecision(hold=frozenset({1}))))


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ({"order": (1,)}, "the order is [1] for requests [1, 2]; name each of them once"),
        ({"order": (1, 1)}, "the order is [1, 1]"),
        ({"order": (1, 2, 2)}, "the order is [1, 2, 2]"),
        ({"order": (1, 3)}, "the order is [1, 3]"),
        ({"hold": frozenset({9})}, "hold names requests [9]; the step has [1, 2]"),
        ({"chunk_tokens": {8: 1}}, "chunk_tokens names requests [8]"),
        ({"chunk_tokens": {1: 0}}, "chunk_tokens of request 1 is 0"),
        ({"token_budget": 0}, "token_budget is 0"),
    ],
)
def test_decisions_that_make_no_sense(decision: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=re.escape(message)):
        IRBuilder.build([waiting(1, 5), running(2, 5)], ScheduleDecision(**decision))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"requests": [waiting(1, 5), running(1, 5)]}, "requests [1, 1]; give each once"),
        ({"requests": [waiting(1, 0)]}, "request 1 has 0 tokens"),
        ({"requests": [waiting(1, 5)], "cached": {1: -1}}, "cached of request 1 is -1"),
        ({"requests": [waiting(1, 5)], "lower": {1: {"cpu": -1}}}, "request 1 has -1 tokens on cpu"),
        ({"requests": [waiting(1, 5)], "bytes_per_token": -1}, "bytes_per_token is -1"),
        ({"requests": [running(1, 5)], "decode_batch": -1}, "decode_batch is -1; give a whole number from 1 on, or 0"),
    ],
)
def test_queues_that_make_no_sense(given: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=re.escape(message)):
        IRBuilder.build(**given)


@given(decided(), st.integers(0, 4))
def test_batches_are_those_that_the_passes_make(case: tuple[StepView, ScheduleDecision], limit: int):
    view, decision = case
    cached = {request.request_id: 3 for request in view.requests[::2]}
    one, many = (IRBuilder.build(view.requests, decision, cached=cached, decode_batch=size) for size in (1, limit))
    settings = PassSettings(max_batch_size=limit)
    merged = merge_samples(merge_decode_steps(one, settings), settings)
    assert many == merged and many.topological_order() == list(many)
    assert merge_samples(merge_decode_steps(many, settings), settings) is many


@given(queues())
def test_nodes_are_those_that_the_checked_way_makes(requests: tuple):
    cached = {request.request_id: 3 for request in requests[::2]}
    lower = {request.request_id: {"cpu": 4} for request in requests[::3]}
    graph = IRBuilder.build(requests, cached=cached, lower=lower)
    again = [
        IRNode(each.node_id, each.node_type, each.inputs, each.outputs, each.config, each.device) for each in graph
    ]
    assert again == list(graph) and IRGraph.from_json(graph.to_json()) == graph
    assert all(type(each.node_type) is NodeType and type(each.inputs) is tuple for each in graph)


@given(decided())
def test_each_request_that_is_not_held_is_computed_to_its_end_once(case: tuple[StepView, ScheduleDecision]):
    view, decision = case
    graph = IRBuilder.build(view.requests, decision)
    assert graph.topological_order() == list(graph)
    for request in view.requests:
        mine = [each for each in graph if request.request_id in each.requests]
        if request.request_id in decision.hold:
            assert not mine
        elif request.phase is Phase.DECODE:
            assert [each.node_type for each in mine] == [NodeType.DECODE_STEP, NodeType.SAMPLE]
        else:
            chunks = [each.config for each in mine if each.node_type is NodeType.PREFILL_CHUNK]
            spans = [place for each in chunks for place in range(each["start"], each["start"] + each["tokens"])]
            assert spans == list(range(min(request.num_computed, request.num_tokens - 1), request.num_tokens))
            assert len(chunks) <= 2 and mine[-1].node_type is NodeType.SAMPLE
