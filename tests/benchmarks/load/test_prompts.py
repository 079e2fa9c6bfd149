"""Prompts have the lengths and the shared beginnings they were asked for, and nothing else in common."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.config import Closed, Constant, LoadClass, LogNormal, Trace, Uniform, Workload
from benchmarks.errors import BenchmarkError
from benchmarks.load.prompts import TextTokens, allowed_ids, draw_lengths, make_prompts, shared_tokens

IDS = allowed_ids(2048)
TEXT = TextTokens(np.random.default_rng(0).permutation(500), IDS)  # each token once
HUNDRED = Constant(value=100)


def workload(num_requests=40, prompt=HUNDRED, output=HUNDRED, **options):
    return Workload(
        arrivals=Closed(concurrency=1), num_requests=num_requests, prompt_tokens=prompt, output_tokens=output, **options
    )


def ids_of(*args, ids=IDS):
    return [prompt.ids for prompt in make_prompts(*args, ids)]


def common(one, other):
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(("vocab_size", "first"), [(151_936, 300), (600, 300), (320, 160)])
def test_allowed_ids(vocab_size, first):
    ids = allowed_ids(vocab_size)
    assert ids == range(first, vocab_size)
    used = {token for prompt in ids_of(workload(200), 0, ids=ids) for token in prompt}
    assert min(used) >= first and max(used) < vocab_size


def test_prompts_of_a_text_are_its_pieces():
    """But for two tokens at the beginning of a piece: a prompt has one piece, and with `reuse` another one before it."""
    text = TEXT.tokens.tolist() * 3
    for prompt in ids_of(workload(20, Uniform(low=20, high=800)), 3, ids=TEXT):
        at = text.index(prompt[2])
        assert prompt[2:] == text[at : at + len(prompt) - 2]
    assert all(prompt[52:] != prompt[2:50] for prompt in ids_of(workload(reuse=0.5), 3, ids=TEXT))


def test_too_few_ids():
    with pytest.raises(BenchmarkError, match="made of 5 token ids; at least 16"):
        make_prompts(workload(), 0, range(5))


def test_without_reuse_nothing_is_shared():
    prompts = ids_of(workload(200), 0)
    blocks = [tuple(prompt[start : start + 16]) for prompt in prompts for start in range(0, 96, 16)]
    assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize(("reuse", "share"), [(0.5, 50), (0.126, 13), (0.99, 99)])
def test_reuse_is_a_shared_beginning(reuse, share):
    prompts = ids_of(workload(reuse=reuse, num_prefixes=3), 5)
    assert len({tuple(prompt[:share]) for prompt in prompts}) == 3
    pairs = [common(a, b) for i, a in enumerate(prompts) for b in prompts[:i]]
    # Tails are random, so that two may begin with the same token, but not go on alike.
    assert all(length < 3 or share <= length < share + 3 for length in pairs)


def test_a_shorter_share_begins_a_longer_one():
    prompts = ids_of(workload(prompt=Uniform(low=20, high=200), reuse=0.5), 0)
    longest = max(prompts, key=len)
    assert all(common(prompt, longest) >= round(len(prompt) / 2) for prompt in prompts)
    assert len({len(prompt) for prompt in prompts}) > 20


@pytest.mark.parametrize("ids", [IDS, TEXT], ids=["random", "text"])
@pytest.mark.parametrize("options", [{}, {"reuse": 0.8, "num_prefixes": 2}])
def test_seeds_repeat_and_share_nothing(options, ids):
    first, again, other = (ids_of(workload(**options), seed, ids=ids) for seed in (1, 1, 2))
    assert first == again
    assert not {tuple(prompt[:16]) for prompt in first} & {tuple(prompt[:16]) for prompt in other}
    assert sum(shared_tokens(first + other, 16)) == sum(shared_tokens(first, 16)) + sum(shared_tokens(other, 16))


@pytest.mark.parametrize(
    "length",
    [
        Uniform(low=3, high=9),
        LogNormal(median=50, sigma=0.7, low=10, high=200),
        LogNormal(median=100_000, sigma=4, low=100_000, high=100_000),
        LogNormal(median=100, sigma=0.001, low=1, high=1_000_000),
    ],
)
def test_lengths_stay_inside(length):
    values = draw_lengths(length, 2000, np.random.default_rng(0))
    assert values.dtype == np.int64
    assert values.min() >= length.low and values.max() <= length.high


def test_lognormal_is_the_one_drawn_again_outside_its_bounds():
    length = LogNormal(median=60, sigma=0.9, low=20, high=150)
    rng = np.random.default_rng(1)
    drawn = np.rint(rng.lognormal(np.log(60), 0.9, 200_000))
    drawn = drawn[(drawn >= 20) & (drawn <= 150)]
    values = draw_lengths(length, 20_000, rng)
    shares = np.linspace(0.05, 0.95, 19)
    assert np.quantile(values, shares) == pytest.approx(np.quantile(drawn, shares), abs=3)


def test_output_lengths():
    prompts = make_prompts(workload(output=Uniform(low=2, high=6)), 0, IDS)
    assert {prompt.max_tokens for prompt in prompts} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("scale", "lengths", "outputs"), [(1, [600, 1024, 5], [3, 30, 1]), (0.1, [60, 102, 1], [1, 3, 1])]
)
def test_a_trace_shares_what_its_hashes_share(tmp_path, scale, lengths, outputs):
    rows = [(600, 3, [7, 8]), (1024, 30, [7, 9]), (5, 1, [10])]
    names = ("input_length", "output_length", "hash_ids")
    lines = [{"timestamp": 0, **dict(zip(names, row, strict=True))} for row in rows]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    config = Workload(arrivals=Trace(file=tmp_path / "trace", scale=scale), num_requests=3)
    prompts = make_prompts(config, 0, IDS)
    assert [len(prompt.ids) for prompt in prompts] == lengths
    assert [prompt.max_tokens for prompt in prompts] == outputs
    block = round(512 * scale)
    assert block <= common(prompts[0].ids, prompts[1].ids) < block + 3
    assert common(prompts[0].ids, ids_of(config, 1)[0]) < 3


def naive_shared(prompts, block_size):
    answers = []
    for index, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:index]:
            both = min(common(prompt, earlier), len(prompt) - 1)
            best = max(best, both // block_size * block_size)
        answers.append(best)
    return answers


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=12),
    st.sampled_from([1, 2, 3, 4]),
)
def test_shared_tokens_equals_the_naive_one(prompts, block_size):
    assert shared_tokens(prompts, block_size) == naive_shared(prompts, block_size)


def test_one_token_of_a_repeated_prompt_is_left():
    prompt = list(range(32))
    assert shared_tokens([prompt, prompt, prompt + [1]], 16) == [0, 16, 32]


def mixed(num_requests, **shares):
    classes = [
        LoadClass(name=name, share=share, prompt_tokens=Constant(value=100 + number), output_tokens=HUNDRED, reuse=0.5)
        for number, (name, share) in enumerate(shares.items())
    ]
    return Workload(arrivals=Closed(concurrency=1), num_requests=num_requests, classes=tuple(classes))


@given(st.integers(2, 60), st.lists(st.floats(1, 20), min_size=1, max_size=4), st.integers(0, 3))
def test_a_mixed_load_has_its_shares(num_requests, shares, seed):
    names = dict(zip("abcd", shares, strict=False))
    expected = [num_requests * share / sum(shares) for share in shares]
    try:
        prompts = make_prompts(mixed(num_requests, **names), seed, IDS)
    except ValueError as error:
        assert "has no request among" in str(error) and min(expected) < 1
        return
    counts = np.bincount([prompt.load_class for prompt in prompts], minlength=len(shares))
    assert counts.sum() == num_requests and np.abs(counts - expected).max() <= 1
    assert all(len(prompt.ids) == 100 + prompt.load_class for prompt in prompts)


def test_classes_are_mixed_and_share_nothing():
    prompts = make_prompts(mixed(40, a=1, b=1), 3, IDS)
    order = [prompt.load_class for prompt in prompts]
    assert sorted(order) == [0] * 20 + [1] * 20 and order not in (sorted(order), sorted(order)[::-1])
    assert order != [prompt.load_class for prompt in make_prompts(mixed(40, a=1, b=1), 4, IDS)]
    assert prompts == make_prompts(mixed(40, a=1, b=1), 3, IDS)
    for one in prompts:
        for other in prompts:
            if one.load_class != other.load_class:
                assert common(one.ids, other.ids) < 3
    assert shared_tokens([prompt.ids for prompt in prompts if prompt.load_class == 1], 16).count(48) == 19


def test_a_class_alone_is_a_plain_load():
    plain = workload(20, prompt=HUNDRED, output=HUNDRED, reuse=0.5)
    assert make_prompts(mixed(20, a=1), 5, IDS) == make_prompts(plain, 5, IDS)
