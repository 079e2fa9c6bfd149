"""Tables of step times: what lies between, what is refused, which setting follows, and a sweep on a made-up engine."""

import json

import numpy as np
import pytest

from sagellm.accel.speculative.base import Ask, StepOutcome, Verdict
from sagellm.accel.speculative.planning.probe import WARM_UP, ProbeStrategy
from sagellm.accel.speculative.planning.profile import PROBE, machine_facts, profile
from sagellm.accel.speculative.planning.recommend import recommend, tokens_of_step
from sagellm.accel.speculative.planning.table import LatencyTable, read_table
from sagellm.accel.speculative.registry import find_speculator
from sagellm.core.errors import SpeculationError

TEXT = np.zeros(1, np.int64)
TABLE = LatencyTable(
    (1, 4), (0, 2, 4), ((0.010, 0.012, 0.016), (0.020, 0.030, 0.050)), ((5, 5, 5), (5, 5, 5)), 100.0, {"model": "none"}
)


def test_between_and_beyond():
    for batch, row in zip(TABLE.batches, TABLE.seconds, strict=True):
        assert [TABLE.step_s(batch, k) for k in TABLE.lookaheads] == pytest.approx(row)
    assert TABLE.step_s(1, 3) == pytest.approx(0.014)
    assert TABLE.step_s(2.5, 2) == pytest.approx(0.021)
    assert TABLE.step_s(2.5, 3) == pytest.approx((0.014 + 0.040) / 2)
    assert TABLE.step_s(4, 6) == pytest.approx(0.070) and TABLE.step_s(7, 0) == pytest.approx(0.030)
    assert TABLE.step_s(4, np.array([0, 1, 6])) == pytest.approx([0.020, 0.025, 0.070])
    assert TABLE.is_measured(2, 3) and not TABLE.is_measured(5, 3) and not TABLE.is_measured(2, 5)
    falling = TABLE._replace(seconds=((0.010, 0.009, 0.004), (0.010, 0.009, 0.004)))
    assert falling.step_s(1, 60) == 0.002  # never nothing
    alone = LatencyTable((2,), (0,), ((0.01,),), ((1,),), 1.0, {})
    assert alone.step_s(9, 5) == 0.01


def test_a_file_comes_back_as_it_was(tmp_path):
    file = tmp_path / "table.json"
    TABLE.write(file)
    assert read_table(file) == TABLE and [path.name for path in tmp_path.iterdir()] == ["table.json"]
    with pytest.raises(SpeculationError, match="name a file that can be written"):
        TABLE.write(tmp_path / "missing" / "table.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "else"}, "is no table"), ({"version": 2}, "version 2, this is 1"), ({"batches": [4, 1]}, "ascending"),
        ({"batches": []}, "ascending"), ({"batches": [True, 4]}, "ascending"), ({"batches": [0, 4]}, "from 1"),
        ({"lookaheads": [1, 2, 4]}, "without guesses"), ({"seconds": [[1, 2, 3]]}, "2 by 3"),
        ({"seconds": [[1, 2, 3], [1, 2]]}, "2 by 3"), ({"seconds": [[1, 2, 3], [1, 2, 0]]}, "no times"),
        ({"seconds": [[1, 2, 3], [1, 2, float("nan")]]}, "no times"), ({"num_samples": None}, "num_samples"),
        ({"context": "long"}, "context"), ({"facts": []}, "facts"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, change, message):
    file = tmp_path / "table.json"
    file.write_text(json.dumps({**TABLE.to_dict(), **change}))
    with pytest.raises(SpeculationError, match=message) as caught:
        read_table(file)
    assert "sagellm speculative profile" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "3"])
def test_files_that_are_something_else(tmp_path, text):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(SpeculationError, match="measure it anew"):
        read_table(file)
    with pytest.raises(SpeculationError, match="cannot read"):
        read_table(tmp_path)


def test_the_best_setting_for_a_rate_and_a_target():
    assert tokens_of_step(0.5, 2) == 1.75 and tokens_of_step(1.0, 4) == 5 and tokens_of_step(0.0, 4) == 1
    one = recommend(TABLE, 0.9, batch=1)
    assert one.lookahead == 4 and one.token_s == pytest.approx(0.016 / tokens_of_step(0.9, 4))
    assert one.tokens_per_s == pytest.approx(1 / one.token_s) and one.speedup == pytest.approx(0.010 / one.token_s)
    assert recommend(TABLE, 0.0, batch=1).lookahead == 0
    assert recommend(TABLE, 0.5, batch=1).lookahead == 2
    free = recommend(TABLE, 0.0)
    assert (free.batch, free.lookahead, free.tokens_per_s) == (4, 0, pytest.approx(200))
    tight = recommend(TABLE, 0.0, target_s=0.015)
    assert (tight.batch, tight.meets_target) == (1, True)
    none = recommend(TABLE, 0.5, target_s=0.001)
    assert not none.meets_target and none.token_s == min(recommend(TABLE, 0.5, batch=b).token_s for b in TABLE.batches)
    assert recommend(TABLE, 0.5, batch=9).is_extrapolated and not one.is_extrapolated
    for bad in ({"acceptance": 1.1}, {"acceptance": 0.5, "target_s": 0}, {"acceptance": 0.5, "batch": 0}):
        with pytest.raises(SpeculationError, match="give"):
            recommend(TABLE, **bad)


class MadeUpEngine:
    """Steps of a law; the first ones of each kind are slow. `room`: sequences that fit."""

    def __init__(self, strategy, room=16):
        self.strategy, self.room, self.slow = strategy, room, {}

    def generate(self, prompts, num_tokens):
        batch = min(len(prompts), self.room)
        for step in range(num_tokens):
            asks = [Ask(request, TEXT, min(8, max(1, num_tokens - step)), TEXT) for request in range(batch)]
            counts = [len(guesses) for guesses in self.strategy.propose(asks)]
            rows = batch + sum(counts)
            seen = self.slow[batch, rows] = self.slow.get((batch, rows), 0) + 1
            verdicts = tuple(Verdict(request, count, 0) for request, count in enumerate(counts))
            seconds = 1e-3 * rows + (1.0 if seen <= WARM_UP else 0.0)
            self.strategy.step_done(StepOutcome(verdicts, rows, 50 * batch, seconds, 0.0))


def test_a_sweep():
    strategy = find_speculator(PROBE)(lookaheads=[0, 1, 4])
    engine = MadeUpEngine(strategy)
    table = profile(
        engine.generate, strategy.report, batches=(4, 1), lookaheads=(4, 1), vocab_size=100, steps=3, facts=machine_facts()
    )
    assert (table.batches, table.lookaheads, table.context) == ((1, 4), (0, 1, 4), 50)
    assert table.seconds == tuple(tuple(1e-3 * b * (k + 1) for k in (0, 1, 4)) for b in (1, 4))
    assert all(count >= 3 for row in table.num_samples for count in row)
    assert table.facts["cores"] >= 1 and table.facts["versions"]["numpy"] == np.__version__


def test_a_sweep_that_the_engine_has_no_room_for():
    strategy = ProbeStrategy([0, 2])
    with pytest.raises(SpeculationError, match="no step of 4 sequences with 0 guesses"):
        profile(MadeUpEngine(strategy, room=2).generate, strategy.report, batches=(4,), lookaheads=(2,), vocab_size=9, steps=2)


@pytest.mark.parametrize("lookaheads", [[], [-1], [65], [1.5]])
def test_lookaheads_that_cannot_be_measured(lookaheads):
    with pytest.raises(SpeculationError, match="whole numbers from 0 to 64"):
        ProbeStrategy(lookaheads)
