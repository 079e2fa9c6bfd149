"""Schedules that can be worked out on paper, and what holds for every one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Phase, ScheduleDecision
from sagellm.scheduler_ir.simulation.base import EngineShape, FaultKind, StrategyFault
from sagellm.scheduler_ir.simulation.pool import BlockPool
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine
from tests.scheduler_ir.simulation.made import COSTS, SHAPE, Answers, Cuts, Fifo, LastFirst, request


def run(requests, strategy=None, shape=SHAPE, **options):
    engine = VirtualEngine(shape, COSTS, requests, strategy, name="tested", **options)
    assert engine.run()
    return engine


def tokens_of(engine):
    return {each.request_id: pytest.approx(tuple(each.token_s)) for each in engine.requests.values()}


def steps_of(engine):
    return [(step.phase.value, dict(step.computed), pytest.approx(step.end_s)) for step in engine.steps]


def test_a_step_is_chosen_while_another_runs():
    found = run([request(0, 0.0, 100, 3), request(1, 0.5, 50, 2)])
    # While the second prompt runs, the decode step of request 0 has been sent; request 1 joins the one after it.
    assert steps_of(found) == [
        ("prefill", {0: 100}, 2.0), ("prefill", {1: 50}, 3.5), ("decode", {0: 1}, 4.0), ("decode", {0: 1, 1: 1}, 4.5)
    ]  # fmt: skip
    assert tokens_of(found) == {0: (2.0, 4.0, 4.5), 1: (3.5, 4.5)}


def test_gap_before_a_step_that_was_not_sent_ahead():
    found = run([request(0, 0.0, 100, 3), request(1, 0.5, 50, 2)], gap_s=0.1)
    assert [step.end_s for step in found.steps] == pytest.approx([2.1, 3.7, 4.2, 4.8])


def test_round_of_decode_steps():
    shape = replace(SHAPE, decode_round=4)
    found = run([request(0, 0.0, 10, 6), request(1, 1.2, 10, 1)], shape=shape)
    # Request 1 is seen when the last decode step of the round begins; request 0's second round goes on after its end.
    assert steps_of(found) == [
        ("prefill", {0: 10}, 1.1), *[("decode", {0: 1}, 1.1 + 0.5 * number) for number in (1, 2, 3, 4)],
        ("prefill", {1: 10}, 4.2), *[("decode", {0: 1}, 4.2 + 0.5 * number) for number in (1, 2, 3, 4)],
    ]  # fmt: skip
    assert tokens_of(found) == {0: (1.1, 1.6, 2.1, 2.6, 3.1, 4.7), 1: (4.2,)}


def test_the_next_step_is_chosen_when_the_last_of_a_round_begins():
    shape, strategy = replace(SHAPE, decode_round=4), Cuts()
    found = run([request(0, 0.0, 10, 5), request(1, 2.3, 10, 1)], strategy, shape=shape, gap_s=0.25)
    # Prompt, round, prompt: no gap before the last, which was sent ahead.
    assert [step.end_s for step in found.steps] == pytest.approx([1.35, 2.1, 2.6, 3.1, 3.6, 4.7])
    assert [result.num_context_tokens for result in strategy.results] == [0, 10, 11, 12, 13, 0]


def test_the_longest_unused_goes_for_room():
    pool = BlockPool(replace(SHAPE, num_blocks=10, prefix_caching=True))
    first, second = (request(number, 0.0, 20, 1) for number in (0, 1))
    for each in (first, second):
        pool.hold(each, 5)
        each.num_computed, each.has_run = 20, True
    for each in (first, second):
        pool.release(each)
    assert pool.num_free == 0
    pool.evict_cached(3)
    pool.find(first)
    pool.find(second)
    assert (pool.num_free, first.num_blocks, second.num_blocks, first.num_computed) == (3, 2, 5, 8)


def test_who_comes_last_is_preempted_and_computed_again():
    shape = replace(SHAPE, num_blocks=6)
    found = run([request(0, 0.0, 8, 12), request(1, 0.0, 8, 12)], shape=shape)
    both = {0: 1, 1: 1}
    assert steps_of(found) == [
        ("prefill", {0: 8, 1: 8}, 1.16), *[("decode", both, 1.16 + 0.5 * number) for number in (1, 2, 3)],
        *[("decode", {0: 1}, 2.66 + 0.5 * number) for number in range(1, 9)],
        ("prefill", {1: 12}, 7.78), *[("decode", {1: 1}, 7.78 + 0.5 * number) for number in range(1, 8)],
    ]  # fmt: skip
    assert found.num_preempted == 1


def test_what_was_cached_is_not_computed():
    shape = replace(SHAPE, prefix_caching=True)
    found = run([request(0, 0.0, 40, 1), request(1, 5.0, 50, 1, cached_tokens=40)], shape=shape)
    assert steps_of(found) == [("prefill", {0: 40}, 1.4), ("prefill", {1: 10}, 6.1)]


def test_a_prompt_joins_until_the_budget_is_full():
    def prompts():
        return [request(number, 0.0, tokens, 1) for number, tokens in enumerate((60, 40, 10, 250, 5))]

    found = run(prompts())
    assert [dict(step.computed) for step in found.steps] == [{0: 60, 1: 40}, {2: 10}, {3: 250}, {4: 5}]
    lowered = run(prompts(), Answers(lambda view: ScheduleDecision(token_budget=50)))
    assert [dict(step.computed) for step in lowered.steps] == [{0: 60}, {1: 40, 2: 10}, {3: 250}, {4: 5}]


def test_batch_limit():
    shape = replace(SHAPE, max_batch_size=2)
    found = run([request(number, 0.0, 10, 2) for number in range(3)], shape=shape)
    assert [dict(step.computed) for step in found.steps] == [{0: 10, 1: 10}, {0: 1, 1: 1}, {2: 10}, {2: 1}]


def test_a_prompt_is_cut():
    strategy = Cuts(40)
    found = run([request(0, 0.0, 100, 2), request(1, 0.0, 50, 1)], strategy)
    # A cut one keeps its place; who follows in its step is not cut, which is told.
    assert [dict(step.computed) for step in found.steps] == [{0: 40, 1: 50}, {0: 40}, {0: 20}, {0: 1}]
    assert [dict(result.refused) for result in strategy.results] == [
        {1: "its prompt is not cut: it is not the first of its step"}, {}, {}, {}
    ]  # fmt: skip
    assert tokens_of(found)[0] == (1.9 + 1.4 + 1.2, 5.0)


def test_phase_is_the_strategys():
    requests = [request(0, 0.0, 10, 4), request(1, 1.0, 100, 1)]
    found = run(requests, Cuts(40, in_turn=True))
    assert [dict(step.computed) for step in found.steps] == [{0: 10}, {0: 1}, {1: 40}, {0: 1}, {1: 40}, {0: 1}, {1: 20}]


def test_who_is_held_waits():
    def first_alone(view):
        return ScheduleDecision(hold=frozenset([1])) if any(each.request_id == 0 for each in view.requests) else None

    held = Answers(lambda view: first_alone(view) if view.num_in_flight == 0 else ScheduleDecision(hold=frozenset(
        each.request_id for each in view.requests if each.request_id == 1
    )))  # fmt: skip
    found = run([request(0, 0.0, 10, 3), request(1, 0.0, 10, 1)], held)
    assert [dict(step.computed) for step in found.steps] == [{0: 10}, {0: 1}, {0: 1}, {1: 10}]
    assert held.ended == [0, 1]


def test_a_budget_bounds_decode_steps_too():
    found = run([request(0, 0.0, 10, 4), request(1, 0.0, 10, 3)], Answers(lambda view: ScheduleDecision(token_budget=1)))
    assert [dict(step.computed) for step in found.steps] == [{0: 10}, {1: 10}, *[{0: 1}] * 3, *[{1: 1}] * 2]


@pytest.mark.parametrize("num_later, generated, phases", [(3, 4, "PDDPD"), (4, 3, "PDPD")])
def test_four_that_wait_go_before_those_that_run(num_later, generated, phases):
    """Half of the batch runs. Three that come to wait are computed once a decode step is on its way, four before it."""
    early = [request(number, 0.0, 10, generated) for number in range(4)]
    found = run(early + [request(4 + number, 1.5, 10, 1) for number in range(num_later)])
    assert "".join(step.phase.value[0].upper() for step in found.steps) == phases


def test_who_waits_gives_its_blocks_to_who_goes_first():
    shape = replace(SHAPE, num_blocks=10)

    def youngest(view):
        order = sorted((each.request_id for each in view.requests), reverse=True)
        return ScheduleDecision(order, chunk_tokens={each.request_id: 20 for each in view.waiting})

    found = run([request(0, 0.0, 36, 1), request(1, 0.5, 20, 1)], Answers(youngest), shape=shape)
    assert [dict(step.computed) for step in found.steps] == [{0: 20}, {1: 20}, {0: 20}, {0: 16}]


def test_what_is_lost_stays_cached_until_it_goes_for_room():
    """As above with prefix caching: of the two full blocks of request 1, one goes for request 0, one is found again."""
    shape = replace(SHAPE, num_blocks=6, prefix_caching=True)
    found = run([request(0, 0.0, 8, 9), request(1, 0.0, 8, 9)], shape=shape)
    assert [dict(step.computed) for step in found.steps if step.phase is Phase.PREFILL] == [{0: 8, 1: 8}, {1: 12 - 4}]


def test_a_strategy_that_raises_is_named():
    with pytest.raises(StrategyFault, match="strategy tested: decide raised ZeroDivisionError") as caught:
        run([request(0, 1.5, 10, 2)], Answers(lambda view: 1 / 0))
    fault = caught.value
    assert (fault.kind, fault.step, fault.now_s) == (FaultKind.RAISED, 1, 1.5)
    assert isinstance(fault.__cause__, ZeroDivisionError)


def test_decode_is_kept_to_while_a_step_is_on_its_way():
    found = run([request(0, 0.0, 10, 4), request(1, 1.2, 10, 1)], Answers(lambda view: ScheduleDecision(phase=Phase.DECODE)))
    assert [dict(step.computed) for step in found.steps] == [{0: 10}, {0: 1}, {0: 1}, {0: 1}, {1: 10}]


@pytest.mark.parametrize("until_s, is_fine", [(59.0, True), (62.0, False)])
def test_a_minute_is_too_long(until_s, is_fine):
    strategy = Answers(lambda view: ScheduleDecision(hold=frozenset([0] if view.now_s < until_s else [])))
    if is_fine:
        assert run([request(0, 0.0, 10, 1)], strategy).steps[0].end_s == pytest.approx(60.1, abs=0.03)
    else:
        with pytest.raises(StrategyFault, match="request 0 has been held for") as caught:
            run([request(0, 0.0, 10, 1)], strategy)
        assert (caught.value.kind, caught.value.request_id) == (FaultKind.HELD, 0) and caught.value.now_s > 60


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda view: ScheduleDecision(order=[0]), "order"),
        (lambda view: ScheduleDecision(order=[0, 0]), "order"),
        (lambda view: ScheduleDecision(hold=frozenset([5])), "hold names"),
        (lambda view: ScheduleDecision(token_budget=0), "budget 0"),
        (lambda view: ScheduleDecision(chunk_tokens={0: 0}), "at least 1 token"),
        (lambda view: ScheduleDecision(chunk_tokens={9: 4}), "9"),
        (lambda view: "no", "schedule answered"),
        (lambda view: ScheduleDecision(hold=frozenset(each.request_id for each in view.requests)), "held for 60 s"),
    ],
)
def test_nonsense_is_told(answer, words):
    with pytest.raises(StrategyFault, match="strategy tested") as caught:
        run([request(0, 0.0, 10, 2), request(1, 0.0, 10, 2)], Answers(answer))
    assert words in str(caught.value)
    assert caught.value.kind is (FaultKind.HELD if "held" in words else FaultKind.ANSWER)


def test_views_are_the_engines():
    views = []
    run([request(0, 0.0, 100, 3), request(1, 0.5, 50, 2)], Answers(lambda view: views.append(view)))
    # Too few requests run for the engine to look ahead during step 3, so the strategy is not asked then.
    assert [(view.step, view.phase, view.num_in_flight, [each.request_id for each in view.requests]) for view in views] == [
        (1, Phase.PREFILL, 0, [0]), (2, Phase.PREFILL, 0, [1, 0]), (3, Phase.DECODE, 1, [0]), (4, Phase.DECODE, 0, [0, 1]),
    ]  # fmt: skip
    last = views[-1]
    assert (last.free_blocks, last.token_budget, last.max_batch_size) == (1000 - 26 - 13, 100, 8)
    assert [each.last_token_s for each in last.requests] == pytest.approx([4.0, 3.5])


def test_whether_to_look_ahead_is_the_engines_choice():
    """During step 3 a prompt waits: for that the engine looks ahead, and then the strategy has a decode step."""
    strategy = Answers(lambda view: ScheduleDecision(phase=Phase.DECODE) if view.step == 4 else None)
    found = run([request(0, 0.0, 100, 3), request(1, 0.5, 50, 2), request(2, 3.2, 10, 1)], strategy)
    assert steps_of(found)[2:] == [
        ("decode", {0: 1}, 4.0), ("decode", {1: 1}, 4.5), ("prefill", {2: 10}, 5.6), ("decode", {0: 1}, 6.1)
    ]  # fmt: skip


def test_a_cancelled_request_leaves_its_blocks_and_its_step_goes_on():
    strategy = Answers()
    told, results = [], []
    strategy.on_request_end, strategy.on_step_end = told.append, results.append
    engine = VirtualEngine(SHAPE, COSTS, [*(request(each, 0.0, 8, 4) for each in range(4)), request(4, 0.5, 9, 4)], strategy)
    assert engine.step() and engine.step()  # four prompts and a decode step of all; the fifth prompt has been sent
    assert [each.request_id for each in engine.in_flight] == [4]
    before = engine._queues.pool.num_free
    for number in (2, 4, 4):  # one that may run, one on the device
        engine.cancel(number)
    assert told == [2, 4] and engine._queues.pool.num_free == before + 3 + 3
    assert [each.request_id for each in engine.unfinished] == [0, 1, 3]
    assert engine.run() and engine._queues.pool.num_free == 1000 and engine.num_ended == 3
    rest = [{0: 1, 1: 1, 3: 1}] * 2
    assert [dict(step.computed) for step in engine.steps[2:]] == [{4: 9}, *rest] == [
        dict(result.computed) for result in results[2:]
    ]  # fmt: skip
    for number, num_tokens in ((2, 2), (4, 0)):
        gone = engine.requests[number]
        assert gone.is_cancelled and len(gone.token_s) == num_tokens and gone.end_s == float("inf")
    engine.cancel(0)  # it has ended
    assert told == [2, 4, 0, 1, 3] and not engine.requests[0].is_cancelled


def test_who_waits_or_is_to_come_is_cancelled_or_not():
    engine = VirtualEngine(replace(SHAPE, max_batch_size=1), COSTS, [request(number, 0.0, 8, 2) for number in range(2)] + [
        request(2, 50.0, 8, 2)
    ])  # fmt: skip
    assert engine.step()
    engine.cancel(1)
    engine.cancel(2)
    assert engine.run() and [engine.requests[number].is_cancelled for number in range(3)] == [False, True, False]
    assert engine.num_ended == 2 and not engine.step()


def test_a_run_has_bounds():
    def begun():
        return VirtualEngine(SHAPE, COSTS, [request(0, 0.0, 100, 9)])

    engine = begun()  # the prompt until 2.0, then half a second each
    assert not engine.run(max_steps=3) and len(engine.steps) == 3
    assert not engine.run(until_s=3.9) and engine.now_s == pytest.approx(4.0)
    assert [each.request_id for each in engine.unfinished] == [0]
    assert engine.run(max_steps=1000, until_s=1000) and engine.now_s == pytest.approx(6.0) and not engine.unfinished


def test_where_the_only_one_that_may_run_gives_up_its_place_the_engine_pauses():
    """Two requests decode. The younger one is in no step, and keeps the blocks that the older one lacks."""
    shape = replace(SHAPE, num_blocks=5)
    found = run([request(0, 0.0, 8, 8), request(1, 0.0, 8, 8)], Answers(lambda view: ScheduleDecision(token_budget=1)), shape)
    assert found.num_preempted and found.num_pauses
    starts = [step.end_s - step.seconds for step in found.steps]
    gaps = [start - step.end_s for start, step in zip(starts[1:], found.steps, strict=False)]
    assert max(gaps) == pytest.approx(0.1)  # LMDeploy's own pause: no request is held


@pytest.mark.parametrize(
    ("changed", "prompt", "generated", "words"),
    [
        ({"num_blocks": 6}, 20, 6, "up to 7 blocks of 4 tokens"), ({"num_blocks": 6, "decode_round": 3}, 20, 3, "has 6"),
        ({"num_blocks": 4}, 17, 1, "shorter request"), ({"num_blocks": 0}, 1, 1, "num_blocks of an engine is 0"),
        ({}, 0, 1, "at least 1 of each"), ({}, 1, 0, "at least 1 of each"),
    ],
)  # fmt: skip
def test_what_the_pool_cannot_hold_is_refused_at_the_start(changed, prompt, generated, words):
    with pytest.raises(ConfigError, match=words):
        run([request(0, 0.0, 4, 1), request(1, 0.0, prompt, generated)], shape=replace(SHAPE, **changed))


def test_what_just_fits_is_not_refused():
    for shape in (replace(SHAPE, num_blocks=6), replace(SHAPE, num_blocks=6, decode_round=2)):
        assert run([request(0, 0.0, 20, 5 - shape.decode_round)], shape=shape).num_ended == 1
    assert run([request(0, 0.0, 20, 1)], shape=replace(SHAPE, num_blocks=5, decode_round=9)).num_ended == 1


def test_a_request_is_of_one_run():
    used = request(0, 0.0, 8, 2)
    run([used])
    with pytest.raises(ConfigError, match="of another run"):
        run([used])
    with pytest.raises(ConfigError, match="twice"):
        run([request(0, 0.0, 8, 2), request(0, 0.0, 8, 2)])


class OneAtATime(Fifo):
    """Holds the blocks of those that it does not let decode."""

    def decide(self, view):
        return replace(super().decide(view), token_budget=1)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 20), st.integers(0, 59)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(
    # 21 blocks: the longest request, and the last round of decode steps that it begins.
    REQUESTS, st.sampled_from([21, 24, 40, 400]), st.integers(1, 4), st.integers(1, 5), st.booleans(),
    st.sampled_from([None, Fifo, LastFirst, Cuts, OneAtATime]),
)  # fmt: skip
def test_what_holds_for_every_run(rows, num_blocks, decode_round, max_batch, caching, kind):
    shape = EngineShape(4, num_blocks, 50, max_batch, decode_round, caching)

    def begun(strategy):
        requests = [
            request(number, arrival / 4, prompt, generated, cached_tokens=min(cached, prompt - 1) if caching else 0)
            for number, (arrival, prompt, generated, cached) in enumerate(rows)
        ]
        return VirtualEngine(shape, COSTS, requests, strategy, gap_s=0.01)

    def outcome(engine):
        return engine.steps, engine.num_preempted, [each.token_s for each in engine.requests.values()]

    engine = begun(kind and kind())
    assert engine.run(max_steps=100_000)
    assert engine._queues.pool.num_free + sum(engine._queues.pool._cached.values()) == num_blocks
    end_s = 0.0
    for step in engine.steps:  # one after the other
        assert step.end_s - step.seconds >= end_s - 1e-9
        end_s = step.end_s
    done = dict.fromkeys(engine.requests, 0)
    for step in engine.steps:
        for number, tokens in step.computed:
            done[number] += tokens
    for each in engine.requests.values():
        assert len(each.token_s) == each.num_to_generate and each.token_s == sorted(each.token_s)
        assert each.ttft_s > 0 and each.end_s == each.token_s[-1]
        least = each.prompt_tokens + each.num_to_generate - 1 - each.cached_tokens
        assert done[each.request_id] >= least
        if not engine.num_preempted and not each.cached_tokens and decode_round == 1 and kind is not Cuts:
            assert done[each.request_id] == least  # every token once; cut prompts may lose their blocks without preemption
    again = begun(kind and kind())
    assert again.run() and outcome(again) == outcome(engine)
    if kind is None:
        ordered = begun(Fifo())
        assert ordered.run() and outcome(ordered) == outcome(engine)
        if not engine.num_preempted:
            prompts = [number for step in engine.steps if step.phase is Phase.PREFILL for number, _ in step.computed]
            assert prompts == [number for number, _ in sorted(enumerate(rows), key=lambda row: (row[1][0], row[0]))]
