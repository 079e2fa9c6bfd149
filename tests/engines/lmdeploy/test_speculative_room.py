"""KV room for guesses: what a small pool, or one that the prefix cache has filled, leaves of them."""

import random

import pytest

from sagellm.core.errors import SpeculationError
from tests.engines.lmdeploy.guesses import CROWD, NEW, Knowing, ask, counts, tell, tokens_of
from tests.reference import make_prompts

EAGER = "tests.engines.lmdeploy.test_speculative_room:Eager"


class Eager(Knowing):
    """Guesses as many tokens as it may, all of them right."""

    name = "eager"

    def one(self, ask):
        self.draw = self
        return super().one(ask)

    def randint(self, least, most):
        return most

    def random(self):
        return 1.0


def fill(engine):
    """Fill nearly all blocks of the pool with prefixes that no request uses."""
    draw = random.Random(1)
    tell([], [])
    for _ in range(8):
        ask(engine, [[draw.randint(3, 250) for _ in range(160)]], [dict(max_new_tokens=4)])
    pool = engine.hooks.kv.counts()
    assert pool.cached > 50 and pool.free < 10, pool


def sequence_steps(engine, prompts, expected):
    """Decode steps of each sequence together."""
    before = counts(engine)["sequences"]
    tell(prompts, expected)
    assert tokens_of(ask(engine, prompts)) == expected
    return counts(engine)["sequences"] - before


@pytest.mark.parametrize("decode_round", [1, 3])
def test_a_prefix_cache_that_fills_the_pool_leaves_room_for_guesses(start_engine, reference, decode_round):
    prompts = make_prompts((40, 70, 33, 90), seed=7)
    expected = reference(prompts, NEW)
    found = []
    for is_full in (False, True):
        engine = start_engine(
            kv_blocks=60, decode_round=decode_round, speculative=EAGER, speculative_options={"lookahead": 12}
        )
        if is_full:
            fill(engine)
        found.append(sequence_steps(engine, prompts, expected))
    assert found[1] == found[0] < NEW


def test_guesses_shrink_to_the_room_that_there_is(start_engine, reference):
    """A lookahead of 64 tokens is a fourth of this pool."""
    prompts = make_prompts((20, 33, 40), seed=9)
    expected = reference(prompts, NEW)
    engine = start_engine(kv_blocks=16, speculative=EAGER, speculative_options={"lookahead": 64})
    alone = [sequence_steps(engine, [prompt], [answer]) for prompt, answer in zip(prompts, expected, strict=True)]
    assert alone == [1, 1, 1], "all of an answer in one step"
    assert sequence_steps(engine, prompts, expected) == 3, "there is room for 32 guesses of each"
    crowd = reference(CROWD, NEW)
    tell(CROWD, crowd)
    assert tokens_of(ask(engine, CROWD)) == crowd and engine.hooks.report()["preempted"] > 0


def test_a_lookahead_beyond_the_pool_is_refused(start_engine, monkeypatch):
    message = "lookahead of 64 .* 4 decode steps of a round is 256 tokens ahead .* the pool of 16 blocks holds 256; give"
    config = dict(kv_blocks=16, decode_round=4, speculative="ngram", speculative_options={"lookahead": 64})
    with pytest.raises(SpeculationError, match=message):
        start_engine(**config)
    # If the engine sizes the pool by itself, only the engine can tell.
    monkeypatch.setattr("sagellm.engines.lmdeploy.settings_plugins.check_lookahead", lambda *numbers: None)
    with pytest.raises(SpeculationError, match=message):
        start_engine(**config)
