"""Trees of guesses in the engine: the answers are those without guesses, and engines without trees take a chain."""

import pytest

from sagellm.accel.speculative.tree import DraftTree
from sagellm.engines.lmdeploy.cpu.device import CpuDevice
from tests.engines.lmdeploy.guesses import CROWD, KNOWING_TREES, NEW, KnowingTrees, ask, counts, tell, tokens_of
from tests.pool import check_pool
from tests.reference import make_prompts


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


@pytest.mark.parametrize(("model", "blocks", "decode_round"), [
    ("llama", 30, 1), ("llama", 30, 5), ("llama", 200, 3), ("qwen2-window", 60, 1),
])  # fmt: skip
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
