"""Strategies with a model of their own are held against the same rules, and engines with them."""

import json
from typing import ClassVar

import pytest
from click.testing import CliRunner

from sagellm.accel.speculative.contract.exactness import Guesser
from sagellm.accel.speculative.contract.rules import ENGINE_RULES, RULES, check_engine, check_speculator
from sagellm.accel.speculative.draft_model import DraftModelStrategy
from sagellm.accel.speculative.registry import make_speculator
from sagellm.cli.kinds import check
from sagellm.demo_model.random_model import write_random_model
from tests.accel.speculative.contract.bad_drafts import BAD, MODEL
from tests.accel.speculative.contract.test_contract import (
    FirstUnverified,
    LeavesRejectedKeys,
    LeavesRejectedKeysOfAStep,
)
from tests.conftest import SHAPE
from tests.contract import broken

HERE = "tests.accel.speculative.contract.test_draft_models:"


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    shape = SHAPE | {"hidden_size": 32, "num_layers": 1}
    return write_random_model(tmp_path_factory.mktemp("draft"), **shape, seed=5)


@pytest.mark.parametrize(("name", "options"), [
    ("draft", {"model": MODEL}),
    ("draft", {"model": MODEL, "lookahead": 9, "step_tokens": 24, "min_probability": 0.3}),
    ("dynamic:draft", {"options": {"model": MODEL}}),
])  # fmt: skip
def test_good_ones(name, options):
    report = check_speculator(lambda **tried: make_speculator(name, **{**options, **tried}), rounds=1)
    assert report.passed and [result.rule for result in report.results] == list(RULES), report


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
def test_each_fault_in_the_use_of_a_model_is_caught(kind):
    found = broken(check_speculator(kind, rounds=1, only=("crowd",)))
    assert set(found) == {"models"} and BAD[kind] in found["models"], found


class Counted(DraftModelStrategy):
    """Keeps the guesses of every run, and how many of them were right."""

    runs: ClassVar[list[list[int]]] = []

    def bind(self, target):
        super().bind(target)
        self.runs.append([0, 0])

    def step_done(self, outcome):
        self.runs[-1][0] += sum(verdict.num_drafted for verdict in outcome.verdicts)
        self.runs[-1][1] += sum(verdict.num_accepted for verdict in outcome.verdicts)


def guesser(draft, kind="draft"):
    return Guesser(kind, {"model": str(draft)}, (draft,))


@pytest.mark.slow
def test_an_engine_in_which_guesses_are_wrong_right_and_both(trial, draft):
    Counted.runs.clear()
    report = check_engine(trial, guesser(draft, HERE + "Counted"), only=("greedy answers", "answers in bfloat16"))
    assert not broken(report), report
    shares = [accepted / drafted for drafted, accepted in Counted.runs]
    wrong, wrong_drawn, right, both, in_bfloat16 = shares
    assert min(drafted for drafted, _ in Counted.runs) > 100
    assert max(wrong, wrong_drawn, in_bfloat16) < 0.1 and right == 1 and 0.2 < both < 0.8, shares


@pytest.mark.parametrize(("module", "name", "fault", "says"), [
    ("accel.speculative.base", "SpeculativeStrategy.verifier", FirstUnverified(), "with draft, 1 decode steps a round"),
    ("engines.lmdeploy.speculative.factory", "SpecAgentStrategy", LeavesRejectedKeys, "with draft, 4 decode steps a round"),
    ("engines.lmdeploy.speculative.factory", "Speculator", LeavesRejectedKeysOfAStep, "with draft, 1 decode steps a round"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_fault_of_the_engine_shows_with_a_draft_model(trial, draft, monkeypatch, module, name, fault, says):
    monkeypatch.setattr(f"sagellm.{module}.{name}", fault)
    found = broken(check_engine(trial, guesser(draft), only=("greedy answers",)))
    assert set(found) - {"runs"} == {"greedy"} and says in found["greedy"], found


@pytest.mark.slow
def test_trees_of_a_draft_model(trial, draft):
    """By the likeliest tokens of each place: alone, in an engine whose tokens it does not know, and beside itself."""
    options = {"model": str(draft), "top_k": 3, "lookahead": 8}
    assert check_speculator(lambda **tried: DraftModelStrategy(**options | tried), rounds=1).passed
    report = check_engine(trial, Guesser("draft", options, (draft,)), only=("greedy answers", "answers in bfloat16"))
    assert not broken(report), report


@pytest.mark.slow
def test_the_command(tmp_path):
    def run(folder, *words):
        options = json.dumps({"model": str(folder)})
        return CliRunner().invoke(check, ["speculative", "draft", "--options", options, "--rounds", "1", *words])

    assert run("nowhere", "--no-engine").exit_code == 0
    done = run("nowhere")
    assert done.exit_code == 2 and "the draft model nowhere has no config.json" in " ".join(done.output.split())
    # The targets are made for it: those of other strategies have 320 tokens.
    draft = write_random_model(tmp_path, **SHAPE | {"hidden_size": 32, "num_layers": 1, "vocab_size": 330})
    done = run(draft, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and [rule["rule"] for rule in document["rules"]] == [*RULES, *ENGINE_RULES]
