"""Guesses beside the engine's other features: grammars, tiers, quotas, a place that is lost and found, answers that end."""

import numpy as np
import pytest

from sagellm.accel.speculative.draft_model import DraftModelStrategy
from sagellm.core.config import KVConfig, PluginSpec
from sagellm.core.hooks import Phase
from tests.engines.lmdeploy.guesses import CROWD, KNOWING, NEW, Knowing, ask, counts, tell, tokens_of
from tests.engines.lmdeploy.test_quotas import GUEST, SCAN, hits_of_the_guest
from tests.plugins import plugin_of
from tests.pool import check_pool
from tests.reference import make_prompts

WITH_GUESSES = dict(speculative=KNOWING)
LISTENER = "tests.plugins:Listener"


def strategy_of(engine):
    return engine.engine.executor.model_agent.agent_strategy.speculator.strategy


def draft_of(model_folder):
    """The target as its own draft model: each guess is right as long as it knows what is in its blocks."""
    return dict(speculative="draft", speculative_options={"model": str(model_folder("llama")), "lookahead": 3})


def grammar(**schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("decode_round", [1, 4])
def test_grammars_beside_guesses(start_engine, decode_round):
    """A request that follows a grammar gets no guesses. Its rows are between those of requests with guesses."""
    colour, flags = grammar(enum=["red", "green", "blue"]), grammar(type="array", items={"type": "boolean"}, minItems=2)
    word = {"type": "regex_schema", "regex_schema": r"[a-c]{3}-\d{2}"}
    prompts = make_prompts((20, 35, 50, 12, 28, 17), seed=8)
    ways = [
        dict(response_format=colour), {}, dict(response_format=word), {}, dict(response_format=flags, logprobs=2),
        dict(response_format=word, top_k=0, temperature=1.3, random_seed=5),
    ]  # fmt: skip
    plain = start_engine(decode_round=decode_round)
    expected = ask(plain, prompts, ways)
    plain.close()  # LMDeploy keeps grammars by session for all engines of a process
    tell(prompts, tokens_of(expected))
    engine = start_engine(decode_round=decode_round, **WITH_GUESSES)
    for round_of_all in range(2):
        found = ask(engine, prompts, ways)
        assert tokens_of(found) == tokens_of(expected)
        for ours, theirs in zip(found[4][1], expected[4][1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
        begun = {request - 6 * round_of_all for request, _ in strategy_of(engine).begun[2 * round_of_all :]}
        assert begun == {1, 3}, "the strategy hears of others"
    assert counts(engine)["accepted"] > 20


def test_blocks_that_come_back_from_the_host(start_engine, reference):
    expected = reference(CROWD, NEW)
    tell(CROWD, expected)
    engine = start_engine(kv_blocks=30, host_kv_blocks=24, kv=KVConfig(migration="always"), **WITH_GUESSES)
    for _ in range(3):
        assert tokens_of(ask(engine, CROWD)) == expected
        check_pool(engine)
    report = engine.hooks.report()
    assert report["preempted"] > 0 and report["migrated"]["gpu"] > 20 and report["prefix_retries"]["hit_tokens"] > 0
    assert counts(engine)["accepted"] > 200


class Noting(DraftModelStrategy):
    """`due`: lengths of the texts that come or come back, when it first guesses for them. `read`: of those that it has read
    from their first token."""

    name = "noting"

    def bind(self, target):
        super().bind(target)
        self.begun, self.new, self.due, self.read = 0, set(), [], []
        forward = self._runner.forward

        def noted(token_ids, num_before, blocks):
            self.read += [len(row) for row, before in zip(token_ids, num_before, strict=True) if not before]
            return forward(token_ids, num_before, blocks)

        self._runner.forward = noted

    def begin(self, request_id, tokens):
        super().begin(request_id, tokens)
        self.begun += 1
        self.new.add(request_id)

    def propose(self, asks):
        self.due += [len(ask.tokens) for ask in asks if ask.request_id in self.new]
        self.new.difference_update(ask.request_id for ask in asks)
        return super().propose(asks)


@pytest.mark.slow
def test_a_draft_model_reads_what_comes_back_from_the_host_anew(start_engine, reference, model_folder):
    expected = reference(CROWD, 60)
    speculative = draft_of(model_folder) | {"speculative": f"{__name__}:Noting"}
    engine = start_engine(kv_blocks=30, host_kv_blocks=24, kv=KVConfig(migration="always"), **speculative)
    for _ in range(2):
        assert tokens_of(ask(engine, CROWD, [dict(max_new_tokens=60)])) == expected
        check_pool(engine)
    report, speculation, strategy = engine.hooks.report(), counts(engine), strategy_of(engine)
    assert report["migrated"]["gpu"] > 20 and report["prefix_retries"]["hit_tokens"] > 0
    assert strategy.begun > 2 * len(CROWD)
    assert sorted(strategy.read) == sorted(strategy.due)
    assert speculation["accepted"] == speculation["drafted"] > 200, "it took what another text left in a block for its own"


@pytest.mark.parametrize("decode_round", [1, 3])
def test_blocks_of_rejected_tokens_return_at_once(start_engine, reference, decode_round):
    """After each round, a request that is not on the device holds the blocks that its text needs, and no block for guesses."""
    expected = reference(CROWD, NEW)
    tell(CROWD, expected)
    options = {"lookahead": 24, "wrong": 0.2}
    engine = start_engine(kv_blocks=120, decode_round=decode_round, **WITH_GUESSES | {"speculative_options": options})
    scheduler, hooks, lent, kept = engine.engine.scheduler, engine.hooks, [], []
    step_end = hooks.step_end

    def num_extra(seq):
        return len(seq.logical_blocks) - -(-seq.num_valid_ids // 16)

    def watched(running, is_decoding):
        lent.append(max(map(num_extra, running)))
        step_end(running, is_decoding)
        on_device = {number for step in hooks._steps._sent for number in step[2]}
        idle = [each for session in scheduler.sessions.values() for each in session.sequences.values()]
        extra = [(each.session_id, num_extra(each)) for each in idle if each.seq_id not in on_device]
        kept.append([(request, num) for request, num in extra if num > 0])

    hooks.step_end = watched
    assert tokens_of(ask(engine, CROWD)) == expected
    assert max(lent) > 0 and not any(kept), kept
    assert counts(engine)["accepted"] > 50


def test_quotas_hold_where_guesses_take_blocks(start_engine, reference):
    prompts = [GUEST, *SCAN]
    tell(prompts, reference(prompts, 5))
    kv = KVConfig(policy="lru", quotas={"scanner": {"gpu": 20}})
    engine = start_engine(kv_blocks=40, kv=kv, speculative_options={"wrong": 0.0}, **WITH_GUESSES)
    assert hits_of_the_guest(engine) == 96
    report = counts(engine)
    assert report["accepted"] == report["drafted"] > len(prompts)


class Returned(Knowing):
    """Guesses for requests that have come back, so that without one the steps are those of an engine without guesses."""

    name = "returned"

    def one(self, ask):
        guesses = super().one(ask)
        return guesses if sum(request == ask.request_id for request, _ in self.begun) > 1 else []


def test_a_place_that_was_lost_and_found_but_for_the_last_token(start_engine, reference):
    """The first request's 129th token needs the only block that the second one does not share with the prefix cache. The second
    request then finds 128 of its 129 tokens again. The agent is told nothing, as it knows all 129."""
    prompts = make_prompts((119, 120), seed=6)
    expected = reference(prompts, NEW)
    tell(prompts, expected)
    together = PluginSpec(name="tests.plugins:Together", options={"count": 2})
    engine = start_engine(LISTENER, together, kv_blocks=17, decode_round=1, speculative=f"{__name__}:Returned")
    assert tokens_of(ask(engine, prompts)) == expected
    rows = [row for step in plugin_of(engine).steps if step.phase is Phase.PREFILL for row in step.computed]
    assert rows == [(0, 119), (1, 120), (1, 1)] and engine.hooks.report()["prefix_retries"]["hit_tokens"] == 128
    assert strategy_of(engine).begun == [(0, 119), (1, 120), (1, 129)]
    assert counts(engine)["accepted"] > 0


def test_what_ends_an_answer_is_the_models_own(start_engine, reference):
    """Also where it was guessed: an accepted guess is a token more than the step gives anyway."""
    prompts = make_prompts((20, 35, 50, 12, 28, 17, 40, 22), seed=8)
    whole = reference(prompts, NEW)
    tell(prompts, whole)
    engine = start_engine(decode_round=1, speculative_options={"wrong": 0.0}, **WITH_GUESSES)
    steps = []
    strategy_of(engine).step_done = steps.append
    ways = [dict(ignore_eos=False, stop_token_ids=[answer[3 + place]]) for place, answer in enumerate(whole)]
    answers = tokens_of(ask(engine, prompts, ways))
    wanted = [answer[: answer.index(answer[3 + place]) + 1] for place, answer in enumerate(whole)]
    assert answers == wanted
    report = counts(engine)
    decoded = sum(map(len, answers)) - len(answers)  # each one's first token is its prompt's
    assert report["accepted"] + report["sequences"] == decoded
    assert report["tokens_per_step"] == pytest.approx(decoded / report["sequences"])
    verdicts = [verdict for step in steps for verdict in step.verdicts]
    assert sum(verdict.num_accepted + 1 for verdict in verdicts) == decoded
    assert sum(np.subtract(report["drafted_at"], report["accepted_at"])) > 0, "no answer ended amidst its guesses"


def test_caches_that_are_built_anew(start_engine, reference, model_folder):
    """As they are after a sleep, which LMDeploy offers where its workers are Ray's alone."""
    engine = start_engine(prefix_caching=False, **draft_of(model_folder))
    expected = reference(CROWD[:3], NEW)
    assert tokens_of(ask(engine, CROWD[:3])) == expected
    with pytest.raises(NotImplementedError):
        engine.engine.sleep()
    agent = engine.engine.executor.model_agent
    agent.sleep()
    agent.build_cache_engine()
    assert tokens_of(ask(engine, CROWD[:3])) == expected
    report = counts(engine)
    assert report["accepted"] == report["drafted"] > 0
