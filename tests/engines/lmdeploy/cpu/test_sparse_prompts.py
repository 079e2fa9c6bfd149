"""Attention of prompts to some blocks, and weights that queries give, against plain formulas in float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagellm import _core
from sagellm.models.levels import LEVELS8
from tests.engines.lmdeploy.cpu.plain_step import BLOCK, DTYPES, TOLERANCE, Model, Step, each_isa, plain

LENGTHS = [(150, 40), (33, 0), (70, 63), (1, 15), (64, 0)]
SHAPE = dict(heads=6, kv_heads=3, head_size=16)
SHARE = SHAPE["heads"] // SHAPE["kv_heads"]
TILE = 96 // SHARE
ESTIMATE = {"stride": 4, "share": 0.5, "threshold": 1.0, "min_blocks": 2, "first": 1, "last": 1, "whole_layers": 0}


class Prompts:
    """A step of prompts, of which a part may be in the cache."""

    def __init__(self, model: Model, lengths: list[tuple[int, int]], form: str = "") -> None:
        self.model, self.lengths = model, lengths
        self.step, self.decoder, self.caches = Step(model, lengths), model.native(), model.caches(form)
        self.team = _core.CpuTeam(2)
        if past := [row for row in range(len(lengths)) if lengths[row][1]]:
            self.step.run(model, self.decoder, self.caches, self.team, past, past_only=True, is_decoding=False)

    def run(self, is_decoding: bool = False, **change) -> list[torch.Tensor]:
        self.step.change = change
        rows = list(range(len(self.lengths)))
        return self.step.run(self.model, self.decoder, self.caches, self.team, rows, is_decoding=is_decoding)

    def tiles(self):
        """(sequence, first position, end, blocks before its own) of each tile."""
        for row, (new, past) in enumerate(self.lengths):
            for first in range(past, past + new, TILE):
                yield row, first, min(first + TILE, past + new), first // BLOCK

    def masks(self, chosen: list[np.ndarray], row: int) -> torch.Tensor:
        """Return which tokens each token of a sequence sees if tiles read these blocks: bool [tokens, tokens]."""
        tokens = sum(self.lengths[row])
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        for (of, first, end, before), blocks in zip(self.tiles(), chosen, strict=True):
            for block in set(range(before)) - set(blocks.tolist()) if of == row else ():
                seen[first:end, block * BLOCK : (block + 1) * BLOCK] = False
        return seen

    def error(self, found: list[torch.Tensor], row: int, sees) -> float:
        exact = plain(self.model, self.step.texts[row], sees=sees)[self.lengths[row][1] :]
        return float((found[row].double() - exact).norm() / exact.norm())


def as_choice(chosen: list[np.ndarray]) -> dict:
    return {"counts": [len(one) for one in chosen], "positions": np.concatenate(chosen).tolist()}


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_read_the_chosen_blocks_and_no_others(isa, dtype):
    prompts = Prompts(Model(dtype=dtype, **SHAPE), LENGTHS)
    assert prompts.decoder.prompt_tile == TILE
    dense, chance = prompts.run(), np.random.default_rng(3)
    chosen = [np.flatnonzero(chance.random(before) < 0.5) for *_, before in prompts.tiles()]
    found = prompts.run(prompts=as_choice(chosen))
    read = [len(one) + -(-end // BLOCK) - before for (_, _, end, before), one in zip(prompts.tiles(), chosen, strict=True)]
    assert prompts.step.prompt_blocks == sum(read)
    for row in range(len(LENGTHS)):
        error = prompts.error(found, row, lambda layer, query, key: prompts.masks(chosen, row)[None])  # noqa: B023
        assert error < TOLERANCE[dtype], f"sequence {row} is off by {error:.2g}"
    everything = prompts.run(prompts=as_choice([np.arange(before) for *_, before in prompts.tiles()]))
    assert all(torch.equal(a, b) for a, b in zip(everything, dense, strict=True))


def strip_weights(query: torch.Tensor, key: torch.Tensor, first: int, end: int, stride: int) -> torch.Tensor:
    """Return weights [kv_heads, blocks] that queries [tokens, heads, size] of a tile give to blocks by a key of each strip."""
    strips = -(-(end - first) // stride)
    rows = torch.stack([query[min(first + i, end - 1)] for i in range(strips * stride)]).unflatten(0, (strips, stride))
    keys = key[: end // stride * stride].unflatten(0, (-1, stride)).flip(1)
    scores = torch.einsum("sihd,kihd->hsk", rows, keys) * query.shape[-1] ** -0.5 / stride
    order = torch.arange(scores.shape[2])[None] - torch.arange(strips)[:, None]
    given = scores.masked_fill(order > first // stride, float("-inf")).softmax(-1).sum(1)
    blocks = torch.zeros(len(given), -(-end // BLOCK), dtype=given.dtype)
    blocks.index_add_(1, torch.arange(given.shape[1]) // (BLOCK // stride), given)
    return blocks.unflatten(0, (-1, SHARE)).sum(1)


def best(weights: np.ndarray, before: int, share: float, threshold: float, least: int) -> np.ndarray:
    """Blocks before a tile that it reads, by these weights of all of its blocks."""
    own, forced = len(weights) - before, {0, before - 1}
    most = min(before, max(0, max(least, round(share * len(weights))) - own))
    order = sorted(range(before), key=lambda block: (block not in forced, -weights[block], -block))
    chosen, mass = [], weights[before:].sum()
    for block in order[:most]:
        if len(chosen) >= min(most, max(0, least - own)) and block not in forced and mass >= threshold * weights.sum():
            break
        chosen.append(block)
        mass += weights[block]
    return np.sort(np.array(chosen, int))


@each_isa()
@pytest.mark.parametrize(("share", "threshold", "whole_layers"), [(0.5, 1.0, 0), (0.5, 1.0, 1), (1.0, 0.7, 0)])
def test_blocks_of_prompts_are_chosen_by_estimates(isa, share, threshold, whole_layers):
    prompts = Prompts(Model(dtype=torch.float32, **SHAPE), LENGTHS)
    change = {"share": share, "threshold": threshold, "whole_layers": whole_layers}
    found = prompts.run(prompts=ESTIMATE | change)
    for row in range(len(LENGTHS)):

        def sees(layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            seen = torch.ones(len(key), len(key), dtype=torch.bool).repeat(SHAPE["kv_heads"], 1, 1)
            for of, first, end, before in prompts.tiles():
                if of != row or layer < whole_layers or not before:  # noqa: B023
                    continue
                for head, weights in enumerate(strip_weights(query, key, first, end, ESTIMATE["stride"]).numpy()):
                    chosen = best(weights, before, share, threshold, ESTIMATE["min_blocks"])
                    for block in set(range(before)) - set(chosen.tolist()):
                        seen[head, first:end, block * BLOCK : (block + 1) * BLOCK] = False
            return seen.repeat_interleave(SHARE, 0)

        error = prompts.error(found, row, sees)
        assert error < TOLERANCE[torch.float32], f"sequence {row} is off by {error:.2g}"


@each_isa()
@pytest.mark.parametrize("form", ["", LEVELS8])
@pytest.mark.parametrize("is_decoding", [False, True])
def test_observed_weights_are_those_of_the_queries(isa, form, is_decoding):
    model = Model(dtype=torch.float32, **SHAPE)
    lengths = [(1, 99), (1, 15)] if is_decoding else LENGTHS
    prompts = Prompts(model, lengths, form)
    queries = [1, 0] if is_decoding else [20, 33, 1, 0, 5]
    weights = np.zeros((len(lengths), model.kv_heads, prompts.step.tables.shape[1]), np.float32)
    plainly = prompts.run(is_decoding)
    found = prompts.run(is_decoding, observed={"queries": queries, "weights": weights.ctypes.data})
    assert all(torch.equal(a, b) for a, b in zip(found, plainly, strict=True))
    for row, count in enumerate(queries):
        total = torch.zeros(model.kv_heads, weights.shape[2], dtype=torch.float64)

        def sees(layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            tokens = len(key)
            scores = torch.einsum("qhd,khd->hqk", query, key) * model.head_size**-0.5
            causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            given = scores.masked_fill(~causal, float("-inf")).softmax(-1)[:, tokens - count :].sum(1)  # noqa: B023
            blocks = torch.stack([part.sum(-1) for part in given.split(BLOCK, 1)], 1)
            total[:, : blocks.shape[1]] += blocks.unflatten(0, (model.kv_heads, -1)).sum(1)  # noqa: B023
            return causal[None]

        plain(model, prompts.step.texts[row], sees=sees)
        assert np.allclose(weights[row], total.numpy(), rtol=1e-3 if form == "" else 0.2, atol=1e-4 if form == "" else 0.05)
        assert weights[row].sum() == pytest.approx(count * model.heads * model.layers, rel=1e-4)


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(0, 70)), min_size=1, max_size=3), st.floats(0, 1), st.integers(0, 99)
)  # fmt: skip
def test_any_lengths_and_choices(lengths, chance, seed):
    torch.manual_seed(seed)
    prompts = Prompts(Model(dtype=torch.float32, **SHAPE), lengths)
    draws = np.random.default_rng(seed)
    chosen = [np.flatnonzero(draws.random(before) < chance) for *_, before in prompts.tiles()]
    found = prompts.run(prompts=as_choice(chosen))
    for row in range(len(lengths)):
        error = prompts.error(found, row, lambda layer, query, key: prompts.masks(chosen, row)[None])  # noqa: B023
        assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("counts", "positions", "fault"),
    [([0, 0, 2], [0, 0], "do not rise"), ([0, 0, 2], [1, 0], "do not rise"), ([0, 0, 1], [-1], "do not rise"),
     ([0, 0, 1], [6], "do not lie before it"), ([1, 0, 0], [0], "more blocks than lie before it"),
     ([0, 0, 3], [0, 1], "more blocks"), ([0, 0], [], "another number of tiles")],
)  # fmt: skip
def test_choices_that_do_not_fit(counts, positions, fault):
    prompts = Prompts(Model(dtype=torch.float32, **SHAPE), [(120, 0)])
    with pytest.raises(ValueError, match=fault):
        prompts.run(prompts={"counts": counts, "positions": positions})


def test_steps_that_cannot_choose_or_observe():
    def weights(queries):
        return {"queries": queries, "weights": np.zeros((1, 3, 8), np.float32).ctypes.data}

    prompts = Prompts(Model(dtype=torch.float32, **SHAPE), [(100, 0)])
    with pytest.raises(ValueError, match="does not divide the block size"):
        prompts.run(prompts=ESTIMATE | {"stride": 5})
    with pytest.raises(ValueError, match="in steps of prompts"):
        Prompts(Model(dtype=torch.float32, **SHAPE), [(1, 50)]).run(True, prompts=ESTIMATE)
    with pytest.raises(ValueError, match="without a window"):
        Prompts(Model(dtype=torch.float32, windows=(0, 20), **SHAPE), [(100, 0)]).run(prompts=ESTIMATE)
    with pytest.raises(ValueError, match="more queries are observed"):
        prompts.run(observed=weights([101]))
    with pytest.raises(ValueError, match="another number of sequences"):
        prompts.run(observed=weights([1, 1]))
