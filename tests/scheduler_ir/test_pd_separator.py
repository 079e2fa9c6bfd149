"""Where prompts and decode steps go: nothing is lost, what crosses is moved, and the choice follows the costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import PlanError
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import IRNode, NodeType, kv_value, logits_value, token_value
from sagellm.scheduler_ir.pd_costs import PDCosts
from sagellm.scheduler_ir.pd_separator import Instance, PDSeparator, Role
from sagellm.scheduler_ir.plan import ExecutionPlan

FAST = PDCosts(link=Link(latency_s=1e-5, bytes_per_s=1e11))
SLOW = PDCosts(link=Link(latency_s=1.0, bytes_per_s=1e4))
PAIR = [Instance("h", Role.HYBRID, num_running=16), Instance("p", Role.PREFILL)]


def chat(request, prompt, num_decodes):
    nodes = [
        IRNode(
            f"prefill{request}", NodeType.PREFILL_CHUNK, (), (kv_value(request, prompt), logits_value(request, prompt)),
            {"request": request, "start": 0, "tokens": prompt},
        ),
        IRNode(
            f"draw{request}", NodeType.SAMPLE, (logits_value(request, prompt),), (token_value(request, prompt),),
            {"requests": [request]},
        ),
    ]  # fmt: skip
    for place in range(prompt, prompt + num_decodes):
        inputs = (kv_value(request, place), token_value(request, place))
        outputs = (kv_value(request, place + 1), token_value(request, place + 1))
        nodes.append(IRNode(f"decode{request}_{place}", NodeType.DECODE_STEP, inputs, outputs, {"requests": [request]}))
    return nodes


def plan_of(*requests, target="", extra=()):
    nodes = [node for request, prompt, decodes in requests for node in chat(request, prompt, decodes)]
    return ExecutionPlan("p", IRGraph(nodes), (*(request for request, *_ in requests), *extra), target)


def split(plan, instances=PAIR, costs=FAST):
    return PDSeparator().split(plan, instances, costs)


def by_target(decision):
    return {each.target_instance_id: each for each in decision.plans}


def test_a_split_keeps_streams_from_waiting_and_moves_keys_and_values():
    decision = split(plan_of((1, 1000, 3)))
    assert decision.is_split and "pays" in decision.reason and "h" in decision.reason
    plans = by_target(decision)
    assert [node.node_id for node in plans["p"].ir_graph][:2] == ["prefill1", "draw1"]
    (sent,) = [node for node in plans["p"].ir_graph if node.node_id.startswith("send:kv")]
    assert dict(sent.config) == {
        "request": 1, "start": 0, "tokens": 1000, "src_instance": "p", "dst_instance": "h",
        "bytes": 1000 * FAST.kv_bytes_per_token,
    }  # fmt: skip
    assert {node.device for node in plans["h"].ir_graph} == {"h"}
    assert decision.apart.stall_s == 0 and decision.together.stall_s == pytest.approx(16 * FAST.prefill_s(1000))
    assert decision.apart.stream_s < decision.together.stream_s


def test_one_instance_where_the_transfer_is_slow():
    decision = split(plan_of((1, 1000, 3)), costs=SLOW)
    assert not decision.is_split and "does not pay" in decision.reason
    (only,) = decision.plans
    assert only.target_instance_id == "h" and only.plan_id == "p" and len(only.ir_graph) == 5
    assert f"{1000 * SLOW.kv_bytes_per_token + 8} bytes" in decision.reason


def test_one_instance_where_nobody_is_disturbed():
    quiet = [Instance("h", Role.HYBRID), Instance("p", Role.PREFILL)]
    assert not split(plan_of((1, 1000, 3)), quiet).is_split
    assert not split(plan_of((1, 1000, 3)), costs=FAST.model_copy(update={"interference": 0.0})).is_split


def test_the_choice_turns_with_the_number_of_streams():
    costs = PDCosts(link=Link(latency_s=0.0, bytes_per_s=2e7))
    chosen = [
        split(plan_of((1, 500, 2)), [Instance("h", num_running=running), Instance("p", Role.PREFILL)], costs).is_split
        for running in range(0, 12)
    ]
    assert chosen == sorted(chosen) and chosen[0] is False and chosen[-1] is True


def test_the_less_busy_instance_computes_the_prompt():
    instances = [*PAIR, Instance("p2", Role.PREFILL, load_s=0.0)]
    busy = [instances[0], Instance("p", Role.PREFILL, load_s=5.0), instances[2]]
    assert set(by_target(split(plan_of((1, 1000, 3)), busy))) == {"p2", "h"}


def test_an_instance_without_blocks_is_passed_over():
    full = [PAIR[0], Instance("p", Role.PREFILL, free_blocks=15, block_size=64)]  # 1000 and 3 tokens: 16 blocks
    assert not split(plan_of((1, 1000, 3)), full).is_split
    assert split(plan_of((1, 1000, 3)), [PAIR[0], Instance("p", Role.PREFILL, free_blocks=16, block_size=64)]).is_split
    with pytest.raises(PlanError, match="no instance has blocks"):
        split(plan_of((1, 1000, 3)), [Instance("h", free_blocks=1)])


def test_a_target_keeps_its_part():
    others = [*PAIR, Instance("d", Role.DECODE)]
    assert set(by_target(split(plan_of((1, 1000, 3), target="h"), others))) == {"h", "p"}
    assert set(by_target(split(plan_of((1, 1000, 3), target="p"), others))) == {"d", "p"}


def test_prompts_alone_need_no_instance_that_decodes():
    decision = split(plan_of((1, 100, 0)), [Instance("p", Role.PREFILL)])
    assert [each.target_instance_id for each in decision.plans] == ["p"]


@pytest.mark.parametrize("instances, target, says", [
    ([], "", "no instances"),
    ([Instance("p", Role.PREFILL)], "", "all instances are for prefill"),
    ([Instance("a"), Instance("a")], "", r"\['a'\] are given twice"),
    ([Instance("a")], "z", "for instance 'z'; known are"),
])  # fmt: skip
def test_bad_instances(instances, target, says):
    with pytest.raises(PlanError, match=says):
        split(plan_of((1, 10, 1), target=target), instances)


@pytest.mark.parametrize("fields", [
    {"instance_id": ""}, {"role": "both"}, {"load_s": -1.0}, {"load_s": float("inf")}, {"num_running": -1},
    {"free_blocks": -1}, {"block_size": 0},
])  # fmt: skip
def test_bad_instance(fields):
    with pytest.raises(PlanError, match="instance"):
        Instance(**({"instance_id": "a"} | fields))


def test_a_value_of_no_request_keeps_the_plan_together():
    shared = IRNode("sum", NodeType.COLLECTIVE, (token_value(1, 10),), ("sum",), {"op": "all_reduce", "bytes": 1, "group": "g"})
    decode = IRNode("decode", NodeType.DECODE_STEP, ("sum",), (), {"requests": [1]})
    plan = ExecutionPlan("p", IRGraph([*chat(1, 10, 0), shared, decode]), (1,))
    assert not split(plan, [Instance("h", num_running=1000), Instance("p", Role.PREFILL)]).is_split


@st.composite
def problems(draw):
    requests = [
        (number, draw(st.integers(1, 2000)), draw(st.integers(0, 4))) for number in range(draw(st.integers(1, 5)))
    ]
    nodes = [node for request in requests for node in chat(*request)]
    extra = draw(st.integers(0, 4))
    values = [value for node in nodes for value in node.outputs]
    for number in range(extra):  # decode steps of several requests, loads and checks between them
        some = draw(st.lists(st.sampled_from([request for request, *_ in requests]), min_size=1, max_size=3, unique=True))
        inputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3, unique=True)))
        kind = draw(st.sampled_from([NodeType.DECODE_STEP, NodeType.SAMPLE, NodeType.PREFILL_CHUNK]))
        config = {"request": some[0], "start": 0, "tokens": 5} if kind is NodeType.PREFILL_CHUNK else {"requests": some}
        nodes.append(IRNode(f"x{number}", kind, inputs, (f"x{number}",), config))
        values.append(f"x{number}")
    instances = [
        Instance(f"i{number}", draw(st.sampled_from(list(Role))), draw(st.floats(0, 5)), draw(st.integers(0, 40)))
        for number in range(draw(st.integers(1, 4)))
    ]
    costs = draw(st.sampled_from([FAST, SLOW, PDCosts()]))
    ids = (*(request for request, *_ in requests), 99)  # the last one has no node
    return ExecutionPlan("p", IRGraph(nodes), ids), instances, costs


@settings(max_examples=200, deadline=None)
@given(problems())
def test_every_node_is_in_one_plan_and_what_crosses_is_moved(problem):
    plan, instances, costs = problem
    if all(one.role is Role.PREFILL for one in instances):
        has_decodes = any(node.node_type is NodeType.DECODE_STEP for node in plan.ir_graph)
        if has_decodes:
            with pytest.raises(PlanError):
                split(plan, instances, costs)
        return
    decision = split(plan, instances, costs)
    where = {}
    for part in decision.plans:
        assert ExecutionPlan.from_json(part.to_json()) == part
        part.ir_graph.topological_order()
        for node in part.ir_graph:
            if node.node_id in plan.ir_graph:
                assert node.node_id not in where
                where[node.node_id] = part
                before = plan.ir_graph[node.node_id]
                assert (node.inputs, node.outputs, node.config) == (before.inputs, before.outputs, before.config)
                assert node.device == part.target_instance_id
            else:
                assert node.node_type is NodeType.KV_TRANSFER
    assert set(where) == {node.node_id for node in plan.ir_graph}
    assert set().union(*(part.request_ids for part in decision.plans)) == set(plan.request_ids)
    nodes = [node for part in decision.plans for node in part.ir_graph]
    sent = {value for node in nodes if node.node_id.startswith("send:") for value in node.outputs}
    for node in plan.ir_graph:
        for name in plan.ir_graph.predecessors(node.node_id):
            part = where[node.node_id]
            for value in set(node.inputs).intersection(plan.ir_graph[name].outputs):
                (giver,) = [each for each in part.ir_graph if value in each.outputs]  # in its own plan, or taken from another
                if where[name] is not part:
                    assert giver.node_type is NodeType.KV_TRANSFER and set(giver.inputs) <= sent
                    assert giver.config["src_instance"] == where[name].target_instance_id
    best = [each for each in (decision.together, decision.apart) if each is not None]
    used = {part.target_instance_id for part in decision.plans}
    cheapest = min(each.stream_s for each in best)
    assert any(each.stream_s == cheapest and used <= {each.prefill_on, each.decode_on} for each in best)
