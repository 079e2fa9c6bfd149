"""Tests of the strategies that read the text: guesses worked out by hand, and the life of a request."""

import json
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from click.testing import CliRunner

from sagellm import accel
from sagellm.accel.speculative.base import Ask, Draw, SpeculativeStrategy
from sagellm.accel.speculative.dynamic import DynamicLookaheadStrategy
from sagellm.accel.speculative.ngram import NgramStrategy
from sagellm.accel.speculative.registry import find_speculator, make_speculator, speculator_names
from sagellm.accel.speculative.suffix import SuffixStrategy
from sagellm.cli import main
from sagellm.core import registry as core_registry
from sagellm.core.errors import SpeculationError

BLOCKS = np.empty(0, np.int64)
BOTH = pytest.mark.parametrize("reference", [False, True])


def ask(tokens: list[int], limit: int = 4, request_id: int = 1) -> Ask:
    return Ask(request_id, np.array(tokens, np.int64), limit, BLOCKS)


def guess(strategy: SpeculativeStrategy, tokens: list[int], limit: int = 4, request_id: int = 1) -> list[int]:
    """Return the guesses for a request that the strategy was not told about."""
    (guesses,) = strategy.propose([ask(tokens, limit, request_id)])
    return list(guesses)


def finish(strategy: SpeculativeStrategy, prompt: list[int], answer: list[int], request_id: int = 7) -> None:
    strategy.begin(request_id, np.array(prompt, np.int64))
    strategy.accept(request_id, answer)
    strategy.end(request_id)


@BOTH
@pytest.mark.parametrize(
    ("options", "tokens", "limit", "expected"),
    [
        ({}, [1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ({}, [1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the latest place
        ({}, [1, 2, 5, 9, 2, 6, 1, 2], 1, [5]),  # but the longer match before it
        ({"max_n": 1}, [1, 2, 5, 9, 2, 6, 1, 2], 1, [6]),
        ({"min_n": 2}, [2, 5, 9, 2], 4, []),
        ({"min_n": 2}, [1, 2, 5, 1, 2], 1, [5]),
        ({}, [7, 1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3]),  # goes on as if the text did
        ({}, [4, 4], 5, [4] * 5),
        ({}, [1, 2, 3], 4, []),
        ({}, [1], 4, []),
    ],
)
def test_ngram(reference: bool, options: dict, tokens: list[int], limit: int, expected: list[int]):
    assert guess(NgramStrategy(reference=reference, **options), tokens, limit) == expected


@BOTH
@pytest.mark.parametrize(
    ("options", "tokens", "limit", "expected"),
    [
        ({}, [1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ({}, [1, 2, 5, 8, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], 1, [5]),  # what followed twice, and not what did last
        ({}, [1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, [6]),  # of equals the last
        ({"min_probability": 0.5}, [1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1, []),  # 1/2 of 2/3
        ({"min_probability": 0.3}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 9, [3, 4, 5, 6]),  # 2/3, 2/4, 2/5, 2/6 and not 2/7
        ({"min_probability": 0.0}, [7, 1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3]),
        ({}, [4] * 40, 8, [4] * 8),
        ({}, [1, 2, 3], 4, []),
        ({}, [1], 4, []),
    ],
)
def test_suffix(reference: bool, options: dict, tokens: list[int], limit: int, expected: list[int]):
    assert guess(SuffixStrategy(reference=reference, **options), tokens, limit) == expected


@BOTH
def test_suffix_remembers_answers_and_not_prompts(reference: bool):
    strategy = SuffixStrategy(min_probability=0.0, reference=reference)
    finish(strategy, [50, 51, 52, 53], [10, 11, 12, 13])
    assert guess(strategy, [1, 10, 11]) == [12, 13]  # and no further than the answer went
    assert guess(strategy, [1, 50, 51], request_id=2) == []
    assert guess(strategy, [10, 11, 30, 31, 9, 10, 11], 2, request_id=3) == [30, 31]  # its own text before others'
    assert strategy.report()["history_tokens"] == 4


@BOTH
def test_suffix_drops_the_oldest_answers(reference: bool):
    strategy = SuffixStrategy(max_tokens=6, min_probability=0.0, reference=reference)
    finish(strategy, [1], [10, 11, 12])
    finish(strategy, [1], [20, 21, 22])
    assert guess(strategy, [10]) == [11, 12] and guess(strategy, [20], request_id=2) == [21, 22]
    finish(strategy, [1], [30, 31])
    assert guess(strategy, [10], request_id=3) == [] and guess(strategy, [20], request_id=4) == [21, 22]
    finish(strategy, [1], list(range(40, 50)))
    assert guess(strategy, [40], request_id=5) == [] and guess(strategy, [44], request_id=6) == [45, 46, 47, 48]
    assert strategy.report()["history_tokens"] == 6


@BOTH
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_through_the_life_of_a_request(name: str, reference: bool):
    strategy, text = make_speculator(name, reference=reference), [5, 6, 7, 8, 5, 6]
    strategy.begin(1, np.array(text, np.int64))
    for new in ([7], [8, 9, 5], [6, 7, 8, 9], [1, 2]):
        strategy.accept(1, new)
        text = text + new
        asks = [ask(text), ask([3, 4, 3], 2, request_id=2)]
        assert strategy.propose(asks) == [guess(make_speculator(name, reference=reference), text), [4, 3]]
    strategy.begin(1, np.array(text, np.int64))  # it lost its place, and comes back
    assert guess(strategy, text) == guess(make_speculator(name, reference=reference), text)
    strategy.end(1)
    strategy.end(2)
    strategy.end(3)
    strategy.accept(1, [4])
    assert guess(strategy, [60, 61, 60], 1) == [61]  # another one of that name
    if name == "suffix":
        assert strategy.report()["history_tokens"] == 10  # the answer of request 1; 2 came with all that it had
    else:
        assert len(strategy._indices) == 1  # the last one asked about


@BOTH
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_another_text_of_the_same_length(name: str, reference: bool):
    strategy = make_speculator(name, reference=reference)
    assert guess(strategy, [1, 2, 3, 1, 2], 1) == [3] and guess(strategy, [5, 6, 7, 5, 6], 1) == [7]


CHAIN = {"min_probability": 0.0}


@pytest.mark.parametrize(
    ("options", "tokens", "limit", "expected"),
    [
        (CHAIN, [1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        (CHAIN, [1, 2, 5, 8, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], 1, [5]),  # what followed twice, and not what did last
        (CHAIN, [3, 1, 2, 5, 4, 1, 2, 6, 8, 2, 6, 3, 1, 2], 1, [5]),  # the longest context
        (CHAIN | {"order": 1}, [3, 1, 2, 5, 4, 1, 2, 6, 8, 2, 6, 3, 1, 2], 1, [6]),
        ({"min_probability": 0.12}, [1, 2, 3, 4, 5, 6, 9, 1, 2], 9, [3, 4, 5, 6, 9, 1, 2, 3, 4]),  # 1/8 of it is enough for one
        ({"min_probability": 1.0}, [1, 2, 3, 4, 5, 6, 9, 1, 2], 9, [3, 4, 5, 6, 9, 1, 2]),  # 0.76 each: 0.76**8 < 1/8
        (CHAIN, [1, 2, 3], 4, []),
        (CHAIN, [1], 4, []),
    ],
)
def test_chain(options: dict, tokens: list[int], limit: int, expected: list[int]):
    assert guess(make_speculator("chain", **options), tokens, limit) == expected


def test_chains_guess_each_other_while_they_run():
    chain, prompt = make_speculator("chain", **CHAIN), [9, 8, 1, 2]
    for request in (1, 2):
        chain.begin(request, np.array([*prompt, 10 + request], np.int64))
    assert (chain.report()["tokens"], chain.report()["prompts"]) == (2, 1)
    chain.accept(1, [3, 4, 5])
    chain.accept(2, [3])
    assert guess(chain, [*prompt, 12, 3], 2, request_id=2) == [4, 5]
    chain.end(1)
    assert guess(chain, [*prompt, 12, 3], 2, request_id=2) == [4, 5]
    chain.end(2)
    assert not chain._texts and not chain._prompts
    for number in range(400):  # the older half is dropped
        finish(chain, [500_000], list(range(1000 * number, 1000 * number + 999)), 7)
    report = chain.report()
    assert report["tokens"] <= chain.max_tokens and report["contexts"] <= chain.order * chain.max_tokens
    assert guess(chain, [3, 4], 1, request_id=8) == [] and guess(chain, [399_004, 399_005], 1, request_id=9) == [399_006]


def test_chain_guesses_what_the_numbers_of_draws_choose():
    """All samples have one prompt. Numbers of 0.1 and 0.4 drew token 5, and 0.8 drew 6. Behind 5 came 7 or 8, behind 6 a 7."""
    warm, prompt = (0.7, 0, 1.0, 0.0), [9, 8, 1, 2]
    names = iter(range(100))

    def drawn(numbers: list[float], way: tuple, chain: SpeculativeStrategy, answer: list[int] | None = None) -> list[int]:
        request = next(names)
        chain.begin(request, np.array(prompt, np.int64))
        (found,) = chain.propose([ask(prompt, len(numbers) - 1, request)._replace(draw=Draw(numbers, way))])
        if answer is not None:
            chain.accept(request, answer)
        chain.end(request)
        return found

    chain = make_speculator("chain", min_probability=0.0, max_tokens=1000)
    for first, second, answer in ((0.1, 0.2, [5, 7]), (0.4, 0.9, [5, 8]), (0.8, 0.5, [6, 7])):
        drawn([first, second, 0.9], warm, chain, answer)
    for first, second, expected in (
        (0.1, 0.2, [5, 7]), (0.3, 0.8, [5, 8]), (0.55, 0.5, [5, 7]), (0.65, 0.9, [6, 7]), (0.99, 0.0, [6, 7]),
        (0.8, 0.5, [6, 7]),
    ):  # fmt: skip
        assert drawn([first, second, 0.9], warm, chain) == expected
    assert DynamicLookaheadStrategy(chain).takes_draws and not make_speculator("suffix").takes_draws
    # Where another temperature draws, the likeliest token is the guess; and so where the likeliest is taken.
    assert drawn([0.8, 0.5], (0.8, *warm[1:]), chain) == guess(chain, prompt, 1, 200) == [5]
    for number in range(3):  # draws are bounded as counts are
        finish(chain, [500_000], list(range(1000 * number, 1000 * number + 999)), 300)
    assert not chain._new.drawn and not chain._old.drawn


def test_chain_learns_what_its_guesses_are_worth():
    """A strategy whose guesses are all wrong guesses less and less, and tries again now and then."""
    chain = make_speculator("chain", min_probability=1.0)
    text = [token for first in range(0, 1500, 5) for token in (first, first + 1, first + 2, 2000 + first)]
    chain.begin(1, np.array(text, np.int64))
    counts = []
    for first in range(0, 1500, 5):
        new = [3000 + first, first, first + 1]
        chain.accept(1, new)
        text += new
        counts.append(len(guess(chain, text, 16)))
    assert all(counts[:8]) and counts[100:].count(0) > 100 and any(counts[200:])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ngram", {"min_n": 0}, "option min_n=0; give a number from 1 to 32"),
        ("ngram", {"min_n": 3, "max_n": 2}, "option max_n=2; give a number from 3 to 32"),
        ("ngram", {"max_n": "4"}, "option max_n='4'; give a number"),
        ("ngram", {"lookahead": 0}, "lookahead is 0; give a whole number from 1 to 64"),
        ("chain", {"order": 17}, "option order=17; give a number from 1 to 16"),
        ("chain", {"max_tokens": 999}, "option max_tokens=999; give a number from 1000"),
        ("suffix", {"max_depth": 1}, "option max_depth=1; give a number from 2 to 128"),
        ("suffix", {"max_tokens": -1}, "option max_tokens=-1; give a number from 0"),
        ("suffix", {"max_tokens": True}, "option max_tokens=True; give a number from 0"),
        ("suffix", {"min_probability": 1.5}, "option min_probability=1.5; give a number from 0 to 1"),
        ("suffix", {"min_probability": float("nan")}, "option min_probability=nan; give a number from 0 to 1"),
    ],
)
def test_bad_options_are_told(name: str, options: dict, words: str):
    with pytest.raises(SpeculationError, match=words):
        make_speculator(name, **options)


def test_both_are_known_by_name_and_keep_their_options():
    assert {"ngram", "suffix"} <= set(speculator_names())
    ngram, suffix = make_speculator("ngram", lookahead=3, min_n=2, max_n=5), make_speculator("suffix", max_depth=9)
    assert (ngram.lookahead, ngram.min_n, ngram.max_n) == (3, 2, 5)
    assert (suffix.lookahead, suffix.max_depth, suffix.min_probability, suffix.max_tokens) == (8, 9, 0.2, 100_000)


def test_the_abstract_one_cannot_be_built_and_others_come_from_the_package():
    with pytest.raises(TypeError, match="abstract"):
        accel.SpeculativeStrategy()
    assert accel.DynamicLookaheadStrategy is DynamicLookaheadStrategy and accel.SpeculativeStrategy is SpeculativeStrategy
    assert {getattr(accel, name).__name__ for name in accel.__all__} == set(accel.__all__)


class Offered(NgramStrategy):
    name = "offered"


def test_installed_packages_offer_strategies(monkeypatch: pytest.MonkeyPatch):
    entries = [
        EntryPoint("their-own", f"{__name__}:Offered", "sagellm.speculative"),
        EntryPoint("ngram", f"{__name__}:Offered", "sagellm.speculative"),  # the project's own goes before
        EntryPoint("elsewhere", f"{__name__}:Offered", "sagellm.policies"),
        EntryPoint("gone", f"{__name__}:Gone", "sagellm.speculative"),
    ]
    monkeypatch.setattr(core_registry, "entry_points", lambda group: [each for each in entries if each.group == group])
    assert find_speculator("Their_Own") is Offered and find_speculator("ngram") is NgramStrategy
    wrapped = make_speculator("dynamic:their-own", options={"max_n": 2})
    assert isinstance(wrapped, DynamicLookaheadStrategy) and wrapped.report()["strategy"] == "offered"
    names = speculator_names()
    assert names.count("ngram") == 1 and "their-own" in names and "elsewhere" not in names
    with pytest.raises(SpeculationError, match="gone: cannot load"):
        find_speculator("gone")
    del entries[-1]
    listed = json.loads(CliRunner().invoke(main, ["speculative", "list", "--json"]).stdout)
    assert {row["strategy"]: row["class"] for row in listed}["their-own"] == f"{__name__}:Offered"
