"""Native products against plain formulas in float64: shapes, dtypes, formats, instruction sets."""


import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sagellm import _core
from sagellm.engines.lmdeploy.cpu.packed import PackedEmbedding, PackedGate, PackedWeight, computing_in
from sagellm.models.levels import FLOAT8, FLOAT8_SHIFT, LEVELS4, LEVELS5, LEVELS6, LEVELS8, Levels
from tests.engines.lmdeploy.cpu.plain_step import BITS, DTYPES, ISAS, each_isa


def test_an_instruction_set_that_is_not_there():
    with pytest.raises(ValueError, match="no kernels of the instruction set 'mmx'; known are plain, avx2"):
        _core.CpuKernels("bfloat16", "mmx")
    with pytest.raises(ValueError, match="dtype is 'float16'; use float32 or bfloat16"):
        _core.CpuKernels("float16")


@each_isa()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 48, 64), (7, 33, 17), (13, 320, 96), (200, 70, 50), (97, 32, 2), (29, 40, 603)]
)
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


@each_isa([isa for isa in ISAS if _core.CpuKernels("bfloat16", isa).has_8_bits])
@pytest.mark.parametrize("form", [LEVELS4, LEVELS5, LEVELS6, LEVELS8])
def test_sums_of_the_largest_products_fit(isa, form):
    largest = -128 if form == LEVELS8 else 2 ** BITS[form] - 1
    levels = few_bits(48, 64, form, 64)
    levels.values[:] = largest
    levels.values[1::2] = 127 if form == LEVELS8 else 0
    x = torch.ones(5, 64, dtype=torch.bfloat16)
    x[1], x[2, ::2] = -1, -1
    with computing_in("int8"):
        out = PackedWeight(values_of(levels).bfloat16(), levels=levels).multiply(x, wide=True)
    torch.testing.assert_close(out.double(), F.linear(x.double(), values_of(levels)), rtol=1e-5, atol=1e-4)


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
