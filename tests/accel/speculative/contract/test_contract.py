"""Good strategies keep to the contract, the engine to its answers; each planted fault is caught by a rule that it breaks."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.chain import ChainStrategy
from sagellm.accel.speculative.contract.exactness import Guesser
from sagellm.accel.speculative.contract.fit import BROKEN_SIGMAS, deviation
from sagellm.accel.speculative.contract.rules import ENGINE_RULES, RULES, check_engine, check_speculator
from sagellm.accel.speculative.halves import DraftModel, ExactVerifier
from sagellm.accel.speculative.ngram import NgramStrategy
from sagellm.accel.speculative.suffix import SuffixStrategy
from sagellm.accel.speculative.tree import DraftTree
from sagellm.cli.kinds import check
from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner
from sagellm.engines.lmdeploy.speculative import speculator as judging
from sagellm.engines.lmdeploy.speculative.factory import SpecAgentStrategy
from sagellm.engines.lmdeploy.speculative.verify import sampling_rows
from tests.contract import broken
from tests.sweeps import slow_but

HERE = "tests.accel.speculative.contract.test_contract:"


class Twos(SpeculativeStrategy):
    """As many guesses as allowed."""

    name = "twos"

    def propose(self, asks):
        return [[2] * ask.limit for ask in asks]


class Trees(Twos):
    takes_shape = True

    def propose(self, asks):
        return [DraftTree([2], [-1]) for _ in asks]


class TooMany(Twos):
    def propose(self, asks):
        return [[2] * (ask.limit + 1) for ask in asks]


class Foreign(Twos):
    def propose(self, asks):
        return [[512] for _ in asks]


class Missing(Twos):
    def propose(self, asks):
        return super().propose(asks)[1:]


class Halves(Twos):
    def propose(self, asks):
        return [[0.5] for _ in asks]


class Writes(Twos):
    def propose(self, asks):
        for ask in asks:
            ask.tokens.flags.writeable = True
            ask.tokens[0] = 0
        return super().propose(asks)


class Forgetful(Twos):
    """Knows begun requests alone."""

    def __init__(self, lookahead=4):
        super().__init__(lookahead)
        self.texts = {}

    def begin(self, request_id, tokens):
        self.texts[request_id] = tokens

    def end(self, request_id):
        self.texts.pop(request_id, None)

    def propose(self, asks):
        return [[int(self.texts[ask.request_id][0])] for ask in asks]


class Hoards(Forgetful):
    def end(self, request_id):
        self.texts[object()] = bytearray(10_000)

    def propose(self, asks):
        return [[2] for _ in asks]


class Counts(Twos):
    made = itertools.count()

    def __init__(self, lookahead=4):
        super().__init__(lookahead)
        self.number = next(self.made) % 300

    def propose(self, asks):
        return [[self.number] for _ in asks]


class Lenient(Twos):
    def __init__(self, lookahead=4):
        super().__init__()


class Wild(Twos):
    def step_done(self, outcome):
        self.lookahead = 65


class CountsCalls(Twos):
    """Guesses the number of its calls. There are fewer calls if it is told late."""

    joins = True

    def __init__(self, lookahead=4):
        super().__init__(lookahead)
        self.calls = self.steps = 0

    def accept(self, request_id, tokens):
        self.calls += 1

    def step_done(self, outcome):
        self.steps += 1
        self.lookahead = 0 if self.steps % 6 < 3 else 4
        self.quiet = 0 if self.lookahead else 3 - self.steps % 6

    def propose(self, asks):
        return [[self.calls % 300] for _ in asks]


class WakesEarly(CountsCalls):
    """It would guess before the last of the steps that it called quiet."""

    def step_done(self, outcome):
        super().step_done(outcome)
        self.quiet += 2 * (self.quiet > 0)

    def propose(self, asks):
        return [[self.steps % 300] for _ in asks]


class Deaf(Twos):
    joins, quiet = True, -1


class EndlesslyDeaf(Twos):
    joins, quiet = True, 1025


FAULTS = {
    Trees: "shape", TooMany: "limits", Foreign: "vocabulary", Missing: "answers", Halves: "answers", Writes: "leaves_asks",
    Forgetful: "raises_nothing", Hoards: "forgets", Counts: "deterministic", Lenient: "options", Wild: "lookahead",
    CountsCalls: "quiet", WakesEarly: "quiet", Deaf: "quiet", EndlesslyDeaf: "quiet",
}  # fmt: skip
# The scenarios of the rules that strangers do not show.
SHOWN_IN = {"options": "options", "deterministic": "crowd", "quiet": "crowd", "forgets": "requests that end"}


@pytest.mark.parametrize("kind", [Twos, NgramStrategy, SuffixStrategy, ChainStrategy], ids=lambda kind: kind.__name__)
def test_good_ones(kind):
    report = check_speculator(kind, rounds=1)
    assert report.passed and [result.rule for result in report.results] == list(RULES), report
    assert report.num_events > 200 and report.event_us > 0


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_each_fault_of_a_strategy_is_caught(kind):
    rule = FAULTS[kind]
    found = broken(check_speculator(kind, rounds=1, only=(SHOWN_IN.get(rule, "strangers"),)))
    assert set(found) == {rule} and "[scenario " in found[rule]


def test_the_engine(trial):
    report = check_engine(trial, Guesser("ngram", {"min_n": 1}))
    assert report.passed and [result.rule for result in report.results] == list(ENGINE_RULES), report


def test_an_engine_without_float32_is_held_against_the_rules_of_bfloat16(trial, monkeypatch):
    generate, asked = trial.generate, []
    monkeypatch.setattr(trial, "generate", lambda *a, **k: asked.append(k.get("dtype")) or generate(*a, **k))
    monkeypatch.setattr(trial, "has_float32", False)
    report = check_engine(trial, Guesser("ngram", {"min_n": 1}))
    assert report.passed and [result.rule for result in report.results] == ["runs", "near_argmax"], report
    assert set(asked) == {"bfloat16"}


class FirstUnverified(ExactVerifier):
    """The first guess stands without a look at it."""

    def verify(self, tokens, parents, sampled):
        return super().verify(tokens, parents, [*tokens[:1], *sampled][: len(sampled)] if tokens else sampled)


class RestUnverified(ExactVerifier):
    """Behind a right first guess all others stand without a look at them."""

    def verify(self, tokens, parents, sampled):
        return super().verify(tokens, parents, [*sampled[:1], *tokens[1:], sampled[-1]][: len(sampled)])


class OtherBranch(ExactVerifier):
    """It goes on at the next guess of the same parent, if there is one."""

    def verify(self, tokens, parents, sampled):
        kept = super().verify(tokens, parents, sampled)
        for node in range(kept[-1] + 1 if kept else 0, len(tokens)):
            if kept and parents[node] == parents[kept[-1]]:
                return [*kept[:-1], node]
        return kept


class NoPath(ExactVerifier):
    """It keeps guesses that do not follow each other."""

    def verify(self, tokens, parents, sampled):
        return [len(tokens)]


class Guesses(DraftModel):
    """The last tokens of a text again."""

    def generate_draft(self, texts, limits):
        return [text[-limit:].tolist() for text, limit in zip(texts, limits, strict=True)]


class BonusOfAnotherRow(judging.Speculator):
    """The last token is the one of the row before, where there is one."""

    def _verified(self, sampled):
        paths, kept = super()._verified(sampled)
        row = 0
        for draft, path, tokens in zip(self._drafts, paths, kept, strict=True):
            if path:
                tokens[-1] = sampled[row + path[-1]]
            row += len(draft) + 1
        return paths, kept


class SeesSiblings(CpuRunner):
    """A token of a tree sees the guess before it, of whatever branch that is."""

    def _tree_rows(self, before, queries):
        positions, parents = super()._tree_rows(before, queries)
        starts = (parents < 0).nonzero()[:, 0]
        return positions, torch.cat([torch.arange(-1, len(part) - 1) for part in parents.tensor_split(starts[1:])])


class WrongPositions(CpuRunner):
    """Tokens of a tree count the guesses before them, as in a chain."""

    def _tree_rows(self, before, queries):
        positions, parents = super()._tree_rows(before, queries)
        parts = positions.tensor_split((parents < 0).nonzero()[1:, 0])
        return torch.cat([part[0] + torch.arange(len(part)) for part in parts]), parents

    def _prepare(self, caches, is_decoding, rows, num_positions, *args, **options):
        num_positions = max(num_positions, int(rows[1].max()) + 1)
        return super()._prepare(caches, is_decoding, rows, num_positions, *args, **options)


class LeavesKeys(CpuRunner):
    """Keys of right guesses stay where they were computed."""

    def move(self, slots):
        pass


class FirstText(judging.Speculator):
    """Every row of a tree is sampled as if it stood behind the first guesses."""

    def rows_of(self, sampling_inputs):
        return sampling_rows(sampling_inputs, [list(draft) for draft in self._drafts]) if self.is_verifying else sampling_inputs


class LenientSpeculator(judging.Speculator):
    """A guess stands if it is among the five likeliest tokens."""

    def rows_of(self, sampling_inputs):
        return replace(super().rows_of(sampling_inputs), max_num_logprobs=5)

    def settle(self, sampled, logprobs, sampling_inputs):
        row = 0
        for guesses in self._drafts if self.is_verifying else ():
            for place, guess in enumerate(guesses):
                if guess in logprobs.indices[row + place, 1:]:  # behind the token that was drawn
                    sampled[row + place] = guess
            row += len(guesses) + 1
        return super().settle(sampled, None, sampling_inputs)


class LosesLateTokens(judging.Speculator):
    """Tells the strategy of the first late step's tokens twice, in place of those of the second one."""

    def _tell_late(self):
        if len(self._late) > 1:
            self._late[1] = self._late[1]._replace(row=self._late[0].row)
        super()._tell_late()


class TellsTooFew(judging.Speculator):
    """A late step is never told of."""

    def _tell_step(self, outcome):
        if not self._late_is_lost:
            super()._tell_step(outcome)
        self._late_is_lost = False

    def _tell_late(self):
        self._late_is_lost = len(self._late) > 1
        super()._tell_late()


class TellsHalf(judging.GuardedStrategy):
    """The last of several tokens stays untold."""

    def accept(self, told):
        return super().accept([(request, tokens[:-1] or tokens) for request, tokens in told])


class LeavesRejectedKeysOfAStep(judging.Speculator):
    """A round of one step comes behind all that was guessed in the round before it, not behind what was right."""

    def extend(self, inputs, extra, *others):
        made = super().extend(inputs, extra, *others)
        if not made.is_decoding:
            self._rejected = {}
            return made
        held = [blocks * extra.block_size for blocks in extra.num_blocks]
        needed = (made.history_lengths + made.seq_length).tolist()
        shift = [
            min(self._rejected.get(request, 0), room - num)
            for request, room, num in zip(extra.request_ids, held, needed, strict=True)
        ]
        return replace(
            made, history_lengths=made.history_lengths + torch.tensor(shift), max_kv_seqlen=made.max_kv_seqlen + max(shift),
            sum_kv_seqlen=made.sum_kv_seqlen + sum(shift),
        )  # fmt: skip

    def _judge(self, verdicts, num_rows, *paths):
        self._rejected = {request: drafted - right for request, drafted, right in verdicts}
        super()._judge(verdicts, num_rows, *paths)


class LeavesRejectedKeys(SpecAgentStrategy):
    """The next step of a round comes behind all that was guessed, not behind what was right."""

    def update_inputs_for_next_step(self, model_inputs, sampling_inputs, next_token_ids, **kwargs):
        model_inputs, extra = super().update_inputs_for_next_step(model_inputs, sampling_inputs, next_token_ids, **kwargs)
        if not self.speculator.is_verifying:
            return model_inputs, extra
        drafted = self.speculator.num_drafted() + 1 - (next_token_ids >= 0).sum(1)
        model_inputs.history_lengths = model_inputs.history_lengths + drafted
        model_inputs.max_kv_seqlen += int(drafted.max())
        model_inputs.sum_kv_seqlen += int(drafted.sum())
        return model_inputs, extra


SLOW = pytest.mark.slow  # an engine in each; the others are one of each sort


@pytest.mark.parametrize(("module", "name", "fault", "rules"), [
    pytest.param(*("factory", "Speculator", BonusOfAnotherRow, {"greedy", "near_argmax", "distribution"}), marks=SLOW),
    pytest.param(*("factory", "Speculator", LenientSpeculator, {"greedy", "near_argmax", "distribution"}), marks=SLOW),
    ("factory", "SpecAgentStrategy", LeavesRejectedKeys, {"greedy"}),
    pytest.param(*("factory", "Speculator", LeavesRejectedKeysOfAStep, {"greedy", "near_argmax"}), marks=SLOW),
    ("factory", "Speculator", LosesLateTokens, {"runs"}),
    pytest.param(*("factory", "Speculator", TellsTooFew, {"runs"}), marks=SLOW),
    pytest.param(*("speculator", "GuardedStrategy", TellsHalf, {"runs"}), marks=SLOW),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_each_fault_of_an_engine_is_caught(trial, monkeypatch, module, name, fault, rules):
    monkeypatch.setattr(f"sagellm.engines.lmdeploy.speculative.{module}.{name}", fault)
    found = broken(check_engine(trial, Guesser("ngram", {})))
    # One of its guessers says so, too, where it is asked about an answer that is wrong.
    assert set(found) - {"runs"} == rules - {"runs"} and rules <= set(found), found


@pytest.mark.parametrize(("name", "fault"), slow_but([
    ("cpu.backend.CpuRunner", SeesSiblings), ("cpu.backend.CpuRunner", WrongPositions),
    ("cpu.backend.CpuRunner", LeavesKeys), ("speculative.factory.Speculator", FirstText),
], ("cpu.backend.CpuRunner", SeesSiblings), ("speculative.factory.Speculator", FirstText)),
    ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_each_fault_of_trees_is_caught(trial, monkeypatch, name, fault):
    monkeypatch.setattr(f"sagellm.engines.lmdeploy.{name}", fault)
    found = broken(check_engine(trial, Guesser("ngram", {}), only=("greedy answers",)))
    assert set(found) - {"runs"} == {"greedy"} and "PartlyRightTreeStrategy" in found["greedy"], found


@pytest.mark.parametrize(("verifier", "rules"), slow_but([
    (FirstUnverified, {"greedy"}), (RestUnverified, {"greedy"}), (OtherBranch, {"greedy"}), (NoPath, {"runs"}),
    (ExactVerifier, set()),
], (RestUnverified, {"greedy"}), (ExactVerifier, set())), ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_verifier_that_changes_answers_is_caught(trial, verifier, rules):
    module = HERE if verifier is not ExactVerifier else "sagellm.accel.speculative.halves:"
    options = {"draft": f"{HERE}Guesses", "verifier": module + verifier.__name__}
    found = broken(check_engine(trial, Guesser("pair", options), only=("greedy answers",)))
    assert rules <= set(found) <= rules | {"runs"} and ("runs" not in found or rules), found


def test_the_fit():
    """Its size is as stated, nearly: of 3,000 right samples none is called wrong; a small bias is."""
    draw = np.random.default_rng(0)
    wanted = draw.dirichlet(np.full(320, 0.1))
    far = [deviation(draw.choice(320, 1500, p=wanted), wanted)[0] for _ in range(1000)]
    assert max(far) < BROKEN_SIGMAS and abs(np.mean(far)) < 0.15 and 0.9 < np.std(far) < 1.1
    biased = wanted.copy()
    biased[biased.argmax()] += 0.08
    assert deviation(draw.choice(320, 1500, p=biased / biased.sum()), wanted)[0] > BROKEN_SIGMAS


@pytest.mark.slow
def test_the_command():
    """A fault that shows in the strategy alone and in the engine."""
    done = CliRunner().invoke(check, ["speculative", HERE + "TooMany", "--rounds", "1", "--json"])
    failed = [rule["rule"] for rule in json.loads(done.stdout)["rules"] if not rule["passed"]]
    assert done.exit_code == 1 and failed == ["limits", "runs"], failed
