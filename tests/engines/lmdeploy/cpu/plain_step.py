"""A small random decoder with a native step and its plain twin in float64; parametrization by instruction sets."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sagellm import _core
from sagellm.engines.lmdeploy.cpu import packed
from sagellm.engines.lmdeploy.cpu.cache import describe
from sagellm.engines.lmdeploy.cpu.packed import PackedWeight
from sagellm.models.levels import FLOAT8, LEVELS4, LEVELS5, LEVELS6, LEVELS8

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.03}
BLOCK, NUM_BLOCKS = 16, 64
BITS = {LEVELS4: 4, LEVELS5: 5, LEVELS6: 6, LEVELS8: 8, FLOAT8: 8}  # of a number
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
        self.drawn, self.fault, self.prompt_blocks, _ = decoder.run(team, tensors | self.change, wishes, sparse)
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
