"""Tests of any plan: every request ends, and every node has a state with a reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.nodes import IRNode, NodeType
from sagellm.scheduler_ir.plan import ExecutionPlan, NodeState, PlanState
from sagellm.scheduler_ir.plan_runner import PlanRunner
from tests.scheduler_ir.fake_engine import FakeEngine
from tests.scheduler_ir.made_plans import TwoWorkers, collective, decode, plan, prefill, sample, start, states

PLANS = Path(__file__).parent / "plans"


@st.composite
def workloads(draw):
    requests = [
        (number, draw(st.integers(1, 200)), draw(st.integers(1, 6)), draw(st.integers(0, 64)))
        for number in range(draw(st.integers(1, 5)))
    ]
    owned = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True))  # some never come
    nodes = []
    for number in range(draw(st.integers(1, 12))):
        earlier = [node.node_id for node in nodes]
        after = draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)) if earlier else []
        kind = draw(st.sampled_from(["prefill", "decode", "sample", "fetch", "verify", "collective"]))
        one = draw(st.sampled_from(owned))
        some = draw(st.lists(st.sampled_from(owned), min_size=1, max_size=3, unique=True))
        name = f"n{number}"
        if kind == "prefill":
            nodes.append(prefill(name, one, draw(st.integers(0, 150)), draw(st.integers(1, 150)), after))
        elif kind == "decode":
            nodes.append(decode(name, some, after))
        elif kind == "sample":
            nodes.append(sample(name, some, after))
        elif kind == "collective":
            nodes.append(collective(name, num_bytes=draw(st.sampled_from([512, 1024])), after=after))
        elif kind == "fetch":
            nodes.append(IRNode(name, NodeType.PREFIX_FETCH, tuple(after), (name,), {"request": one, "tokens": 16}))
        else:
            nodes.append(IRNode(name, NodeType.VERIFY, tuple(after), (name,), {"requests": some, "drafts": [1] * len(some)}))
    half = draw(st.integers(0, len(nodes)))
    engine = {
        "blocks": draw(st.sampled_from([16, 24, 1000])), "can_cut": draw(st.booleans()),
        "budget": draw(st.sampled_from([64, 512])), "names_requests": draw(st.booleans()), "is_ahead": draw(st.booleans()),
        "max_batch": draw(st.sampled_from([1, 8])),
    }  # fmt: skip
    return requests, owned, nodes[:half], nodes[half:], engine, draw(st.integers(0, 20))


@settings(max_examples=100, deadline=None)
@given(workloads())
def test_every_request_ends_and_every_node_of_known_requests_is_settled_with_a_word(drawn):
    requests, owned, first, second, engine, when = drawn
    runner = PlanRunner(wait_for_requests=True, patience_s=5)
    runner.attach(TwoWorkers())
    fake = FakeEngine(runner, **engine)
    for number, prompt, max_new, cached in requests:
        fake.add(number, prompt, max_new, cached)
    if first:
        runner.submit_plan(plan("p", *first, requests=owned))
    for _ in range(when):
        fake.once()
    if second:
        try:
            runner.submit_plan(plan("q", *second, requests=owned))
        except PlanError:
            second = ()
    fake.run()
    known = {number for number, *_ in requests}
    for name, nodes in (("p", first), ("q", second)):
        for node in nodes:
            status = runner.status(name).nodes[node.node_id]
            if status.state in (NodeState.REFUSED, NodeState.CANCELLED):
                assert status.detail
            elif status.state is NodeState.RUNNING and node.node_type is not NodeType.COLLECTIVE:
                raise AssertionError(f"{node} is still running")
    if not set(owned) - known:
        for name, nodes in (("p", first), ("q", second)):
            assert not nodes or runner.status(name).state in (PlanState.DONE, PlanState.CANCELLED)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_the_plans_in_files_run_as_they_say(path):
    wanted = ExecutionPlan.from_json(path.read_text())
    assert json.loads(wanted.to_json()) == json.loads(path.read_text())
    runner, fake = start(wanted, requests=[(number, 100) for number in wanted.request_ids])
    fake.run()
    assert runner.status(wanted.plan_id).state is PlanState.DONE
    expected = {node.node_id: node.config["expect"] for node in wanted.ir_graph}
    assert states(runner, wanted.plan_id) == expected
