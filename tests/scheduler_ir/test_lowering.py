"""From a graph to the decision for the next step."""

from dataclasses import replace

from hypothesis import given

from sagellm.core.hooks import Phase, RequestId, ScheduleDecision, StepView
from sagellm.scheduler_ir.builder import IRBuilder
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.lowering import lower
from sagellm.scheduler_ir.nodes import NodeType
from sagellm.scheduler_ir.passes import PassSettings
from tests.scheduler_ir.made import decided, node, running, view, waiting


def essence(decision: ScheduleDecision, step: StepView, by_phase: bool = False) -> tuple:
    """Return what an engine does about a decision: the requests that it takes in which order, with which cuts. Cuts that cut
    nothing are left out."""
    left = {each.request_id: max(each.num_tokens - each.num_computed, 1) for each in step.requests}
    waits = {each.request_id for each in step.requests if each.phase is Phase.PREFILL}
    order = decision.order or [each.request_id for each in step.requests]
    order = [name for name in order if name not in decision.hold]
    if by_phase:
        order.sort(key=lambda name: name in waits)
    cuts = {name: decision.chunk_tokens[name] for name in order if name in waits and name in decision.chunk_tokens}
    cuts = {name: tokens for name, tokens in cuts.items() if tokens < left[name]}
    if not order:  # nothing to carry out
        return (decision.hold,)
    return order, decision.hold, cuts, decision.token_budget, decision.phase


@given(decided())
def test_a_decision_comes_back_from_its_graph(case: tuple[StepView, ScheduleDecision]):
    step, decision = case
    found = lower(IRBuilder.build(step.requests, decision), step)
    assert essence(found, step) == essence(decision, step)
    assert sorted(found.order) == sorted(each.request_id for each in step.requests)


@given(decided())
def test_passes_leave_the_decision_as_it_is(case: tuple[StepView, ScheduleDecision]):
    step, decision = case
    settings = PassSettings(max_batch_size=step.max_batch_size)
    graph = IRBuilder.build(step.requests, decision).optimize(settings=settings, check=True)
    assert essence(lower(graph, step), step, by_phase=True) == essence(decision, step, by_phase=True)


def test_a_graph_of_several_steps_is_done_step_by_step():
    graph = IRBuilder.build([waiting(1, 10)], ScheduleDecision(phase=Phase.PREFILL, chunk_tokens={1: 4}))
    graph.add(node("more", NodeType.DECODE_STEP, "kv:1:10 token:1:10", "kv:1:11 logits:1:11", requests=[1]))
    chunk = lower(graph, view(waiting(1, 10)))
    assert (chunk.phase, chunk.chunk_tokens, chunk.hold) == (Phase.PREFILL, {1: 4}, frozenset())
    rest = lower(graph, view(waiting(1, 10, 4)))
    assert (rest.phase, rest.chunk_tokens, rest.reason) == (Phase.PREFILL, {}, "prefill:1:4 is the first that is ready")
    part = lower(graph, view(waiting(1, 10, 1)))  # the engine cut it shorter
    assert (part.phase, part.chunk_tokens) == (Phase.PREFILL, {1: 3})
    decode = lower(graph, view(running(1, 11)))
    assert (decode.phase, decode.hold, decode.reason) == (Phase.DECODE, frozenset(), "more is the first that is ready")
    over = lower(graph, view(running(1, 12)))
    assert (over.phase, over.hold, over.reason) == (None, frozenset({1}), "no node is ready")


def test_who_is_preempted_is_computed_again():
    graph = IRBuilder.build([running(1, 10)])
    assert lower(graph, view(running(1, 10))).phase is None
    graph = IRBuilder.build([running(1, 10)], ScheduleDecision(phase=Phase.DECODE))
    assert lower(graph, view(running(1, 10))).phase is Phase.DECODE
    again = lower(graph, view(waiting(1, 10)))
    assert (again.phase, again.hold) == (Phase.PREFILL, frozenset())


def test_a_transfer_must_be_there_and_a_load_comes_with_the_step():
    part = dict(request=1, start=0, tokens=9, bytes=1)
    move = node("move", NodeType.KV_TRANSFER, "", "kv:1:9", src_instance="a", dst_instance="b", **part)
    decode = node("decode", NodeType.DECODE_STEP, "kv:1:9", "kv:1:10", requests=[1])
    other = node("other", NodeType.DECODE_STEP, "", "kv:2:5", requests=[2])
    graph = IRGraph([move, decode, other])
    decision = lower(graph, view(waiting(1, 10), running(2, 5)))
    assert (decision.hold, decision.order, decision.phase) == (frozenset({1}), (2, 1), Phase.DECODE)
    assert lower(graph, view(running(1, 10), running(2, 5))).hold == frozenset()
    load = node("load", NodeType.KV_LOAD, "", "kv:1:9", src_tier="cpu", dst_tier="gpu", **part)
    assert lower(IRGraph([load, decode, other]), view(waiting(1, 10), running(2, 5))).hold == frozenset()


def test_a_collective_waits_for_what_it_takes():
    graph = IRGraph([
        node("first", NodeType.DECODE_STEP, "", "kv:1:5 part", requests=[1]),
        node("sum", NodeType.COLLECTIVE, "part", "all", op="all_reduce", bytes=8, group="tp"),
        node("second", NodeType.DECODE_STEP, "all", "kv:2:5", requests=[2]),
    ])  # fmt: skip
    assert lower(graph, view(running(1, 5), running(2, 5))).hold == frozenset({2})
    assert lower(graph, view(running(1, 6), running(2, 5))).hold == frozenset({1})


def test_who_is_not_in_the_view_keeps_nobody_waiting():
    graph = IRBuilder.build([running(1, 5), running(2, 6)]).optimize()
    assert [each.requests for each in graph] == [(1, 2), (1, 2)]
    decision = lower(graph, view(running(2, 6), running(9, 3)))
    assert (decision.order, decision.hold) == ((2, 9), frozenset({9}))


def test_a_batch_is_done_when_all_its_requests_are():
    graph = IRBuilder.build([running(1, 5), running(11, 6), running(2, 7)], decode_batch=0)
    (hold,) = {lower(graph, view(running(1, a), running(11, b))).hold for a, b in ((5, 6), (6, 6), (5, 7))}
    assert hold == frozenset()
    assert lower(graph, view(running(1, 6), running(11, 7))).hold == frozenset({1, 11})


def test_decode_steps_that_do_not_fit_into_a_batch_wait():
    requests = [running(name, 5) for name in range(5)]
    graph = IRBuilder.build(requests).optimize(settings=PassSettings(max_batch_size=2))
    assert lower(graph, view(*requests, max_batch_size=2)).hold == frozenset({2, 3, 4})
    assert lower(graph, view(*requests, max_batch_size=4)).hold == frozenset({4})
    assert lower(graph, view(*requests, max_batch_size=1)).hold == frozenset({2, 3, 4})
    assert lower(graph, view(*requests)).hold == frozenset()


def test_only_the_nodes_of_a_device():
    step = view(running(1, 5), running(2, 5))
    nodes = [replace(each, device="a" if 1 in each.requests else "") for each in IRBuilder.build(step.requests)]
    assert lower(IRGraph(nodes), step, device="b").hold == frozenset({1})
    assert lower(IRGraph(nodes), step, device="a").hold == lower(IRGraph(nodes), step).hold == frozenset()


def test_a_cut_remarks_the_budget_of_its_step():
    settings = PassSettings(token_budget=8)
    requests = [waiting(1, 3), waiting(2, 20)]
    graph = IRBuilder.build(requests, ScheduleDecision(phase=Phase.PREFILL)).optimize(settings=settings, check=True)
    decision = lower(graph, view(*requests))
    assert (decision.token_budget, decision.chunk_tokens) == (8, {RequestId(2): 8})


def test_an_empty_graph_holds_everybody():
    decision = lower(IRGraph(), view(running(1, 5), waiting(2, 5)))
    assert (decision.hold, decision.order, decision.phase) == (frozenset({1, 2}), (1, 2), None)
    assert lower(IRGraph(), view()).order == ()
