"""How many guesses are asked for: on machines and texts that are laws, and what the wrapped strategy is told."""

import itertools
import math

import numpy as np
import pytest

from sagellm.accel.speculative.acceptance import SUREST, Acceptance
from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome, Verdict
from sagellm.accel.speculative.dynamic import DynamicLookaheadStrategy
from sagellm.accel.speculative.ngram import NgramStrategy
from sagellm.accel.speculative.planning.table import LatencyTable
from sagellm.accel.speculative.registry import find_speculator, make_speculator, speculator_names
from sagellm.accel.speculative.row_times import RowTimes
from sagellm.accel.speculative.tree import DraftTree
from sagellm.core.errors import SpeculationError
from tests.accel.speculative.simulation import (
    TEXT,
    Guesser,
    Shaped,
    Simulation,
    best_fixed,
    between,
    compute_bound,
    memory_bound,
)

WITHIN, NEVER_UNDER = 0.95, 0.97


def dynamic(lookahead=8, **options):
    return DynamicLookaheadStrategy(Guesser(lookahead), **options)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    ("law", "batch", "chance"),
    [
        (memory_bound, 1, 0.0), (memory_bound, 1, 0.4), (memory_bound, 1, 0.95), (memory_bound, 4, 0.6),
        (memory_bound, 16, 0.2), (memory_bound, 16, 0.9), (between, 1, 0.8), (between, 4, 0.0), (between, 4, 0.95),
        (compute_bound, 1, 0.6), (compute_bound, 4, 0.4), (compute_bound, 16, 0.0),
    ],
)  # fmt: skip
def test_near_the_best_fixed_lookahead_and_never_much_worse_than_none(law, batch, chance, noise):
    found = Simulation(dynamic(), law, lambda step, request: chance, batch=batch, noise=noise, seed=1).run(400)
    assert found >= WITHIN * best_fixed(law, chance, batch)
    assert found >= NEVER_UNDER


def test_copied_text_gains_from_the_first_steps_on():
    simulation = Simulation(dynamic(), memory_bound, lambda step, request: 0.95, batch=1, noise=0.1)
    assert simulation.run(30) > 0.6 * best_fixed(memory_bound, 0.95, 1) > 3
    assert simulation.run(30) > 0.9 * best_fixed(memory_bound, 0.95, 1)


@pytest.mark.parametrize(("batch", "law"), [(1, memory_bound), (4, between), (16, memory_bound)])
def test_a_text_that_changes_is_followed(batch, law):
    strategy = dynamic()
    simulation = Simulation(strategy, law, lambda step, _: 0.0 if 300 <= step < 700 else 0.9, batch=batch, noise=0.1)
    good = best_fixed(law, 0.9, batch)
    assert simulation.run(300) > 0.93 * good
    assert simulation.run(400) > 0.95  # what the purse held, four steps, is lost as well
    simulation.run(200)  # a pause may have to end first
    assert simulation.run(200) > 0.9 * good


def test_what_slows_every_step_alike_changes_no_choice():
    simulation = Simulation(dynamic(), memory_bound, lambda step, _: 0.8, batch=4, noise=0.05, slower=0.002)
    assert simulation.run(400) > WITHIN * best_fixed(memory_bound, 0.8, 4)
    assert simulation.strategy.report()["times"]["correction"] > 1.2


def test_silence_asks_nobody_and_pauses_grow():
    strategy = dynamic()
    simulation = Simulation(strategy, between, lambda step, request: 0.0, batch=16)
    simulation.run(600)
    tried = [number for number, extra in enumerate(simulation.choices) if extra]
    gaps = np.diff([number for number in tried if number > 20])
    assert len(tried) < 40 and gaps.max() >= 32 and max(simulation.choices[100:]) <= 4
    steps = strategy.report()["steps"]
    assert steps["silent"] > 500 and sum(steps.values()) == 600 and strategy.wrapped.num_asked < 100
    accepts = [told for told in strategy.wrapped.told if told[0] == "accept"]
    assert strategy.lookahead == 0  # so the engine does not even ask
    assert len(accepts) == 600 * 16  # nothing is kept from the wrapped one


class Counting(Guesser):
    """Notes how much of each request it knew when it was asked, and when the request ended."""

    def __init__(self):
        super().__init__()
        self.known, self.at = {}, []

    def accept(self, request_id, tokens):
        super().accept(request_id, tokens)
        self.known[request_id] = self.known.get(request_id, 0) + len(tokens)

    def end(self, request_id):
        self.at.append((request_id, self.known[request_id]))

    def propose(self, asks):
        self.at += [(ask.request_id, self.known.get(ask.request_id, 0)) for ask in asks]
        return super().propose(asks)


class Joining(Counting):
    joins = True


def test_in_a_pause_it_is_quiet_if_the_wrapped_one_joins():
    """The choices are the same if steps are told late. The wrapped strategy knows as many tokens whenever it is asked."""
    found = []
    for kind, is_late in ((Counting, False), (Counting, True), (Joining, False), (Joining, True)):
        strategy = DynamicLookaheadStrategy(kind())
        simulation = Simulation(
            strategy, between, lambda step, _: 0.0 if step < 500 else 0.9, batch=16, noise=0.1, is_late=is_late
        )
        simulation.run(700)
        num_told = sum(told[0] == "accept" for told in strategy.wrapped.told)
        found.append((simulation.choices, strategy.wrapped.at, strategy.report(), num_told))
    assert found[0][:3] == found[1][:3] == found[2][:3] == found[3][:3] and sum(map(bool, found[0][0])) > 60
    assert found[0][3] == found[1][3] == found[2][3] > 2 * found[3][3]


@pytest.mark.parametrize("law", [memory_bound, between, compute_bound])
def test_what_a_step_costs_is_learned_from_the_latest_of_many(law):
    """Times of steps may be learned at once, after a pause, or one by one. Both ways agree on steps without guesses, and nearly
    on other steps."""
    draw = np.random.default_rng(0)
    at_once, one_by_one = RowTimes(), RowTimes()
    steps = [(16, 16 + extra) for _ in range(20) for extra in (0, 0, 2, 8)] + [(16, 16)] * 200
    for num_sequences, num_rows in steps:
        seconds = law(num_rows) * float(np.exp(0.05 * draw.standard_normal()))
        for times in (at_once, one_by_one):
            times.add(num_sequences, num_rows, seconds)
        one_by_one.knows(num_sequences)
        if num_rows > 16:
            at_once.knows(num_sequences)
    for times in (at_once, one_by_one):
        assert times.plain(16) == pytest.approx(law(16), rel=0.05) and times.num_steps == len(steps)
    assert at_once.curve(16, 8) == pytest.approx([law(16 + extra) for extra in range(9)], rel=0.1)
    assert one_by_one.curve(16, 8) == pytest.approx(at_once.curve(16, 8), rel=0.1)


def test_the_choice_is_the_best_of_all():
    """The choice gives each guess in turn to the request that gains most by it. No other way to share guesses out is faster."""
    strategy = dynamic(lookahead=3)
    simulation = Simulation(strategy, between, lambda step, request: (0.9, 0.5, 0.05)[request % 3], batch=3, answer=10_000)
    simulation.run(60)
    times, acceptance = strategy.times, strategy.acceptance
    acceptance.filled = 1.0
    strategy._vary_at = math.inf  # so that nothing is tried out
    asks = [Ask(request, TEXT, 3, TEXT) for request in range(3)]
    counts = strategy._best(asks, 3, times.plain(3))
    common, scales = acceptance.by_place(), acceptance.scales(range(3), strategy._step)
    curve = times.curve(3, 9)

    def speed(shared):
        chances = [[min(chance * scale, SUREST) for chance in common] for scale in scales]
        tokens = 3 + sum(
            math.prod(of[: place + 1]) for of, count in zip(chances, shared, strict=True) for place in range(count)
        )
        return tokens / (curve[sum(shared)] + strategy._ask_s * sum(map(bool, shared)))

    best = max(speed(shared) for shared in itertools.product(range(4), repeat=3))
    assert speed(counts) == pytest.approx(best, rel=1e-9) and sum(counts) > 0


def test_a_request_whose_guesses_fail_gets_fewer():
    simulation = Simulation(
        dynamic(), memory_bound, lambda step, request: 0.95 if request % 2 else 0.0, batch=4, answer=500, seed=3
    )
    simulation.run(300)
    bad = sum(count for request, count in simulation.drafted.items() if request % 2 == 0)
    good = sum(count for request, count in simulation.drafted.items() if request % 2)
    assert good > 5 * bad > 0


def test_equal_outcomes_give_equal_choices():
    runs = [Simulation(dynamic(), memory_bound, lambda s, r: 0.7, batch=4, noise=0.2, seed=5) for _ in range(2)]
    for simulation in runs:
        simulation.run(200)
    assert runs[0].choices == runs[1].choices and any(runs[0].choices)
    assert runs[0].strategy.report() == runs[1].strategy.report()


def table_of(law, factor=1.0):
    batches, lookaheads = (1, 4, 16), (0, 1, 2, 4, 8)
    seconds = tuple(tuple(factor * law(batch * (k + 1)) for k in lookaheads) for batch in batches)
    return LatencyTable(batches, lookaheads, seconds, ((9,) * 5,) * 3, 256.0, {})


def test_a_table_spares_the_ramp_and_is_corrected(tmp_path):
    file = tmp_path / "table.json"
    table_of(memory_bound, factor=0.5).write(file)  # measured on a day when all went twice as fast
    strategy = dynamic(table=file)
    simulation = Simulation(strategy, memory_bound, lambda step, request: 0.9, batch=4)
    assert simulation.run(400) > WITHIN * best_fixed(memory_bound, 0.9, 4)
    times = strategy.report()["times"]
    assert times["from_table"] and 1.9 < times["correction"] < 2.1
    table_of(compute_bound).write(file)
    careful = Simulation(dynamic(table=file), compute_bound, lambda step, request: 0.5, batch=4)
    assert careful.run(30) > 0.97 and max(careful.choices) <= 2


LIKELY, UNCERTAIN = (0.9, 0.02), (0.45, 0.4)  # chances of the first and the second token of a place


@pytest.mark.parametrize(
    ("law", "chance", "batch", "shape"),
    [
        (memory_bound, UNCERTAIN, 1, "tree"), (memory_bound, UNCERTAIN, 4, "tree"), (memory_bound, LIKELY, 1, "chain"),
        (memory_bound, LIKELY, 4, "chain"), (between, LIKELY, 1, "chain"), (between, LIKELY, 4, None),
        (compute_bound, UNCERTAIN, 4, None),
    ],
)  # fmt: skip
def test_the_shape_of_most_tokens_a_second_is_chosen(law, chance, batch, shape):
    """A tree where two tokens are about as likely; a list where one is, and a row for another one is dear."""
    strategy = DynamicLookaheadStrategy(Shaped(8))
    simulation = Simulation(strategy, law, lambda step, request: chance, batch=batch, noise=0.05, seed=2)
    simulation.run(200)
    before = strategy.report()["shapes"]
    found = simulation.run(400)
    best = max(best_fixed(law, chance, batch, is_tree=is_tree) for is_tree in (False, True))
    assert found >= WITHIN * best
    shapes = {name: count - before[name] for name, count in strategy.report()["shapes"].items()}
    if shape is not None:
        assert shapes[shape] > 0.9 * sum(shapes.values()) > 200


def test_a_text_that_becomes_uncertain_gets_another_shape():
    strategy = DynamicLookaheadStrategy(Shaped(8))
    simulation = Simulation(strategy, memory_bound, lambda step, _: LIKELY if step < 400 else UNCERTAIN, batch=2, noise=0.05)
    simulation.run(400)
    before = strategy.report()["shapes"]
    simulation.run(200)
    assert simulation.run(400) >= 0.9 * best_fixed(memory_bound, UNCERTAIN, 2, is_tree=True)
    after = strategy.report()["shapes"]
    assert before["chain"] > 5 * before["tree"] and after["tree"] - before["tree"] > 4 * (after["chain"] - before["chain"])


def test_no_tree_is_wanted_where_the_device_computes_none():
    strategy = DynamicLookaheadStrategy(Shaped(8))
    simulation = Simulation(strategy, memory_bound, lambda step, request: UNCERTAIN, batch=2)
    simulation.run(100)
    assert strategy.report()["shapes"]["tree"] > 50
    asks = [Ask(request, TEXT, 8, TEXT, False) for request in range(2)]
    drafts = [strategy.propose(asks) for _ in range(20)]
    assert not any(isinstance(draft, DraftTree) for each in drafts for draft in each) and any(map(any, drafts))


def test_limits_of_each_ask_are_kept():
    strategy = dynamic()
    simulation = Simulation(strategy, memory_bound, lambda step, request: 0.9, batch=4)
    simulation.run(50)
    asks = [Ask(request, TEXT, limit, TEXT) for request, limit in zip(range(4), (1, 8, 2, 3), strict=True)]
    sizes = [len(guesses) for guesses in strategy.propose(asks)]
    assert all(size <= ask.limit for size, ask in zip(sizes, asks, strict=True)) and sizes[1] > 3


def test_times_that_are_none_change_nothing():
    strategy = dynamic()
    simulation = Simulation(strategy, memory_bound, lambda step, request: 0.9, batch=1)
    simulation.run(50)
    before = strategy.report()["times"]
    for seconds in (0.0, -1.0, math.nan, math.inf):
        strategy.step_done(StepOutcome((Verdict(1, 0, 0),), 1, 0, seconds, 0.0))
    strategy.step_done(StepOutcome((), 0, 0, 1.0, 0.0))
    assert strategy.report()["times"] == before
    assert math.isfinite(strategy.report()["purse_s"])


def test_by_name_with_options_of_both():
    strategy = make_speculator("dynamic:ngram", options={"max_n": 3}, lookahead=5, budget=0.02)
    assert type(strategy.wrapped) is NgramStrategy and strategy.wrapped.max_n == 3 and strategy.wrapped.lookahead == 5
    assert strategy.lookahead == 5 and strategy.budget == 0.02 and "dynamic" in speculator_names()
    assert make_speculator("Dynamic:prompt-lookup").lookahead == 8
    assert make_speculator("dynamic:ngram", options={"lookahead": 3}).lookahead == 3
    assert find_speculator("dynamic:ngram") is DynamicLookaheadStrategy
    own = make_speculator(f"dynamic:{__name__}:Guesser")
    assert isinstance(own.wrapped, Guesser) and own.report()["strategy"] == "guesser"
    assert DynamicLookaheadStrategy(Guesser(3)).lookahead == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dynamic:", {}, "names no strategy"), ("dynamic:nothing", {}, "known are: chain, draft"),
        ("dynamic:ngram", {"strategy": "ngram"}, "name it in one place"), ("dynamic:dynamic", {}, "the strategy that guesses"),
        ("dynamic:dynamic:ngram", {}, "the strategy that guesses"), ("dynamic:ngram", {"lookahead": 0}, "from 1 to 64"),
        ("dynamic:ngram", {"budget": 0}, "above 0 and below 1"), ("dynamic:ngram", {"options": {"max_n": 0}}, "max_n=0"),
        ("dynamic:ngram", {"options": 3}, "by name"), ("dynamic:ngram", {"size": 3}, "cannot be built"),
        ("dynamic:ngram", {"table": "/nowhere/table"}, "profile"),
    ],
)  # fmt: skip
def test_bad_options(name, options, message):
    with pytest.raises(SpeculationError, match=message):
        make_speculator(name, **options)


def test_a_strategy_that_is_built_takes_no_options():
    with pytest.raises(SpeculationError, match="give its name instead"):
        DynamicLookaheadStrategy(Guesser(), {"lookahead": 2})
    with pytest.raises(SpeculationError, match="SpeculativeStrategy"):
        DynamicLookaheadStrategy(3)


def test_a_fault_of_the_wrapped_one_is_no_fault_in_the_books():
    class Faulty(Guesser):
        def propose(self, asks):
            if len(asks) > 1:
                raise RuntimeError("too many")
            return super().propose(asks)

    strategy: SpeculativeStrategy = DynamicLookaheadStrategy(Faulty(4))
    asks = [Ask(request, TEXT, 4, TEXT) for request in range(2)]
    for _ in range(4):
        strategy.step_done(StepOutcome((Verdict(0, 0, 0), Verdict(1, 0, 0)), 2, 0, 0.01, 0.0))
    with pytest.raises(RuntimeError):
        strategy.propose(asks)
    sizes = [len(strategy.propose([ask])[0]) for ask in asks]  # as the engine does then
    verdicts = tuple(Verdict(request, size, 0) for request, size in enumerate(sizes))
    strategy.step_done(StepOutcome(verdicts, 2 + sum(sizes), 0, 0.01, 0.0))
    assert sum(sizes) > 1 and strategy.report()["acceptance"]["requests"] == 2
    strategy.end(0), strategy.end(1), strategy.end(7)
    assert strategy.report()["acceptance"]["requests"] == 0


def test_shares_of_a_tree_are_those_of_its_guesses():
    """The third guess is right as often as the second is wrong: a chain would count it as never reached."""
    acceptance = Acceptance(4)
    for step in range(400):
        path = (0, 1) if step % 4 else (0, 2)
        acceptance.add(1, 4, 4, 2, step, path)
    shares = np.cumprod(acceptance.by_place())
    assert shares[0] == pytest.approx(1, abs=0.02) and shares[1] == pytest.approx(0.75, abs=0.05)
    assert shares[2] == pytest.approx(0.25, abs=0.05) and shares[3] < 0.05
    assert acceptance.scales([1, 2], 400) == [pytest.approx(1, abs=0.05), 1.0]
