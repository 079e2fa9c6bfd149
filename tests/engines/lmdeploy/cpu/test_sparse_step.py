"""Attention to some blocks in the native step, against plain formulas in float64 with the other blocks masked."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagellm import _core
from sagellm.accel.sparsity.base import KEY_SUM_UNIT, top_blocks
from sagellm.models.levels import LEVELS4, LEVELS8
from tests.engines.lmdeploy.cpu.plain_step import (
    BLOCK,
    DTYPES,
    NUM_BLOCKS,
    TOLERANCE,
    Model,
    Step,
    a_third_of,
    each_isa,
    plain,
)

LENGTHS = [(1, 0), (1, 15), (1, 16), (1, 90), (1, 300), (1, 269)]
SHAPES = {"three heads": dict(heads=6, kv_heads=3, head_size=64), "odd": dict(heads=4, kv_heads=2, head_size=10, hidden=50)}
SPARSE = {"weights": "", "by_head": False, "whole_layers": 0, "reach": 1.0, "first": 1, "last": 1, "choose": None}


def num_blocks(length: tuple[int, int]) -> int:
    return -(-sum(length) // BLOCK)


def masks(model: Model, positions: np.ndarray, tokens: int) -> torch.Tensor:
    """`positions`: [key heads or 1, keep]. Returns bool [heads, tokens]."""
    seen = torch.zeros(len(positions), tokens, dtype=torch.bool)
    for row, chosen in zip(seen, positions, strict=True):
        for block in chosen:
            row[block * BLOCK : (block + 1) * BLOCK] = True
    return seen.expand(model.kv_heads, -1).repeat_interleave(model.heads // model.kv_heads, 0)


def written(address: int, *shape: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int64 * int(np.prod(shape))).from_address(address)).reshape(shape)


def floats(address: int, *shape: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address)).reshape(shape).copy()


class Chooser:
    """Chooses by chance, and remembers: layer -> sequence -> positions [choices, keep]."""

    def __init__(self, model: Model, lengths: list[tuple[int, int]], keep: list[int], by_head: bool) -> None:
        self.choices, self.lengths, self.keep = model.kv_heads if by_head else 1, lengths, keep
        self.chosen: dict[int, list[np.ndarray]] = {}
        self.chance = np.random.default_rng(5)

    def __call__(self, layer: int, queries: int, weights: int, result: int) -> str:
        rows = written(result, len(self.lengths), self.choices, max(self.keep))
        self.chosen[layer] = []
        for row, length, keep in zip(rows, self.lengths, self.keep, strict=True):
            last = num_blocks(length) - 1
            found = [np.sort(np.r_[self.chance.permutation(last)[: keep - 1], last]) for _ in range(self.choices)]
            row[:, :keep] = found
            self.chosen[layer].append(np.stack(found))
        return ""


def started(
    model: Model, lengths: list[tuple[int, int]], form: str = "", bounds: torch.Tensor | None = None,
    codes: torch.Tensor | None = None, sums: torch.Tensor | None = None,
):  # fmt: skip
    """A step of these sequences, whose past is in the cache."""
    step, decoder, caches, team = Step(model, lengths), model.native(), model.caches(form), _core.CpuTeam(2)
    summaries = {"bounds": bounds, "codes": codes, "key_sums": sums}
    if past := [row for row in range(len(lengths)) if lengths[row][1]]:
        step.run(model, decoder, caches, team, past, past_only=True, is_decoding=False, **summaries)

    def run(rows=None, **more):
        rows = list(range(len(lengths))) if rows is None else rows
        return step.run(model, decoder, caches, team, rows, **summaries, **more)

    return step, run


@a_third_of(dtype=DTYPES, shape=SHAPES, choice=[(False, 0), (True, 0), (True, 1)])
def test_attention_reads_the_chosen_blocks_and_no_others(isa, dtype, shape, choice):
    by_head, whole_layers = choice
    model = Model(dtype=dtype, **SHAPES[shape])
    step, run = started(model, LENGTHS)
    dense = run()
    keep = [min(3, num_blocks(length)) for length in LENGTHS]
    chooser = Chooser(model, LENGTHS, keep, by_head)
    found = run(sparse=SPARSE | {"keep": keep, "by_head": by_head, "whole_layers": whole_layers, "choose": chooser})
    assert step.fault == "" and min(chooser.chosen) == whole_layers
    for row, length in enumerate(LENGTHS):

        def sees(layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            if layer < whole_layers:
                return torch.ones(len(query), len(key), dtype=torch.bool)
            return masks(model, chooser.chosen[layer][row], len(key))  # noqa: B023

        exact = plain(model, step.texts[row], last_sees=sees)[-1]
        error = (found[row].double() - exact).norm() / exact.norm()
        assert error < TOLERANCE[dtype], f"sequence {row} is off by {error:.2g}"
        assert torch.equal(found[row], dense[row]) == (keep[row] == num_blocks(length))
    assert all(torch.equal(a, b) for a, b in zip(run(), dense, strict=True))  # it has changed nothing


def of_bounds(model: Model, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the most that queries [heads, head_size] may give to each block, [heads, blocks]."""
    blocks = [part for part in key.split(BLOCK)]
    low, high = (torch.stack([pick(part) for part in blocks], 1) for pick in (lambda p: p.amin(0), lambda p: p.amax(0)))
    return torch.maximum(query[:, None] * low, query[:, None] * high).sum(-1)


def of_spread(model: Model, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Products with mean keys, and the root of the summed squares of those with half ranges, [heads, blocks]."""
    found = []
    for part in key.split(BLOCK):
        half = (part.amax(0) - part.amin(0)) / 2
        found.append((query * part.mean(0)).sum(-1) + SPARSE["reach"] * (query * half).square().sum(-1).sqrt())
    return torch.stack(found, 1)


def of_codes(model: Model, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Products with keys in 2 bits; those of a block that is not full with the middle of its bounds, [heads, tokens]."""
    rebuilt = []
    for part in key.split(BLOCK):
        low, high = part.amin(0), part.amax(0)
        step = (high - low) / 4
        levels = ((part - low) / step.clamp_min(1e-30)).floor().clamp(0, 3) + 0.5
        rebuilt.append(low + levels * step if len(part) == BLOCK else ((low + high) / 2).expand_as(part))
    return torch.einsum("hd,khd->hk", query, torch.cat(rebuilt))


def of_keys(model: Model, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hd,khd->hk", query, key)


WEIGHTS = {"bounds": of_bounds, "spread": of_spread, "codes": of_codes, "exact": of_keys}


@each_isa()
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("form", ["", LEVELS8, LEVELS4])
@pytest.mark.parametrize("by_head", [False, True])
def test_blocks_are_chosen_by_their_weight(isa, weights, form, by_head):
    """The weights are those of formulas, and the native choice is that of the plain twin by these weights."""
    model = Model(dtype=torch.float32, layers=1, windows=(0,), **SHAPES["three heads"])
    bounds = torch.full((model.layers, NUM_BLOCKS, model.kv_heads, 2, model.head_size), float("nan"))
    codes = torch.full((*bounds.shape[:3], BLOCK * model.head_size // 4), 255, dtype=torch.uint8)
    sums = torch.full((*bounds.shape[:3], model.head_size), 7, dtype=torch.int32)
    lengths = [(1, 300), (1, 90), (1, 47)]
    kept = {"codes": (codes, None), "spread": (None, sums)}.get(weights, (None, None))
    step, run = started(model, lengths, form, bounds, *kept)
    by_block = weights in ("bounds", "spread")
    keep, seen = [5, 4, 2], {}

    def look(layer: int, queries: int, given: int, result: int) -> str:
        seen["weights"] = floats(given, len(lengths), model.kv_heads, step.tables.shape[1])
        return "only looking"

    run(sparse=SPARSE | {"keep": keep, "weights": weights, "by_head": by_head, "choose": look})
    assert step.fault == "only looking"
    found = run(sparse=SPARSE | {"keep": keep, "weights": weights, "by_head": by_head})
    for row, length in enumerate(lengths):
        blocks = num_blocks(length)
        worth = seen["weights"][row][:, :blocks]
        rows = worth if by_head else worth.sum(0, keepdims=True)
        chosen = np.stack([top_blocks(each, keep[row]) for each in rows])
        formula = {}

        def sees(layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            scores = WEIGHTS[weights](model, query, key) * model.head_size**-0.5
            given = scores.softmax(-1)
            if not by_block:
                given = torch.stack([part.sum(-1) for part in given.split(BLOCK, 1)], 1)
            formula["weights"] = given.unflatten(0, (model.kv_heads, -1)).sum(1)  # noqa: B023
            return masks(model, chosen, len(key))  # noqa: B023

        exact = plain(model, step.texts[row], last_sees=sees)[-1]
        if form == "" or by_block:
            # Codes at the edge of two levels may fall on either side, and steps are rounded to 8 bits.
            close = {"rtol": 0.1, "atol": 0.01} if weights == "codes" else {"rtol": 1e-3, "atol": 1e-5}
            assert torch.allclose(torch.from_numpy(worth).double(), formula["weights"], **close)
        if form == "":
            assert (found[row].double() - exact).norm() / exact.norm() < TOLERANCE[torch.float32]


def test_summaries_are_those_of_the_keys_whatever_the_steps_that_wrote_them():
    model = Model(dtype=torch.float32, **SHAPES["three heads"])
    shape = (model.layers, NUM_BLOCKS, model.kv_heads, 2, model.head_size)
    bounds, sums = torch.full(shape, float("nan")), torch.full((*shape[:3], model.head_size), 7, dtype=torch.int32)
    step, decoder, caches, team = Step(model, [(25, 40)]), model.native(), model.caches(), _core.CpuTeam(2)
    for past_only, is_decoding in ((True, False), (False, True)):
        more = {"past_only": past_only, "is_decoding": is_decoding, "bounds": bounds, "key_sums": sums}
        step.run(model, decoder, caches, team, [0], **more)
    step.change = {"is_repeated": True}  # its keys are in the sums
    step.run(model, decoder, caches, team, [0], **more)
    for layer, (keys, _) in enumerate(caches):
        for number, block in enumerate(step.tables[0].tolist()):
            written = keys[block][: min(BLOCK, 65 - number * BLOCK)]
            assert torch.equal(bounds[layer, block, :, 0], written.amin(0))
            assert torch.equal(bounds[layer, block, :, 1], written.amax(0))
            close = {"atol": len(written) * KEY_SUM_UNIT, "rtol": 0}
            torch.testing.assert_close(sums[layer, block].double() * KEY_SUM_UNIT, written.double().sum(0), **close)
    others = [block for block in range(NUM_BLOCKS) if block not in step.tables[0].tolist()]
    assert bounds[:, others].isnan().all() and (sums[:, others] == 7).all()


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 150), min_size=1, max_size=5), st.integers(1, 9), st.booleans(), st.integers(0, 999))
def test_any_lengths_and_budgets(pasts, keep, by_head, seed):
    torch.manual_seed(seed)
    model = Model(dtype=torch.float32, **SHAPES["three heads"])
    lengths = [(1, past) for past in pasts]
    step, run = started(model, lengths)
    each = [min(keep, num_blocks(length)) for length in lengths]
    chooser = Chooser(model, lengths, each, by_head)
    found = run(sparse=SPARSE | {"keep": each, "by_head": by_head, "choose": chooser})
    for row, length in enumerate(lengths):
        is_all = each[row] == num_blocks(length) and not chooser.chosen
        chosen = [chooser.chosen[layer][row] for layer in range(model.layers)] if chooser.chosen else []
        sees = None if is_all or not chosen else lambda layer, query, key: masks(model, chosen[layer], len(key))  # noqa: B023
        exact = plain(model, step.texts[row], last_sees=sees)[-1]
        assert (found[row].double() - exact).norm() / exact.norm() < TOLERANCE[torch.float32]


def put(values):
    def choose(layer, queries, weights, result):
        written(result, len(values))[:] = values
        return ""

    return choose


def fails(*arguments):
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("choose", "fault"),
    [(put([0, 0, 18]), "do not rise"), (put([3, 1, 18]), "do not rise"), (put([-1, 1, 18]), "do not rise"),
     (put([0, 1, 2]), "last block"), (put([0, 1, 99]), "last block"), (fails, "no idea")],
)  # fmt: skip
def test_a_bad_choice_is_told_and_reads_no_memory_of_others(choose, fault):
    model = Model(dtype=torch.float32, **SHAPES["three heads"])
    step, run = started(model, [(1, 300)])
    dense = run()
    run(sparse=SPARSE | {"keep": [3], "choose": choose})
    assert fault in step.fault
    assert torch.equal(run()[0], dense[0])


def test_steps_that_cannot_choose():
    model = Model(dtype=torch.float32)
    _, run = started(model, [(1, 300)])
    with pytest.raises(ValueError, match="says for each sequence how many it reads"):
        run(sparse=SPARSE | {"keep": [3, 3]})
    for weights in ("bounds", "spread", "codes"):
        with pytest.raises(ValueError, match="no bounds, means or codes of keys"):
            run(sparse=SPARSE | {"keep": [3], "weights": weights})
    with pytest.raises(ValueError, match="has one new token"):
        started(model, [(3, 60)])[1](sparse=SPARSE | {"keep": [2]})
    with pytest.raises(ValueError, match="decodes"):
        run(sparse=SPARSE | {"keep": [3]}, is_decoding=False)
