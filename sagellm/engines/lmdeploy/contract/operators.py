"""Operators that LMDeploy's models ask of a device, each against a plain formula in float64."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sagellm.core.contract import Report

__all__ = ["RULES", "DeviceOperators", "check_operators", "missing_operators"]

RULES = {
    "linear": "multiplies by a weight and adds its bias",
    "norms": "norms rows, with a residual too, by the given epsilon",
    "activations": "gates by SiLU and by both forms of GELU",
    "rotary": "computes rotary angles, scaled ones too, and turns queries and keys by them",
    "attention": "attends to all earlier tokens and no others, over blocks in any order",
    "attention_kinds": "keeps to windows, caps scores, and counts sinks",
    "unwritten": "ignores numbers in slots of the cache that no token was written to, NaN too",
    "experts": "weighs the experts of each token",
    "sampling": "draws by the probabilities, by seed and place alone",
}
BLOCK, NUM_BLOCKS = 16, 48
# Error of a result relative to its own size.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.006}


class DeviceOperators(NamedTuple):
    """A device's operators.

    Attributes:
        backend: its `OpsBackend`.
        device: of tensors.
        dtypes: types that it computes in.
    """

    backend: Any
    device: str
    dtypes: tuple[torch.dtype, ...]

    def build(self, operator: str, *arguments: Any, **options: Any) -> Any:
        """Build an operator by the name of LMDeploy's `OpType`."""
        from lmdeploy.pytorch.backends.base import OpType

        return self.backend.get_layer_impl_builder(OpType[operator]).build(*arguments, **options)

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Random numbers of the generator that was seeded last, on the device."""
        return (scale * torch.randn(*shape)).to(self.device, dtype)


Check = Callable[[DeviceOperators, torch.dtype], Iterator[tuple[str, Tensor, Tensor]]]  # what, found, expected


def missing_operators(ops: DeviceOperators) -> dict[str, str]:
    """Operators that the device cannot build, with its reason."""
    found = {}
    for name, arguments, options in (
        ("Linear", (32, 32), {"bias": True}), ("RMSNorm", (32,), {}), ("LayerNorm", (32,), {}), ("SiluAndMul", (), {}),
        ("GeluAndMul", (), {"approximate": "tanh"}), ("RotaryEmbedding", (16,), {}), ("ApplyRotaryEmb", (), {}),
        ("PagedAttention", (4, 16), {"num_kv_heads": 2}), ("SoftmaxTopK", (2,), {}), ("FusedMoE", (2, 4), {}),
        ("MultinomialSampling", (), {}), ("LoRA", (), {}), ("LinearW8A8", (32, 32), {}),
        ("LinearW4A16", (128, 128, 4, 128), {}), ("LinearBlockedF8", (128, 128), {}),
        ("FusedMoEW8A8", (2, 4), {}), ("FusedMoEBlockedF8", (2, 4), {}),
    ):  # fmt: skip
        try:
            ops.build(name, *arguments, **options)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".rstrip(": ")
    for kind, options in ATTENTION_KINDS.items():
        try:
            ops.build("PagedAttention", 4, 16, num_kv_heads=2, **options)
        except Exception as error:
            found[f"PagedAttention, {kind}"] = f"{type(error).__name__}: {error}"
    return found


def check_operators(ops: DeviceOperators, seed: int, report: Report, missing: dict[str, str]) -> set[str]:
    """Compare every operator that there is; returns the rules that were tried."""
    seen = set()
    for rule, needed, check in CHECKS:
        if any(name in missing for name in needed):
            continue
        seen.add(rule)
        for dtype in ops.dtypes:
            torch.manual_seed(seed)
            name = str(dtype).removeprefix("torch.")
            try:
                for what, found, expected in check(ops, dtype):
                    _compare(rule, f"{what}, {name}", found, expected, TOLERANCE[dtype], report)
            except Exception as error:  # whatever the device's kernels raise
                report(rule, f"{', '.join(needed)}, {name}: {type(error).__name__}: {error}")
    return seen


def _compare(rule: str, what: str, found: Tensor, expected: Tensor, tolerance: float, report: Report) -> None:
    found = found.detach().double().cpu()
    if found.shape != expected.shape:
        return report(rule, f"{what}: the result is {tuple(found.shape)}, not {tuple(expected.shape)}.")
    error = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
    if not error <= tolerance:
        report(rule, f"{what}: an error of {error:.2g} of the largest number; allowed is {tolerance:g}.")


def _exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.double().cpu() for tensor in tensors)


def _linear(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for rows, inputs, outputs in ((1, 64, 48), (3, 33, 70), (130, 96, 32)):
        for has_bias in (False, True):
            x, weight = ops.random(1, rows, inputs, dtype=dtype), ops.random(outputs, inputs, dtype=dtype)
            bias = ops.random(outputs, dtype=dtype) if has_bias else None
            impl = ops.build("Linear", inputs, outputs, bias=has_bias, dtype=dtype)
            weight_, bias_ = impl.update_weights(weight, bias)
            expected = F.linear(*_exact(x, weight), None if bias is None else bias.double().cpu())
            yield f"{rows} rows, {inputs} to {outputs}, bias {has_bias}", impl.forward(x, weight_, bias_), expected


def _norms(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for size, epsilon in ((64, 1e-6), (96, 0.5)):
        x, residual, weight = (ops.random(*shape, dtype=dtype) for shape in ((1, 7, size), (1, 7, size), (size,)))
        norm = ops.build("RMSNorm", size, eps=epsilon)
        rows, others, factor = _exact(x, residual, weight)

        def plain(value: Tensor, factor: Tensor = factor, epsilon: float = epsilon) -> Tensor:
            return value / (value.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * factor

        yield f"RMS norm of {size}, epsilon {epsilon}", norm.forward(x.clone(), weight), plain(rows)
        out, total = norm.forward(x.clone(), weight, residual.clone())
        yield f"RMS norm of {size} with a residual", out, plain(rows + others)
        yield f"sum with the residual of {size}", total, rows + others


def _layer_norms(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    x, weight, bias = (ops.random(*shape, dtype=dtype) for shape in ((1, 7, 64), (64,), (64,)))
    found = ops.build("LayerNorm", 64, eps=1e-5).forward(x, weight, bias)
    rows, factor, offset = _exact(x, weight, bias)
    yield "layer norm", found, F.layer_norm(rows, (64,), factor, offset, 1e-5)


def _silu(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = ops.random(1, 5, 96, dtype=dtype)
    gate, up = _exact(x)[0].chunk(2, -1)
    yield "SiLU", ops.build("SiluAndMul", inplace=False).forward(x.clone()), F.silu(gate) * up


def _gelu(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = ops.random(1, 5, 96, dtype=dtype, scale=2.0)
    gate, up = _exact(x)[0].chunk(2, -1)
    for form in ("none", "tanh"):
        found = ops.build("GeluAndMul", approximate=form).forward(x.clone())
        yield f"GELU, {form}", found, F.gelu(gate, approximate=form) * up


def _angles(dim: int, base: float, positions: list[int], kind: str) -> Tensor:
    """Angles of each position, [tokens, dim / 2], as the papers have them."""
    frequencies = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind == "LinearScaling":
        frequencies = frequencies / 4
    elif kind == "Llama3":
        lengths = 2 * math.pi / frequencies
        share = ((256 / lengths - 1) / (4 - 1)).clamp(0, 1)  # of 256 tokens; factors 1 and 4
        frequencies = frequencies / 8 * (1 - share) + frequencies * share
    return torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies


def _rotary_angles(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    from lmdeploy.pytorch.backends.rotary_embedding import Llama3Parameters, RopeType

    scalings: dict[str, dict[str, Any]] = {
        "Default": {}, "LinearScaling": {"scaling_factor": 4.0},
        "Llama3": {"scaling_factor": 8.0, "llama3_params": Llama3Parameters(1.0, 4.0, 256)},
    }  # fmt: skip
    positions = [0, 1, 5, 63, 500]
    for kind, options in scalings.items():
        impl = ops.build("RotaryEmbedding", 32, 1024, 10000, emb_type=RopeType[kind], **options)
        if isinstance(impl, torch.nn.Module):
            impl = impl.to(ops.device)
        x = torch.zeros(1, len(positions), 32, dtype=dtype, device=ops.device)
        cos, sin = impl(x, torch.tensor([positions], device=ops.device))
        angles = _angles(32, 10000, positions, kind).repeat(1, 2)[None]
        yield f"cosines, {kind}", cos, angles.cos()
        yield f"sines, {kind}", sin, angles.sin()


def _rotary_turn(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    query, key = (ops.random(6, heads, 32, dtype=dtype) for heads in (4, 2))
    angles = _angles(32, 10000, [0, 1, 2, 17, 18, 900], "Default").repeat(1, 2)
    cos, sin = (part.to(ops.device, dtype) for part in (angles.cos(), angles.sin()))

    def turned(states: Tensor) -> Tensor:
        states, *parts = _exact(states, cos, sin)
        other = torch.cat((-states[..., 16:], states[..., :16]), -1)
        return states * parts[0][:, None] + other * parts[1][:, None]

    expected = turned(query), turned(key)
    found = ops.build("ApplyRotaryEmb").forward(query.clone(), key.clone(), cos, sin, inplace=False)
    for name, one, other in zip(("queries", "keys"), found, expected, strict=True):
        yield f"turned {name}", one, other


ATTENTION_KINDS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 24}, "capped scores": {"logit_softcapping": 5.0}, "sinks": {"learnable_sink": True},
}  # fmt: skip
# New tokens and earlier ones of each sequence of a step.
PROMPTS = [(16, 0), (33, 0), (1, 0)]
STEPS = {
    "prompts": PROMPTS, "a prompt behind a prefix": [(20, 32), (30, 3)], "a decode": [(1, 15), (1, 16), (1, 90), (1, 1)],
}  # fmt: skip


def _attention(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for heads, kv_heads in ((4, 4), (4, 2), (6, 1)):
        for what, lengths in STEPS.items():
            yield f"{what}, {heads} heads over {kv_heads}", *_attend(ops, dtype, heads, kv_heads, lengths, {})


def _unwritten(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    for what, lengths in STEPS.items():
        yield what, *_attend(ops, dtype, 4, 2, lengths, {}, unwritten=float("nan"))


def _attention_kind(kind: str) -> Check:
    def check(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
        for what, lengths in STEPS.items():
            yield f"{kind}, {what}", *_attend(ops, dtype, 4, 2, lengths, ATTENTION_KINDS[kind])

    return check


def _attend(
    ops: DeviceOperators, dtype: torch.dtype, heads: int, kv_heads: int, lengths: list[tuple[int, int]],
    options: dict[str, Any], unwritten: float = 1000.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A step over the operator's own cache. Earlier tokens are brought there by the operator, one sequence at a time.

    Args:
        unwritten: the numbers in all other slots.
    """
    dim = 32
    impl = ops.build("PagedAttention", heads, dim, scale=dim**-0.5, num_kv_heads=kv_heads, **options)
    caches = tuple(
        torch.full((NUM_BLOCKS, *shape(BLOCK, kv_heads, dim, dtype)), unwritten, dtype=dtype, device=ops.device)
        for shape in (ops.backend.get_k_block_shape, ops.backend.get_v_block_shape)
    )
    widest = max(-(-(new + past) // BLOCK) for new, past in lengths)
    order, tables = torch.randperm(NUM_BLOCKS).tolist(), []
    for new, past in lengths:
        need = -(-(new + past) // BLOCK)
        tables.append([order.pop() for _ in range(need)] + [0] * (widest - need))
    texts = [
        tuple(ops.random(new + past, count, dim, dtype=dtype) for count in (heads, kv_heads, kv_heads))
        for new, past in lengths
    ]
    more = {}
    if options.get("learnable_sink"):
        more["learnable_sink"] = ops.random(heads, dtype=dtype)

    def step(rows: list[int], begins: list[int], ends: list[int]) -> Tensor:
        parts = [torch.cat([texts[row][part][b:e] for row, b, e in zip(rows, begins, ends, strict=True)]) for part in range(3)]
        new = [e - b for b, e in zip(begins, ends, strict=True)]
        metadata = _metadata(ops, [tables[row] for row in rows], new, ends, caches)
        return impl.forward(*parts, *caches, metadata, **more)

    for row, (_, past) in enumerate(lengths):
        if past:
            step([row], [0], [past])
    every = list(range(len(lengths)))
    found = step(every, [past for _, past in lengths], [new + past for new, past in lengths])
    expected = [
        _plain_attention(*_exact(*text), past, options, *_exact(*more.values()))
        for text, (_, past) in zip(texts, lengths, strict=True)
    ]
    return found, torch.cat(expected)


def _metadata(
    ops: DeviceOperators, tables: list[list[int]], new: list[int], ends: list[int], caches: tuple[Tensor, ...]
) -> Any:
    """The attention metadata that the back end makes of a step."""
    from lmdeploy.pytorch.model_inputs import StepContext

    def integers(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=ops.device)

    queries, keys = integers(new), integers(ends)
    model = SimpleNamespace(use_flash_mla=False, num_attention_heads=0, model_paradigm="ar")
    context = StepContext(
        input_ids=integers([[0] * sum(new)]), model_config=model, block_offsets=integers(tables, torch.int32),
        position_ids=None, attention_mask=None, q_seqlens=queries, kv_seqlens=keys,
        q_start_loc=queries.cumsum(0) - queries, kv_caches=[caches], is_decoding=max(new) == 1,
        sum_kv_seqlen=sum(ends), max_kv_seqlen=max(ends),
    )  # fmt: skip
    return ops.backend.update_step_context(context).attn_metadata


def _plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, past: int, options: dict[str, Any], sinks: Tensor | None = None
) -> Tensor:
    """[new, heads, dim] of one sequence, whose `query`, `keys` and `values` have all tokens."""
    share = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    if cap := options.get("logit_softcapping"):
        scores = cap * (scores / cap).tanh()
    distance = torch.arange(len(query))[:, None] - torch.arange(len(keys))[None]
    allowed = (distance >= 0) & (distance < options.get("sliding_window", len(keys)))
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)[past:]


def _top_k(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    logits = ops.random(9, 8, dtype=dtype, scale=3.0)
    weights, ids = ops.build("SoftmaxTopK", 3).forward(logits)
    best = _exact(logits)[0].softmax(-1).topk(3)
    yield "weights of the best experts", weights, best.values
    yield "the best experts", _exact(logits)[0].gather(1, ids.cpu()), _exact(logits)[0].gather(1, best.indices)


def _experts(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    num, hidden, size = 4, 48, 40
    x, gate_up, down = (
        ops.random(*shape, dtype=dtype, scale=0.3) for shape in ((9, hidden), (num, 2 * size, hidden), (num, hidden, size))
    )
    ids = torch.stack([torch.randperm(num)[:2] for _ in range(9)]).to(ops.device)
    weights = torch.rand(9, 2).to(ops.device)
    rows, first, second, shares = _exact(x, gate_up, down, weights)
    for renormalize in (False, True):
        impl = ops.build("FusedMoE", 2, num, renormalize=renormalize, hidden_dim=hidden)
        found = impl.forward(x.clone(), weights, ids, *impl.update_weights(gate_up, down))
        each = shares / shares.sum(-1, keepdim=True) if renormalize else shares
        expected = torch.zeros(9, hidden, dtype=torch.float64)
        for token in range(9):
            for place, expert in enumerate(ids[token].tolist()):
                gate, up = (first[expert] @ rows[token]).chunk(2)
                expected[token] += each[token, place] * (second[expert] @ (F.silu(gate) * up))
        yield f"two experts of {num}, renormalize {renormalize}", found, expected


def _sampling(ops: DeviceOperators, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    if dtype != ops.dtypes[0]:  # probabilities are float32 whatever the model computes in
        return
    count, probabilities = 6000, torch.tensor([0.1, 0.0, 0.5, 0.0, 0.4])
    impl = ops.build("MultinomialSampling")
    scores = probabilities.expand(count, -1).contiguous().to(ops.device)
    indices = torch.arange(10, 15, device=ops.device).expand(count, -1).contiguous()
    seeds, zeros = torch.arange(count, device=ops.device), torch.zeros(count, dtype=torch.int64, device=ops.device)
    drawn = impl.forward(scores, seeds, zeros, indices)
    share, yes = torch.bincount(drawn.cpu() - 10, minlength=5)[:5] / count, torch.ones(1).double()
    # A share has a standard deviation of 0.0065 at most.
    near = (share - probabilities).abs().amax(keepdim=True) < 0.03
    yield "shares of 6,000 draws", near.double(), yes
    again = impl.forward(scores[:40], seeds[:40], zeros[:40], indices[:40])
    yield "the same seeds once more, in another batch", again.double(), drawn[:40].double().cpu()
    moved = impl.forward(scores, seeds, zeros + 1, indices)
    yield "another place in the text draws anew", (moved != drawn).any().double()[None], yes


# The rule of each check, and the operators that it needs.
CHECKS: tuple[tuple[str, tuple[str, ...], Check], ...] = (
    ("linear", ("Linear",), _linear), ("norms", ("RMSNorm",), _norms), ("norms", ("LayerNorm",), _layer_norms),
    ("activations", ("SiluAndMul",), _silu), ("activations", ("GeluAndMul",), _gelu),
    ("rotary", ("RotaryEmbedding",), _rotary_angles), ("rotary", ("ApplyRotaryEmb",), _rotary_turn),
    ("attention", ("PagedAttention",), _attention),
    ("unwritten", ("PagedAttention",), _unwritten),
    *(("attention_kinds", ("PagedAttention", f"PagedAttention, {kind}"), _attention_kind(kind)) for kind in ATTENTION_KINDS),
    ("experts", ("SoftmaxTopK",), _top_k), ("experts", ("FusedMoE",), _experts),
    ("sampling", ("MultinomialSampling",), _sampling),
)  # fmt: skip
