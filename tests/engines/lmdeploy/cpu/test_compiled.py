"""The native step against plain formulas in float64: models, dtypes, instruction sets, caches, batches, threads."""

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sagellm import _core
from sagellm.engines.lmdeploy.cpu.cache import CachedRows
from sagellm.models.levels import FLOAT8, LEVELS4, LEVELS8
from tests.engines.lmdeploy.cpu.plain_step import (
    BLOCK,
    DTYPES,
    MODELS,
    NUM_BLOCKS,
    TOLERANCE,
    Model,
    Step,
    a_third_of,
    each_isa,
    plain,
)

CACHED_FORMS = (LEVELS4, LEVELS8, FLOAT8)
# Prompts, prompts behind a cached prefix, decodes, decodes with guesses, texts longer than a split of keys.
LENGTHS = [(40, 0), (1, 0), (1, 5), (1, 300), (5, 130), (37, 70), (1, 90), (3, 260)]


@a_third_of(dtype=DTYPES, kind=MODELS, is_decoding=[True, False])
def test_a_step_is_that_of_plain_formulas(isa, dtype, kind, is_decoding):
    model = Model(dtype=dtype, **MODELS[kind])
    step, decoder, caches, team = Step(model, LENGTHS), model.native(), model.caches(), _core.CpuTeam(2)
    rows = list(range(len(LENGTHS)))
    step.run(model, decoder, caches, team, [row for row in rows if LENGTHS[row][1]], past_only=True)
    found = step.run(model, decoder, caches, team, rows, is_decoding=is_decoding)
    errors = []  # of tokens
    for row, (new, _) in enumerate(LENGTHS):
        exact = plain(model, step.texts[row])[-new:]
        difference = found[row].double() - exact
        error = difference.norm() / exact.norm()
        if dtype is torch.bfloat16 and model.experts:
            errors += (difference.norm(dim=-1) / exact.norm(dim=-1)).tolist()
            continue
        assert error < TOLERANCE[dtype], f"sequence {row} is off by {error:.2g}"
    # A token may go through another expert, where the router nearly prefers it.
    assert np.quantile(errors or [0.0], 0.8) < TOLERANCE[dtype]
    written = int((~caches[0][0][:, :, 0, 0].isnan()).sum())
    assert written == sum(map(sum, LENGTHS)), "it wrote outside of its own slots"


def read_caches(model: Model, step: Step, caches: list, row: int) -> Iterator[torch.Tensor]:
    """The keys of a sequence, then its values, layer by layer, as the plain twin reads them."""
    slots = (step.tables[row][:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: sum(step.lengths[row])]
    for layer in caches:
        for number in range(2):
            rows = CachedRows(layer[number], layer[2 + number] if layer[2:] else None, model.head_size, number == 0)
            yield rows.read(slots, torch.float64)


# Sizes that vectors hold and that they do not, by the row and in whole numbers.
CACHED = {
    "head 16": {}, "head 48": dict(head_size=48), "head 64, capped": MODELS["gemma2"], "head 128": dict(head_size=128),
    "head 64, 8 rows": MODELS["one key head"], "head 64, windows": dict(head_size=64, windows=(24, 0)),
}  # fmt: skip
CACHES = [(form, kind) for form in CACHED_FORMS for kind in CACHED] + [("bfloat16", "head 16"), ("float32", "head 64, capped")]


@a_third_of(cache=CACHES, dtype=DTYPES, is_decoding=[True, False])
def test_attention_over_a_cache_of_another_type_is_that_of_the_numbers_in_it(isa, cache, dtype, is_decoding):
    form, kind = cache
    model = Model(dtype=dtype, **CACHED[kind])
    step, decoder, caches, team = Step(model, LENGTHS), model.native(), model.caches(form), _core.CpuTeam(2)
    rows = list(range(len(LENGTHS)))
    step.run(model, decoder, caches, team, [row for row in rows if LENGTHS[row][1]], past_only=True)
    found = step.run(model, decoder, caches, team, rows, is_decoding=is_decoding)
    for row, (new, _) in enumerate(LENGTHS):
        stored = read_caches(model, step, caches, row)
        exact = plain(model, step.texts[row], lambda _: next(stored))[-new:]  # noqa: B023
        error = (found[row].double() - exact).norm() / exact.norm()
        assert error < TOLERANCE[dtype], f"sequence {row} is off by {error:.2g}"
    (alone,) = step.run(model, decoder, caches, team, [3], is_decoding=is_decoding)
    assert torch.equal(alone, found[3])


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", CACHED_FORMS)
@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_numbers_in_a_cache_of_few_bits_are_within_half_a_step(isa, dtype, form, head_size):
    """In the first layer, whose keys and values depend on no others."""
    model = Model(dtype=dtype, head_size=head_size)
    step, decoder, caches = Step(model, [(200, 0)]), model.native(), model.caches(form)
    step.run(model, decoder, caches, _core.CpuTeam(2), [0], is_decoding=False)
    exact = []
    plain(model, step.texts[0], lambda numbers: exact.append(numbers) or numbers)
    slots = (step.tables[0][:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:200]
    for numbers, read, scales in zip(exact, read_caches(model, step, caches, 0), caches[0][2:], strict=False):
        scale = scales.flatten(0, 1)[slots][..., :1]
        half = torch.maximum(numbers.abs() / 16, scale * 2**-10) if form == FLOAT8 else scale.double() / 2
        slack = numbers.abs().amax(-1, keepdim=True) * (1e-5 if dtype is torch.float32 else 0.02)
        assert ((read - numbers).abs() <= half + slack).all()


def test_a_cache_that_does_not_fit():
    model = Model(**MODELS["odd sizes"])
    with pytest.raises(ValueError, match="need blocks of whole 16 tokens, and heads of whole words of 4 bytes"):
        Step(model, [(3, 0)]).run(model, model.native(), model.caches(LEVELS8), _core.CpuTeam(1), [0])
    model = Model()
    with pytest.raises(ValueError, match="keys and values of few bits have scales for each layer, others have none"):
        caches = [(*layer[:2], *layer) for layer in model.caches()]
        Step(model, [(3, 0)]).run(model, model.native(), caches, _core.CpuTeam(1), [0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2 moe"])
def test_a_sequence_gets_the_same_numbers_beside_any_others_and_with_any_number_of_threads(dtype, kind):
    model = Model(dtype=dtype, **MODELS[kind])
    step, decoder = Step(model, LENGTHS), model.native()
    answers = []
    for threads in (1, 3):
        team, caches = _core.CpuTeam(threads), model.caches()
        step.run(model, decoder, caches, team, [row for row in range(len(LENGTHS)) if LENGTHS[row][1]], past_only=True)
        answers.append(step.run(model, decoder, caches, team, list(range(len(LENGTHS)))))
        answers.append([step.run(model, decoder, caches, team, [row])[0] for row in range(len(LENGTHS))])
    for other in answers[1:]:
        assert all(torch.equal(one, same) for one, same in zip(answers[0], other, strict=True))


GUESSED = [
    ("llama", ""), ("windows", ""), ("one key head", ""), ("one key head", LEVELS8), ("llama", LEVELS4), ("llama", FLOAT8),
]  # fmt: skip


@a_third_of(dtype=DTYPES, guessed=GUESSED, past=[40, 240, 500])
def test_guesses_get_the_numbers_of_tokens_that_are_decoded_alone(isa, dtype, guessed, past):
    """Else speculation would change answers in bfloat16. Keys are read in splits of 256, whose number grows on the way."""
    kind, form = guessed
    model, guesses = Model(dtype=dtype, **MODELS[kind]), 31
    step, decoder, caches, team = Step(model, [(1 + guesses, past)]), model.native(), model.caches(form), _core.CpuTeam(2)
    step.run(model, decoder, caches, team, [0], past_only=True)
    (together,) = step.run(model, decoder, caches, team, [0])
    (text,) = step.texts
    for number in range(1 + guesses):
        step.lengths, step.texts = [(1, past + number)], [text[: past + number + 1]]
        (alone,) = step.run(model, decoder, caches, team, [0])
        assert torch.equal(alone[0], together[number]), f"token {number}"


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "windows", "one key head"])
@pytest.mark.parametrize("cached", [1, 64, 255, 299])
def test_a_prompt_gets_the_same_numbers_whatever_part_of_it_was_cached(isa, dtype, kind, cached):
    model = Model(dtype=dtype, **MODELS[kind])
    step, decoder, caches, team = Step(model, [(300, 0)]), model.native(), model.caches(), _core.CpuTeam(2)
    (whole,) = step.run(model, decoder, caches, team, [0], is_decoding=False)
    step.lengths = [(300 - cached, cached)]
    (rest,) = step.run(model, decoder, caches, team, [0], is_decoding=False)
    assert torch.equal(rest, whole[cached:])


def test_threads_that_lose_their_time_slices_change_nothing():
    """Eight threads, and a busy process for each core: chunks are computed again, and committed once."""
    model = Model()
    step, decoder, quiet, busy = Step(model, LENGTHS), model.native(), _core.CpuTeam(1), _core.CpuTeam(8)
    caches, rows = model.caches(), list(range(len(LENGTHS)))
    step.run(model, decoder, caches, quiet, [row for row in rows if LENGTHS[row][1]], past_only=True)
    expected = step.run(model, decoder, caches, quiet, rows)
    cores = os.sched_getaffinity(0)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in cores]
    try:
        for _ in range(10_000):
            found = step.run(model, decoder, caches, busy, rows)
            assert all(torch.equal(one, same) for one, same in zip(expected, found, strict=True))
            if busy.repeated >= 20:
                break
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert busy.repeated >= 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tokens=torch.tensor([100])), "a token is outside of the vocabulary"),
        (dict(tokens=torch.tensor([-1])), "a token is outside of the vocabulary"),
        (dict(query_lengths=torch.tensor([2])), "query lengths do not add up"),
        (dict(lengths=torch.tensor([17])), "a sequence has more tokens than its blocks hold"),
        (dict(tables=torch.tensor([[NUM_BLOCKS]])), "a block is outside of the cache"),
        (dict(positions=torch.tensor([1024])), "a position has no angles"),
    ],
)
def test_a_step_that_cannot_be(change, message):
    model = Model()
    step, decoder, caches = Step(model, [(1, 0)]), model.native(), model.caches()
    (before,) = step.run(model, decoder, caches, _core.CpuTeam(1), [0])
    step.change = {name: value.data_ptr() for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        step.run(model, decoder, caches, _core.CpuTeam(1), [0])
    step.change = {}
    assert torch.equal(step.run(model, decoder, caches, _core.CpuTeam(1), [0])[0], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(top_k=6), "a token goes through between 1 and all experts"),
        (dict(top_k=-1), "a token goes through between 1 and all experts"),
        (dict(gate_up=[]), "an expert has two matrices"),
        (dict(router=64), "a router has an output for each expert, and one for a shared expert"),
        (dict(down=32), "a feed-forward part does not fit the hidden size"),
    ],
)
def test_experts_that_cannot_be(monkeypatch, change, message):
    model = Model(**MODELS["mixtral"])
    original = _core.CpuDecoder

    def altered(kernels, shape, layers, *rest):
        experts = layers[1]["experts"]
        for name, value in change.items():
            if name == "down":
                experts["down"][2] = experts["down"][2] | {"outputs": value}
            else:
                experts[name] = experts[name] | {"outputs": value} if name == "router" else value
        return original(kernels, shape, layers, *rest)

    monkeypatch.setattr(_core, "CpuDecoder", altered)
    with pytest.raises(ValueError, match=message):
        model.native()


# ---- the next tokens


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_the_next_tokens_are_drawn_from_the_output_layer(isa, dtype, cap):
    model = Model(dtype=dtype, logit_softcap=cap)
    lengths = [(1, 5), (1, 40), (1, 300)]
    step, decoder, caches, team = Step(model, lengths), model.native(), model.caches(), _core.CpuTeam(2)
    step.run(model, decoder, caches, team, [0, 1, 2], past_only=True)
    wishes = {"rows": 3, "vocabulary": model.vocabulary, "num_logprobs": 5}
    hidden = torch.cat(step.run(model, decoder, caches, team, [0, 1, 2], wishes=wishes))
    together, logits = step.drawn, hidden.double() @ model.embedding.double().T
    logits = cap * (logits / cap).tanh() if cap else logits
    exact = logits.log_softmax(-1).topk(5)
    for row, (token, values, ids) in enumerate(together):
        assert ids == [token, *exact.indices[row].tolist()] and token == ids[1]
        torch.testing.assert_close(torch.tensor(values[1:]).double(), exact.values[row], rtol=1e-4, atol=1e-4)
        step.run(model, decoder, caches, team, [row], wishes=wishes | {"rows": 1})
        assert step.drawn == [together[row]], "a row's token depends on the other rows"


def test_sampling_of_another_vocabulary_is_refused():
    model = Model()
    step, decoder, caches = Step(model, [(1, 0)]), model.native(), model.caches()
    for wishes in ({"rows": 2, "vocabulary": 100}, {"rows": 1, "vocabulary": 99}):
        with pytest.raises(ValueError, match="sampling is for another number of tokens, or another vocabulary"):
            step.run(model, decoder, caches, _core.CpuTeam(1), [0], wishes=wishes | {"num_logprobs": -1})
