"""Tests of turns of models that share an engine: each decodes alone, quotas share what is owed, and no request waits long."""

from itertools import groupby

import pytest

from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, RequestView, StepResult
from sagellm.scheduler_ir.strategies.aegaeon import Aegaeon, quotas
from tests.scheduler_ir.made import view
from tests.scheduler_ir.strategies.loads import request, run


class Recorded(Aegaeon):
    """Remembers who was let decode."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches, self.groups, self.adapters = [], [], {}

    def decide(self, view):
        self.adapters.update((request.request_id, request.adapter) for request in view.requests)
        return super().decide(view)

    def on_step_end(self, result):
        super().on_step_end(result)
        names = [name for name, _ in result.computed]
        (self.batches if result.phase is Phase.DECODE else self.groups).append(names)


def pooled(strategy, num_models=3, each=4, output=60):
    requests = [
        request(10 * model + number, 0.01 * number, 60, output, adapter=f"model-{model}")
        for model in range(num_models) for number in range(each)
    ]  # fmt: skip
    return requests, run(strategy, requests)


def test_models_decode_in_turns_and_prompts_come_by_group():
    strategy = Recorded()
    requests, _ = pooled(strategy)
    for batch in (*strategy.batches, *strategy.groups):
        assert len({strategy.adapters[name] for name in batch}) == 1
    assert len({strategy.adapters[name] for batch in strategy.batches for name in batch}) == 3
    assert max(map(len, strategy.batches)) == 4 and strategy.report()["turns"] >= 6
    assert all(max(each.gaps_s) < 3 * 2.5 for each in requests)  # a round: two other turns of 2 s at most, prompts and its own


def test_a_tighter_target_gets_a_longer_share():
    strategy = Recorded(switch_s=0.2)
    tight = [request(number, 0.0, 60, 400, adapter="tight", tpot_s=0.06) for number in range(4)]
    loose = [request(10 + number, 0.0, 60, 400, adapter="loose", tpot_s=0.12) for number in range(4)]
    run(strategy, [*tight, *loose], until_s=12)
    turns = [len(list(turn)) for _, turn in groupby(strategy.batches, lambda batch: strategy.adapters[batch[0]])]
    longer, shorter = sorted(turns[2:4], reverse=True)  # the first round does not know yet what steps take
    assert len(turns) >= 5 and longer > 30 and 1.8 < longer / shorter < 2.2


def test_quotas_give_each_the_same_share_of_what_is_owed():
    token_s, tpot_s, switch_s = [0.02, 0.03, 0.05], [0.1, 0.15, 0.4], 0.3
    turns = quotas(token_s, tpot_s, switch_s, 2.0)
    round_s = sum(turns) + switch_s
    shares = [turn / token * tpot / round_s for turn, token, tpot in zip(turns, token_s, tpot_s, strict=True)]
    assert shares == pytest.approx([shares[0]] * 3) and shares[0] >= 1 / 1.0 - 0.2
    assert 0 < max(turns) <= 2.0 + 1e-9
    crowded = quotas([0.05] * 4, [0.1] * 4, 0.4, 2.0)  # twice too much: turns as long as they may be
    assert crowded == pytest.approx([2.0] * 4)
    assert quotas([0.05] * 4, [0.1] * 4, 0.0, 2.0) == [0.0] * 4


def test_with_one_model_all_decode_together_and_more_than_a_batch_in_turns():
    strategy = Recorded()
    run(strategy, [request(number, 0.0, 60, 30) for number in range(6)])
    assert {len(batch) for batch in strategy.batches} == {6}
    strategy = Recorded(batch_size=2)
    requests = [request(number, 0.0, 60, 30) for number in range(6)]
    run(strategy, requests)
    assert {len(batch) for batch in strategy.batches} == {2}
    assert all(0.3 < max(each.gaps_s) < 1.5 for each in requests)  # two other turns of eight steps
    ends = [each.end_s for each in requests]
    assert max(ends) < 1.6 * min(ends)  # round robin: they come to their end together


def test_a_group_of_prompts_is_no_longer_than_it_may_be():
    strategy = Recorded(group_size=3)
    requests = [request(number, 0.0, 60, 5) for number in range(10)]
    run(strategy, requests)
    assert {len(group) for group in strategy.groups} <= {1, 2, 3} and len(strategy.groups[0]) == 3


@pytest.mark.parametrize("option", [{"batch_size": 0}, {"max_turn_s": 31}, {"switch_s": -1}, {"group_size": 1.5}])
def test_options_that_make_no_sense(option):
    with pytest.raises(PlanError, match=f"strategy aegaeon: option {next(iter(option))}"):
        Aegaeon(**option)


def row(name, adapter, phase=Phase.DECODE):
    return RequestView(name, phase, 60, 59, 5, 4, 0.01 * name, adapter, max_new_tokens=500)


def asked(strategy, *requests, in_flight=0):
    return strategy.decide(view(*requests, free_blocks=1000, max_batch_size=8, num_in_flight=in_flight, now_s=10.0))


def test_a_turn_is_counted_in_steps_that_were_done():
    strategy = Aegaeon()
    rows = row(1, "a"), row(2, "b")
    for _ in range(500):  # asked again and again, while nothing is done
        assert asked(strategy, *rows).hold == {2}
    for _ in range(500):
        strategy.on_step_end(StepResult(0, Phase.DECODE, 1, 1, 10.0, 0.02, computed=((2, 1),)))
        assert asked(strategy, *rows).hold == {2}
    for _ in range(500):
        strategy.on_step_end(StepResult(0, Phase.DECODE, 1, 1, 10.0, 0.02, computed=((1, 1),)))
    assert asked(strategy, *rows).hold == {1}


def test_a_turn_that_is_on_the_device_lets_nobody_else_begin():
    strategy = Aegaeon()
    asked(strategy, row(1, "a"), row(2, "b"))
    waits = row(3, "b", Phase.PREFILL)
    for rows in ((row(2, "b"), waits), (waits,)):
        decision = asked(strategy, *rows, in_flight=1)
        assert decision.phase is Phase.DECODE and decision.hold == {each.request_id for each in rows}
    strategy.on_request_end(1)  # the last of the turn: it is over
    assert asked(strategy, waits, in_flight=1).phase is Phase.PREFILL


def test_seconds_of_prompts_are_part_of_the_round():
    def first_turn(prompt_s):
        strategy = Aegaeon(max_turn_s=30.0)
        rows = row(1, "a"), row(2, "b")
        for number in range(40):
            strategy.on_step_end(StepResult(0, Phase.PREFILL, 1, 100, 10.0, prompt_s, computed=((1, 100),)))
            for name in (1 + number % 2,) * 400:
                strategy.on_step_end(StepResult(0, Phase.DECODE, 1, 1, 10.0, 0.02, computed=((name, 1),)))
            asked(strategy, *rows)
        return strategy._turn.left_tokens

    assert first_turn(1.0) > 3 * first_turn(0.01)
