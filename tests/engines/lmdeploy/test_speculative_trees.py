"""Trees of guesses in the engine: the answers are those without guesses, and engines without trees take a chain."""

import pytest

from sagellm.accel.speculative.dynamic import DynamicLookaheadStrategy
from sagellm.accel.speculative.tree import DraftTree
from sagellm.engines.lmdeploy.cpu.device import CpuDevice
from tests.engines.lmdeploy.guesses import (
    CROWD,
    KNOWING_TREES,
    NEW,
    Knowing,
    KnowingTrees,
    ask,
    counts,
    tell,
    tokens_of,
)
from tests.pool import check_pool
from tests.reference import make_prompts
from tests.sweeps import slow_but


@pytest.fixture
def planted(monkeypatch):
    """Numbers of trees in each step that computes some."""
    from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner

    steps, plant = [], CpuRunner.plant

    def noting(self, drafts):
        if drafts is not None:
            steps.append(sum(isinstance(draft, DraftTree) for draft in drafts))
        plant(self, drafts)

    monkeypatch.setattr(CpuRunner, "plant", noting)
    return steps


@pytest.mark.parametrize(
    ("model", "blocks", "decode_round"),
    slow_but([("llama", 30, 1), ("llama", 30, 5), ("llama", 200, 3), ("qwen2-window", 60, 1)], ("llama", 30, 5)),
)
def test_greedy_equals_transformers(start_engine, reference, planted, model, blocks, decode_round):
    """Under pressure, in rounds, with prefixes from the cache, whose keys were moved."""
    expected = reference(CROWD, NEW, model)
    tell(CROWD, expected)
    engine = start_engine(model=model, kv_blocks=blocks, decode_round=decode_round, speculative=KNOWING_TREES)
    for _ in range(2):
        assert tokens_of(ask(engine, CROWD)) == expected
    longer = [[*prompt, *answer] for prompt, answer in zip(CROWD, expected, strict=True)]
    tell([], [])
    assert tokens_of(ask(engine, longer)) == reference(longer, NEW, model)
    check_pool(engine)
    report = counts(engine)
    assert planted and max(planted) > 1
    assert report["tokens_per_step"] > 1.1 and sum(report["accepted_at"][2:]) > 0


def test_bfloat16_answers_are_those_without_guesses(start_engine, planted):
    """To the bit: a token of a tree gets the numbers of its path alone."""
    prompts = make_prompts((40, 100, 33, 290))
    expected = tokens_of(ask(start_engine(dtype="bfloat16"), prompts))
    tell(prompts, expected)
    engine = start_engine(dtype="bfloat16", speculative=KNOWING_TREES)
    assert tokens_of(ask(engine, prompts)) == expected
    assert planted and counts(engine)["accepted"] > 10


@pytest.mark.parametrize("settings", [{"kv_schema": "int8"}, {"tensor_parallel": 2}, {}], ids=str)
def test_engines_that_compute_no_trees_take_the_best_chain(start_engine, planted, monkeypatch, settings):
    """Keys of few bits, several workers, and a device whose decode steps have one token of a sequence."""
    if not settings:
        monkeypatch.setattr(CpuDevice, "decodes_ragged", False)
    prompts = make_prompts((40, 100, 33))
    expected = tokens_of(ask(start_engine(**settings), prompts))
    engine = start_engine(speculative="suffix", speculative_options={"tree": True, "lookahead": 16}, **settings)
    for _ in range(2):
        assert tokens_of(ask(engine, prompts)) == expected
    assert not planted and counts(engine)["accepted"] > 0


def test_a_suffix_tree_learns_from_answers(start_engine, reference, planted):
    prompts = make_prompts((40, 60, 33))
    expected = reference(prompts, NEW)
    engine = start_engine(speculative="dynamic:suffix", speculative_options={"options": {"tree": True, "lookahead": 16}})
    for _ in range(3):
        assert tokens_of(ask(engine, prompts)) == expected
    engine = start_engine(speculative="suffix", speculative_options={"tree": True, "lookahead": 16})
    for _ in range(2):
        assert tokens_of(ask(engine, prompts)) == expected
    assert planted and counts(engine)["accepted"] > 10


class Either(KnowingTrees):
    """Chains or trees, as asked."""

    takes_shape = True

    def one(self, ask):
        return super().one(ask) if ask.tree else Knowing.one(self, ask)


class Clocked(DynamicLookaheadStrategy):
    """Takes steps to last as on a machine where a row is cheap, so that its choices do not depend on this one."""

    name = "clocked"

    def __init__(self):
        super().__init__(Either())

    def step_done(self, outcome):
        super().step_done(outcome._replace(step_s=0.01 + 3e-4 * outcome.num_rows, propose_s=0.0))


@pytest.mark.parametrize("settings", [{}, {"decode_round": 5}, {"kv_schema": "int8"}], ids=str)
def test_chains_and_trees_of_one_strategy(start_engine, planted, settings):
    """The dynamic strategy wants either; no tree where the device computes none."""
    expected = tokens_of(ask(start_engine(kv_blocks=200, **settings), CROWD))
    tell(CROWD, expected)
    engine = start_engine(kv_blocks=200, speculative="tests.engines.lmdeploy.test_speculative_trees:Clocked", **settings)
    for _ in range(3):
        assert tokens_of(ask(engine, CROWD)) == expected
    report = counts(engine)
    shapes = report["own"]["shapes"]
    assert report["trees"] == sum(planted) and report["accepted"] > 10 and report["guessed"] > report["trees"]
    assert shapes["chain"] > 0 and bool(shapes["tree"]) == bool(planted) == ("kv_schema" not in settings)


class LongTrees(KnowingTrees):
    """More guesses than it was asked for."""

    def one(self, ask):
        return DraftTree([5] * (ask.limit + 1), [-1] * (ask.limit + 1))


def test_a_tree_that_is_too_large_is_a_fault(start_engine, reference):
    prompts = make_prompts((40,))
    expected = reference(prompts, NEW)
    tell(prompts, expected)
    engine = start_engine(speculative="tests.engines.lmdeploy.test_speculative_trees:LongTrees")
    assert tokens_of(ask(engine, prompts)) == expected
    assert "more than 10 tokens for a sequence" in counts(engine, faults=1)["first_fault"]
