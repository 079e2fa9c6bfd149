"""Drawing tokens natively against LMDeploy's own way over torch, which other devices use."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from lmdeploy.pytorch.engine import logits_process
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs

from sagellm.engines.lmdeploy.cpu.operators import sampling
from sagellm.engines.lmdeploy.cpu.packed import kernels_of

ROWS, VOCABULARY = 40, 1000
TORCH_SAMPLING = FusedLogitsProcessor.sampling.__wrapped__  # without the device's way


def wanted(**more) -> SamplingInputs:
    found = SamplingInputs(
        max_top_k=1, max_num_logprobs=-1, logits_processors=[None] * ROWS, response_formats=(None,) * ROWS,
        num_ignore_eos=torch.zeros(ROWS, dtype=torch.int64), batch_size=ROWS,
    )  # fmt: skip
    for name, value in more.items():
        setattr(found, name, value)
    return found


def drawn(**more) -> SamplingInputs:
    seeds = torch.arange(ROWS) * 7 + 3
    return wanted(**dict(random_seeds=seeds, random_offsets=torch.arange(ROWS) + 11, max_top_k=0) | more)


def mixed(low: float, high: float) -> torch.Tensor:
    return torch.linspace(low, high, ROWS)


def words(*tokens: int) -> dict[str, torch.Tensor]:
    marks = torch.ones(ROWS, len(tokens), dtype=torch.bool)
    marks[::3, 0] = False
    return {"words": torch.tensor([tokens] * ROWS), "mask": marks}


BAD, STOP = words(1, 2), words(3, 4, 5)
CASES = {
    "greedy": wanted(),
    "greedy and penalty": wanted(repetition_penalty=mixed(0.5, 2), all_ids=torch.randint(VOCABULARY, (ROWS, 30))),
    "forbidden": wanted(bad_words=BAD["words"], bad_mask=BAD["mask"]),
    "no end yet": wanted(
        stop_words=STOP["words"], stop_mask=STOP["mask"], num_ignore_eos=torch.arange(ROWS) % 2, bad_words=BAD["words"],
        bad_mask=BAD["mask"],
    ),
    "all tokens": drawn(),
    "temperature": drawn(temperature=mixed(0.1, 3), max_top_k=50),
    "top-k": drawn(top_k=torch.arange(ROWS) % 9 + 1, max_top_k=9),
    "top-k of some": drawn(top_k=torch.arange(ROWS) % 3),
    "top-p": drawn(top_p=mixed(0, 1)),
    "min-p": drawn(min_p=mixed(0, 0.5)),
    "everything": drawn(
        temperature=mixed(0.5, 1.5), top_k=torch.arange(ROWS) % 40 + 2, max_top_k=41, top_p=mixed(0.3, 1), min_p=mixed(0, 0.2),
        repetition_penalty=mixed(0.8, 1.2), all_ids=torch.randint(VOCABULARY, (ROWS, 30)), bad_words=BAD["words"],
        bad_mask=BAD["mask"],
    ),
}  # fmt: skip


def is_limited(inputs: SamplingInputs) -> torch.Tensor:
    """Return the rows that choose among a part of the vocabulary.

    In a row that chooses among all tokens, torch goes through them by likelihood, and the native code by number.
    """
    found = torch.full((ROWS,), inputs.max_top_k > 0)
    for values, free in ((inputs.top_k, 0), (inputs.top_p, 1.0), (inputs.min_p, 0.0)):
        found |= False if values is None else values != free
    return found


def by_torch(
    logits: torch.Tensor, inputs: SamplingInputs, way: Callable = TORCH_SAMPLING
) -> tuple[torch.Tensor, tuple | None]:
    processor = FusedLogitsProcessor(inputs, logprobs_mode="raw_logprobs")
    scores, raw = asyncio.run(processor(logits.clone()))
    tokens = way(processor, scores)
    return tokens, processor.compute_logprobs(raw, tokens)


@pytest.fixture(autouse=True)
def plain_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_process, "_multinomial_sampling", sampling.CpuMultinomialSamplingImpl().forward)


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    found = torch.randn(ROWS, VOCABULARY) * 2
    found[:, 1:6] += 6  # the likeliest ones are those that may be forbidden
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_that_of_lmdeploys_own_way(logits, name):
    inputs = CASES[name]
    found = kernels_of(torch.float32, "").sample(logits.data_ptr(), sampling.wishes_of(inputs, ROWS, VOCABULARY))
    tokens = torch.tensor([token for token, _, _ in found])
    # After LMDeploy's own penalties: the way of a step in which somebody follows a grammar.
    after, _ = by_torch(logits, inputs, lambda processor, scores: sampling.sample(scores, inputs))
    assert torch.equal(tokens, after), "a token depends on the way"
    expected, _ = by_torch(logits, inputs)
    limited = is_limited(inputs)
    assert torch.equal(tokens[limited], expected[limited])


def test_log_probabilities(logits):
    inputs = wanted(max_num_logprobs=7)
    found = kernels_of(torch.float32, "").sample(logits.data_ptr(), sampling.wishes_of(inputs, ROWS, VOCABULARY))
    _, (values, ids) = by_torch(logits, inputs)
    assert [each for _, _, each in found] == ids.tolist()
    torch.testing.assert_close(torch.tensor([each for _, each, _ in found]), values)


@pytest.mark.parametrize("name", [name for name, inputs in CASES.items() if inputs.max_top_k != 1])
def test_the_numbers_of_draws_are_known_before(logits, name):
    """Where the logits are equal, and so is the way to choose, the numbers of one token lie side by side."""
    inputs = CASES[name]
    draws, later = sampling.draws_of(inputs), sampling.draws_of(replace(inputs, random_offsets=inputs.random_offsets + 2))
    assert all(draws(row, 3).numbers[2:] == later(row, 1).numbers for row in range(ROWS))
    for row in range(0, ROWS, 8):
        given = replace(inputs, **{
            name: value[row].expand(ROWS, *value.shape[1:]) for name, value in vars(inputs).items()
            if torch.is_tensor(value) and not name.startswith("random")
        })  # fmt: skip
        rows = logits[row].expand(ROWS, -1).contiguous()
        found = kernels_of(torch.float32, "").sample(rows.data_ptr(), sampling.wishes_of(given, ROWS, VOCABULARY))
        told = [sampling.draws_of(given)(number, 1) for number in range(ROWS)]
        assert {draw.way for draw in told} == {draws(row, 1).way}
        ordered = [token for _, token in sorted((draw.numbers[0], drawn[0]) for draw, drawn in zip(told, found, strict=True))]
        assert len([token for token, _ in groupby(ordered)]) == len(set(ordered))


def test_nothing_is_drawn_where_all_are_greedy():
    assert sampling.draws_of(CASES["greedy"]) is None


@pytest.mark.parametrize("share", [{}, {"min_p": 0.02}, {"top_p": 0.9}])
def test_draws_follow_the_probabilities(share):
    torch.manual_seed(1)
    rows, size = 4000, 12
    logits = torch.randn(size)
    inputs = SamplingInputs(
        max_top_k=0, max_num_logprobs=-1, random_seeds=torch.arange(rows), random_offsets=torch.arange(rows) * 3,
        **{name: torch.full((rows,), value) for name, value in share.items()},
    )  # fmt: skip
    tokens = sampling.sample(logits.expand(rows, -1), inputs)
    weights = logits.softmax(-1)
    order = weights.argsort(descending=True)
    before = weights[order].cumsum(0) - weights[order]
    weights[order[before > share.get("top_p", 1.0)]] = 0
    weights[weights < share.get("min_p", 0.0) * weights.max()] = 0
    weights /= weights.sum()
    seen = torch.bincount(tokens, minlength=size) / rows
    assert (seen[weights == 0] == 0).all() and (seen - weights).abs().max() < 0.03


def test_rows_of_forbidden_tokens_and_of_no_numbers_give_a_token_of_the_vocabulary():
    logits = torch.stack([torch.full((9,), float("-inf")), torch.full((9,), float("nan")), torch.zeros(9)])
    inputs = SamplingInputs(max_top_k=0, random_seeds=torch.arange(3), random_offsets=torch.arange(3))
    assert all(0 <= token < 9 for token in sampling.sample(logits, inputs).tolist())


def test_not_a_number_is_the_last_of_all():
    logits = torch.randn(ROWS, VOCABULARY)
    logits[:, ::3] = float("nan")
    inputs = wanted(max_num_logprobs=40)
    found = kernels_of(torch.float32, "").sample(logits.data_ptr(), sampling.wishes_of(inputs, ROWS, VOCABULARY))
    best = logits.nan_to_num(float("-inf")).topk(40).indices
    assert [ids[1:] for _, _, ids in found] == best.tolist()


def test_wishes_that_do_not_fit():
    logits, base = torch.zeros(2, 9), {"rows": 2, "vocabulary": 9, "num_logprobs": -1}
    for wrong in ({"top_p": [1.0]}, {"seeds": [1, 2]}, {"forbidden": [1, 2]}):
        with pytest.raises(ValueError, match="wishes for sampling are not as many as the rows"):
            kernels_of(torch.float32, "").sample(logits.data_ptr(), base | wrong)
    with pytest.raises(ValueError, match="a penalized or forbidden token is outside of the vocabulary"):
        kernels_of(torch.float32, "").sample(logits.data_ptr(), base | {"seen": [9, 0]})
