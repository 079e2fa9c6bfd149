"""The native step against plain formulas in float64: shapes, dtypes, instruction sets, batches, threads."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sagellm import _core
from sagellm.engines.lmdeploy.cpu import packed
from sagellm.engines.lmdeploy.cpu.cache import CachedRows, describe
from sagellm.engines.lmdeploy.cpu.packed import PackedEmbedding, PackedGate, PackedWeight, computing_in, kernels_of
from sagellm.models.levels import FLOAT8, FLOAT8_SHIFT, LEVELS4, LEVELS5, LEVELS6, LEVELS8, Levels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03}
BLOCK, NUM_BLOCKS = 16, 64
SIZES = ("hidden", "heads", "kv_heads", "head_size", "vocabulary")
NORMS = ("attention_norm", "feed_forward_norm", "after_attention", "after_feed_forward", "query_norm", "key_norm")


def instruction_sets() -> list[str]:
    found = []
    for isa in ("plain", "avx2", "avx512", "avx512_bf16", "amx"):
        try:
            _core.CpuKernels("bfloat16", isa)
        except ValueError:
            continue
        found.append(isa)
    return found


ISAS = instruction_sets()
# Sets between the plain one and the best one of this machine are tested by slow tests.
QUICK_ISAS = {ISAS[0], ISAS[-1]}


def each_isa(known: Iterable[str] = ISAS) -> pytest.MarkDecorator:
    """Parametrize a test by `isa`."""
    cases = [pytest.param(isa, marks=[] if isa in QUICK_ISAS else [pytest.mark.slow]) for isa in known]
    return pytest.mark.parametrize("isa", cases, indirect=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def isa(request, monkeypatch):
    monkeypatch.setattr(packed, "kernels", lambda dtype: kernels_of(dtype, request.param))
    return request.param


def a_third_of(**axes: Iterable) -> pytest.MarkDecorator:
    """Parametrize a test, which takes `isa`, by all combinations.

    Two of three are slow tests, and so are all of other instruction sets than `QUICK_ISAS`. In the others any two values of
    different axes still meet, where the other axes have three combinations or more.
    """
    chosen = [list(enumerate(values)) for values in ({"isa": ISAS} | axes).values()]
    cases = []
    for combination in itertools.product(*chosen):
        is_quick = combination[0][1] in QUICK_ISAS and sum(number for number, _ in combination) % 3 == 0
        marks = [] if is_quick else [pytest.mark.slow]
        cases.append(pytest.param(*(value for _, value in combination), marks=marks))
    return pytest.mark.parametrize(["isa", *axes], cases, indirect=["isa"])


def test_an_instruction_set_that_is_not_there():
    with pytest.raises(ValueError, match="no kernels of the instruction set 'mmx'; known are plain, avx2"):
        _core.CpuKernels("bfloat16", "mmx")
    with pytest.raises(ValueError, match="dtype is 'float16'; use float32 or bfloat16"):
        _core.CpuKernels("float16")


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 64), (7, 33, 17), (13, 320, 96), (200, 70, 50), (97, 32, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_product(isa, dtype, rows, outputs, inputs, bias):
    x, weight = torch.randn(2, rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    ready = PackedWeight(weight, b)
    out, wide = ready.multiply(x), ready.multiply(x, wide=True)
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    assert out.shape == (2, rows, outputs) and out.dtype is dtype and wide.dtype is torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-4 if dtype is torch.float32 else 0.1)
    for row in (0, rows - 1):
        assert torch.equal(ready.multiply(x[:, row]), out[:, row]), "a row's result depends on the other rows"


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 40, 100])
@pytest.mark.parametrize(("activation", "plain"), [("silu", F.silu), ("gelu", lambda x: F.gelu(x, approximate="tanh"))])
def test_gated_product(isa, dtype, size, activation, plain):
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(2 * size, 64).to(dtype)
    gate, up = (F.linear(x.double(), half.double()) for half in weight.chunk(2))
    out = PackedGate(weight, activation)(x)
    assert out.shape == (5, size) and out.dtype is dtype
    torch.testing.assert_close(out.double(), plain(gate) * up, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 33])
def test_embedding_of_a_packed_weight(dtype, inputs):
    weight, tokens = torch.randn(70, inputs).to(dtype), torch.tensor([[0, 69, 31], [32, 33, 64]])
    assert torch.equal(PackedEmbedding(PackedWeight(weight))(tokens), F.embedding(tokens, weight))


BITS = {LEVELS4: 4, LEVELS5: 5, LEVELS6: 6, LEVELS8: 8, FLOAT8: 8}
CACHED_FORMS = (LEVELS4, LEVELS8, FLOAT8)


def few_bits(outputs: int, inputs: int, form: str, block: int, is_ordered: bool = False) -> Levels:
    random = np.random.default_rng(block)
    low, high = (0, 2 ** BITS[form]) if BITS[form] < 8 else (-128, 128)
    scales, offsets = (random.normal(size=(outputs, inputs // block)).astype(np.float16) * np.float16(0.1) for _ in range(2))
    values = random.integers(low, high, (outputs, inputs)).astype(np.int8)
    if form == FLOAT8:
        values[outputs // 2 :] |= 8  # these have no number without an exponent, which is decoded in another way
    values[(values & 127) == 127] = 0 if form == FLOAT8 else values[(values & 127) == 127]  # no NaN
    order = random.permutation(inputs).astype(np.int32) if is_ordered else None
    return Levels(values, scales, offsets, form, order)


def values_of(levels: Levels) -> torch.Tensor:
    """The weights, in float64."""
    values = torch.from_numpy(levels.values)
    values = values.view(torch.float8_e4m3fn).double() / 2**FLOAT8_SHIFT if levels.format == FLOAT8 else values.double()
    scales, offsets = (torch.from_numpy(part).double().repeat_interleave(levels.block, 1) for part in levels[1:3])
    weight = values * scales + offsets
    return weight if levels.order is None else weight[:, np.argsort(levels.order)]


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "block", "is_ordered"),
    [(LEVELS4, 64, False), (LEVELS8, 64, True), (LEVELS4, 32, True), (LEVELS4, 16, False), (LEVELS8, 16, False),
     (LEVELS5, 32, False), (LEVELS6, 16, False), (LEVELS6, 32, True), (FLOAT8, 64, False), (FLOAT8, 16, True)],
)  # fmt: skip
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (290, 192)])
def test_product_of_few_bits(isa, dtype, form, block, is_ordered, outputs, inputs):
    levels = few_bits(outputs, inputs, form, block, is_ordered)
    weight = values_of(levels)
    x, b = torch.randn(200, inputs).to(dtype), torch.randn(outputs).to(dtype)
    ready = PackedWeight(weight.to(dtype), b, levels)
    out = ready.multiply(x, wide=True)
    assert ready.data.nbytes == -(-outputs // 32) * 32 * inputs * (4 + block * BITS[form] // 8) // block
    exact, size = F.linear(x.double(), weight, b.double()), F.linear(x.double().abs(), weight.abs())
    assert ((out - exact).abs() / size).max() < 1e-5
    for rows in (1, 2, 3, 4, 5, 12, 13, 25, 97):
        assert torch.equal(ready.multiply(x[:rows], wide=True), out[:rows]), "a row's result depends on the other rows"
    tokens = torch.tensor([[0, outputs - 1], [31, 32]])
    torch.testing.assert_close(PackedEmbedding(ready)(tokens), weight[tokens].to(dtype))


@each_isa()
def test_blocks_that_share_scales(isa):
    """Some kernels add up such blocks before they scale them; a scale or an offset that differs for one output ends that."""
    levels = few_bits(96, 576, FLOAT8, 64)
    scales, offsets = levels.scales.copy(), np.zeros_like(levels.offsets)
    scales[:48] = scales[:48, :1]  # of the second tile only half of the outputs have one scale
    scales[64:] = np.repeat(scales[64:, ::2], 2, 1)[:, :9]
    offsets[70, 5] = 0.5
    levels = levels._replace(scales=scales, offsets=offsets)
    weight, x = values_of(levels), torch.randn(40, 576, dtype=torch.bfloat16)
    ready = PackedWeight(weight.bfloat16(), levels=levels)
    out, exact = ready.multiply(x, wide=True), F.linear(x.double(), weight)
    assert ((out - exact).abs() / F.linear(x.double().abs(), weight.abs())).max() < 1e-5
    for rows in (1, 5, 33):
        assert torch.equal(ready.multiply(x[:rows], wide=True), out[:rows]), "a row's result depends on the other rows"


@each_isa()
def test_gated_product_of_few_bits(isa):
    levels = few_bits(80, 64, LEVELS4, 32)
    weight, x = values_of(levels).float(), torch.randn(5, 64)
    gate, up = F.linear(x, weight).chunk(2, -1)
    torch.testing.assert_close(PackedGate(weight, "silu", levels)(x), F.silu(gate) * up, rtol=1e-4, atol=1e-3)


def rounded_inputs(x: torch.Tensor, block: int) -> torch.Tensor:
    """The values that inputs have in 8 bits."""
    blocks = x.double().unflatten(-1, (-1, block))
    top = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (127 / top).float()).round() * (top / 127)).flatten(-2)


@each_isa([isa for isa in ISAS if _core.CpuKernels("bfloat16", isa).has_8_bits])
@pytest.mark.parametrize(
    ("form", "block", "outputs", "inputs"),
    [(form, block, *sizes) for sizes in ((48, 64), (290, 192)) for form, block in
     [(LEVELS4, 64), (LEVELS8, 64), (LEVELS4, 32), (LEVELS8, 32), (LEVELS4, 16), (LEVELS8, 16), (LEVELS5, 32), (LEVELS6, 16),
      (LEVELS6, 32), ("", 32)]]
    + [(LEVELS8, 192, 48, 1344), (LEVELS4, 224, 48, 1344), (LEVELS6, 96, 48, 1344), ("", 32, 48, 1344)],
)  # fmt: skip
def test_product_in_8_bits(isa, form, block, outputs, inputs):
    levels = few_bits(outputs, inputs, form, block) if form else Levels.rounded(torch.randn(outputs, inputs).numpy())
    weight = values_of(levels)
    x, b = torch.randn(200, inputs, dtype=torch.bfloat16), torch.randn(outputs, dtype=torch.bfloat16)
    with computing_in("int8"):
        ready = PackedWeight(weight.bfloat16(), b, levels)
    out, taken = ready.multiply(x, wide=True), rounded_inputs(x, block)
    exact, size = F.linear(taken, weight, b.double()), F.linear(taken.abs(), weight.abs())
    assert ((out - exact).abs() / size).max() < 1e-5
    for rows in (1, 2, 3, 4, 5, 12, 13, 25, 97):
        assert torch.equal(ready.multiply(x[:rows], wide=True), out[:rows]), "a row's result depends on the other rows"
    assert ready.multiply(torch.zeros_like(x[:1]), wide=True).double().equal(b[None].double())


def test_weights_that_come_in_full_are_rounded_to_8_bits_where_their_inputs_are_whole_blocks():
    weight = torch.randn(48, 64, dtype=torch.bfloat16)
    weight[3] = 0
    with computing_in("int8"):
        ready, other = PackedWeight(weight), PackedWeight(weight[:, :33])
    step = weight.float().abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1) / 127
    assert ((ready.rows(torch.arange(48)).float() - weight.float()).abs() <= 0.51 * step + weight.float().abs() / 256).all()
    assert ready.data.nbytes < 0.6 * weight.nbytes * 64 / 48 and "format" not in other.matrix


def test_levels_that_cannot_be_packed():
    for form, block in (("levels3", 32), (LEVELS4, 24), (LEVELS4, 512), (LEVELS5, 16)):
        with pytest.raises(ValueError, match="use plain, levels4, levels5,|a block has 16 to 256 inputs|has whole 32 inputs"):
            _core.packed_levels_bytes({"weight": 0, "bias": 0, "outputs": 32, "inputs": 192, "format": form, "block": block})
    with pytest.raises(ValueError, match="a row is outside of the weight"):
        PackedWeight(torch.zeros(32, 32)).rows(torch.tensor([32]))


# ---- a whole step


@dataclass
class Model:
    """Random weights and the facts of a small decoder."""

    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    feed_forward: int = 72
    vocabulary: int = 100
    layers: int = 2
    dtype: torch.dtype = torch.float32
    bias: bool = False
    head_norms: bool = False
    after_norms: bool = False
    windows: tuple[int, ...] = (0, 0)
    softcap: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    activation: str = "silu"
    experts: int = 0
    top_k: int = 2
    renormalize: bool = False
    expert_size: int = 40
    shared: bool = False
    mixed_layers: tuple[int, ...] = (0, 1)
    num_blocks: int = NUM_BLOCKS
    weights: list[SimpleNamespace] = field(default_factory=list)

    def __post_init__(self) -> None:
        attention, keys = self.heads * self.head_size, self.kv_heads * self.head_size

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            return (torch.randn(outputs, inputs) * 1.5 / math.sqrt(inputs)).to(self.dtype)

        def norm(size: int, wanted: bool = True) -> torch.Tensor | None:
            return 1 + 0.3 * torch.randn(size) if wanted else None

        self.embedding, self.last = torch.randn(self.vocabulary, self.hidden).to(self.dtype), norm(self.hidden)
        for number in range(self.layers):
            mixture = None
            if self.experts and number in self.mixed_layers:
                mixture = SimpleNamespace(
                    router=matrix(self.experts + self.shared, self.hidden),
                    gate_up=[matrix(2 * self.expert_size, self.hidden) for _ in range(self.experts)],
                    down=[matrix(self.hidden, self.expert_size) for _ in range(self.experts)],
                )
            self.weights.append(
                SimpleNamespace(
                    qkv=matrix(attention + 2 * keys, self.hidden), out=matrix(self.hidden, attention),
                    gate_up=matrix(2 * self.feed_forward, self.hidden), down=matrix(self.hidden, self.feed_forward),
                    mixture=mixture, is_dense=mixture is None or self.shared,
                    qkv_bias=torch.randn(attention + 2 * keys) if self.bias else None,
                    out_bias=torch.randn(self.hidden) if self.bias else None,
                    attention_norm=norm(self.hidden), feed_forward_norm=norm(self.hidden),
                    after_attention=norm(self.hidden, self.after_norms),
                    after_feed_forward=norm(self.hidden, self.after_norms),
                    query_norm=norm(self.head_size, self.head_norms), key_norm=norm(self.head_size, self.head_norms),
                )
            )  # fmt: skip

    def caches(self, form: str = "") -> list[tuple[torch.Tensor, ...]]:
        """`form`: a format of few bits, or the name of a dtype, by default the model's."""

        def cache(width: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (self.num_blocks, BLOCK, self.kv_heads, width)
            if dtype.itemsize == 1:
                return torch.full(shape, 0xAA, dtype=torch.uint8).view(dtype)
            return torch.full(shape, float("nan"), dtype=dtype)

        if form not in BITS:
            dtype = getattr(torch, form) if form else self.dtype
            return [tuple(cache(self.head_size, dtype) for _ in range(2)) for _ in range(self.layers)]
        codes = self.head_size * BITS[form] // 8, torch.float8_e4m3fn if form == FLOAT8 else torch.uint8
        return [(cache(*codes), cache(*codes), cache(2, self.dtype), cache(2, self.dtype)) for _ in range(self.layers)]

    def native(self) -> _core.CpuDecoder:
        self.kept = []

        def numbers(values: torch.Tensor | None) -> int:
            self.kept.append(values)
            return 0 if values is None else values.data_ptr()

        def packed_matrix(weight: PackedWeight) -> dict[str, int]:
            self.kept.append(weight)
            return weight.matrix

        def mixture(one: SimpleNamespace | None) -> dict | None:
            return one and {
                "router": packed_matrix(PackedWeight(one.router)),
                "gate_up": [packed_matrix(packed.pack_gate(each)) for each in one.gate_up],
                "down": [packed_matrix(PackedWeight(each)) for each in one.down],
                "top_k": self.top_k,
                "renormalize": self.renormalize,
            }

        layers = [
            {
                "qkv": packed_matrix(PackedWeight(one.qkv, one.qkv_bias)),
                "out": packed_matrix(PackedWeight(one.out, one.out_bias)),
                "gate_up": packed_matrix(packed.pack_gate(one.gate_up)) if one.is_dense else None,
                "down": packed_matrix(PackedWeight(one.down)) if one.is_dense else None,
                "experts": mixture(one.mixture),
                "window": window,
                **{name: numbers(value) for name, value in vars(one).items() if name in NORMS},
            }
            for one, window in zip(self.weights, self.windows, strict=True)
        ]
        shape = {
            "epsilon": 1e-5, "attention_scale": self.head_size**-0.5, "softcap": self.softcap,
            "embedding_scale": self.embedding_scale, "activation": self.activation, "logit_softcap": self.logit_softcap,
            **{name: getattr(self, name) for name in SIZES},
        }  # fmt: skip
        embedding = packed_matrix(PackedWeight(self.embedding))
        return _core.CpuDecoder(packed.kernels(self.dtype), shape, layers, embedding, numbers(self.last), embedding)


class Step:
    """Sequences of (new, past) tokens in scattered blocks."""

    def __init__(self, model: Model, lengths: list[tuple[int, int]]) -> None:
        self.lengths = lengths
        self.change: dict[str, int] = {}  # of what the native code is told
        free, widest = torch.randperm(model.num_blocks), max(-(-sum(one) // BLOCK) for one in lengths)
        self.tables = torch.zeros(len(lengths), widest, dtype=torch.int64)
        self.texts = [torch.randint(model.vocabulary, (sum(one),)) for one in lengths]
        for row, (new, past) in enumerate(lengths):
            need = -(-(new + past) // BLOCK)
            self.tables[row, :need], free = free[:need], free[need:]

    def run(
        self, model: Model, decoder, caches, team, rows: list[int], past_only: bool = False, is_decoding: bool = True,
        wishes: dict | None = None, sparse: dict | None = None, bounds: torch.Tensor | None = None, shares: bool = False,
        codes: torch.Tensor | None = None, key_sums: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Run the new tokens of some sequences (`past_only`: those before them) and return the hidden states of each.

        With `wishes` a token is drawn for each new one; `drawn` has them. `fault`: what was wrong with a choice of blocks.
        """
        kept, new, whole = [], [], []
        for row in rows:
            count, past = self.lengths[row]
            kept.append(self.texts[row][:past] if past_only else self.texts[row][past:])
            new.append(past if past_only else count)
            whole.append(past if past_only else count + past)
        positions = torch.cat([torch.arange(end - count, end) for count, end in zip(new, whole, strict=True)])
        table = torch.cat(angles(model, torch.arange(1024)), -1)
        tokens, queries, lengths = torch.cat(kept), torch.tensor(new), torch.tensor(whole)
        tables, hidden = self.tables[rows].contiguous(), torch.empty(len(tokens), model.hidden, dtype=model.dtype)
        summaries = {"bounds": bounds, "codes": codes, "key_sums": key_sums}
        where = {name: 0 if each is None else each.data_ptr() for name, each in summaries.items()}
        decoder.bind(describe(caches, model.head_size) | where)
        tensors = {
            "is_decoding": is_decoding, "num_tokens": len(tokens), "tokens": tokens.data_ptr(), "num_sequences": len(rows),
            "query_lengths": queries.data_ptr(), "lengths": lengths.data_ptr(), "tables": tables.data_ptr(),
            "table_width": tables.shape[1], "angles": table.data_ptr(), "num_angles": len(table),
            "positions": positions.data_ptr(), "hidden": hidden.data_ptr(), "sharing": "always" if shares else "never",
        }  # fmt: skip
        self.drawn, self.fault, self.prompt_blocks = decoder.run(team, tensors | self.change, wishes, sparse)
        return list(hidden.split(new))


def angles(model: Model, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turns = positions[:, None] / 10000 ** (torch.arange(0, model.head_size, 2) / model.head_size)
    both = torch.cat([turns, turns], -1)
    return both.cos().float().contiguous(), both.sin().float().contiguous()


def plain(
    model: Model, text: torch.Tensor, stored: Callable = lambda numbers: numbers, last_sees: Callable | None = None,
    sees: Callable | None = None,
) -> torch.Tensor:  # fmt: skip
    """Hidden states of a whole text, in float64.

    Args:
        stored: what a cache makes of the keys, and of the values, of a layer.
        last_sees: takes a layer's number, the last token's queries [heads, head_size] and all keys [tokens, heads, head_size];
            returns what that token sees, bool [heads, tokens].
        sees: the same for all tokens: queries are [tokens, heads, head_size], the result is bool [heads, tokens, tokens].
    """

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight.double(), None if bias is None else bias.double())

    def feed(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, gate_up).chunk(2, -1)
        return linear(act(gate) * up, down)

    cos, sin = (part.double()[:, None] for part in angles(model, torch.arange(len(text))))
    act = F.silu if model.activation == "silu" else lambda value: F.gelu(value, approximate="tanh")
    x = model.embedding.double()[text] * model.embedding_scale
    distance = torch.arange(len(text))[:, None] - torch.arange(len(text))[None]
    for number, (one, window) in enumerate(zip(model.weights, model.windows, strict=True)):
        both = linear(norm(x, one.attention_norm), one.qkv, one.qkv_bias).unflatten(-1, (-1, model.head_size))
        query, key, value = both.split([model.heads, model.kv_heads, model.kv_heads], 1)
        if model.head_norms:
            query, key = norm(query, one.query_norm), norm(key, one.key_norm)
        query, key = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin for part in (query, key))
        key, value = (stored(part).repeat_interleave(model.heads // model.kv_heads, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * model.head_size**-0.5
        if model.softcap:
            scores = model.softcap * (scores / model.softcap).tanh()
        seen = ((distance >= 0) & ((distance < window) | (window == 0))).repeat(model.heads, 1, 1)
        if last_sees is not None:
            seen[:, -1] &= last_sees(number, query[-1], key)
        if sees is not None:
            seen &= sees(number, query, key)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)
        part = linear(attended.flatten(1), one.out, one.out_bias)
        x = x + (norm(part, one.after_attention) if model.after_norms else part)
        normed = norm(x, one.feed_forward_norm)
        part = feed(normed, one.gate_up, one.down) if one.is_dense else torch.zeros_like(x)
        if one.mixture is not None:
            logits = linear(normed, one.mixture.router)
            if model.shared:
                part, logits = part * logits[:, -1:].sigmoid(), logits[:, :-1]
            shares, chosen = logits.softmax(-1).topk(model.top_k)
            if model.renormalize:
                shares = shares / shares.sum(-1, keepdim=True)
            shares = torch.zeros_like(logits).scatter(1, chosen, shares)
            for expert, (gate_up, down) in enumerate(zip(one.mixture.gate_up, one.mixture.down, strict=True)):
                part = part + shares[:, expert, None] * feed(normed, gate_up, down)
        x = x + (norm(part, one.after_feed_forward) if model.after_norms else part)
    return norm(x, model.last)


MODELS = {
    "llama": {},
    "odd sizes": dict(hidden=50, feed_forward=45, head_size=10, heads=6, kv_heads=3),
    "qwen2": dict(bias=True),
    "qwen3": dict(head_norms=True, head_size=32),
    "windows": dict(windows=(24, 0)),
    "gemma2": dict(after_norms=True, softcap=5.0, windows=(30, 0), embedding_scale=7.0, activation="gelu", head_size=64),
    "one key head": dict(heads=8, kv_heads=1, head_size=64),
    "mixtral": dict(experts=5, renormalize=True, expert_size=45),
    "qwen2 moe": dict(experts=9, top_k=4, shared=True, mixed_layers=(1,)),
}
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
