"""Quantization methods: the contract, faults that it must find, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sagellm.accel.quantization import Calibration, QuantizationProfile, Quantized, make_quantizer
from sagellm.accel.quantization.cache import cached_copy
from sagellm.accel.quantization.contract import SHAPE, SUITE
from sagellm.accel.quantization.groups import choose_grid
from sagellm.accel.quantization.input_order import InputOrder
from sagellm.accel.quantization.methods.awq import Awq
from sagellm.accel.quantization.methods.gptq import Gptq
from sagellm.accel.quantization.methods.int8 import Int8
from sagellm.accel.quantization.registry import QUANTIZERS
from sagellm.core.errors import QuantizationError, SageError
from sagellm.demo_model.random_model import write_random_model
from sagellm.models.base import ModelError
from sagellm.models.quantized import (
    pack_awq,
    pack_gptq,
    plain_weight,
    quantization_of,
    to_container,
    unpack_awq,
    unpack_gptq,
)
from tests.sweeps import slow_but

FEW = Calibration(("a text of few words, again and again. " * 200,), "a test", pieces=4, length=32)
VARIANTS = [(name, {}) for name in QUANTIZERS.names()] + [
    ("fp8", {"per_channel": True}), ("gptq", {"bits": 8}), ("awq", {"rounding": "nearest"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("tiny") / "model", architecture="llama", **SHAPE)


@pytest.mark.parametrize(("name", "options"), slow_but(VARIANTS, ("awq", {}), ("gptq", {"bits": 8}), ("fp8", {})), ids=str)
def test_contract(name, options):
    report = SUITE.prepare(QUANTIZERS, name, options)(rounds=1)
    assert report.passed, [result for result in report.results if not result.passed]


class _Planted(Int8):
    """A sound method, but for what `spoil` does to the tensors of a layer."""

    name = "planted"

    def quantize_layer(self, layer, sites):
        found = super().quantize_layer(layer, sites)
        return {name: Quantized(self.spoil(dict(one.tensors)), one.values) for name, one in found.items()}


class WrongScale(_Planted):
    def spoil(self, tensors):
        return tensors | {"scale": tensors["scale"] * 1.5}


class WrongShape(_Planted):
    def spoil(self, tensors):
        return tensors | {"scale": tensors["scale"].T.contiguous()}


class NoScale(_Planted):
    def spoil(self, tensors):
        return {"weight": tensors["weight"]}


class Random(_Planted):
    def spoil(self, tensors):
        return tensors | {"weight": tensors["weight"] ^ torch.randint(0, 2, tensors["weight"].shape, dtype=torch.int8)}


class Poor(Int8):
    name = "poor"

    def quantize_layer(self, layer, sites):
        linears = {name: linear for site in sites for name, linear in site.linears.items()}
        found = {}
        for name, linear in linears.items():
            ones, scale = torch.ones_like(linear.weight, dtype=torch.int8), torch.full((len(linear.weight), 1), 10.0)
            found[name] = Quantized({"weight": ones, "scale": scale}, torch.full_like(linear.weight, 10.0))
        return found


class _PlantedGroups(Awq):
    """AWQ with a fault in its zero points, or the order of its groups."""

    name = "planted"

    def quantize_layer(self, layer, sites):
        found = super().quantize_layer(layer, sites)
        return {name: Quantized(self.spoil(dict(one.tensors)), one.values) for name, one in found.items()}


class WrongZero(_PlantedGroups):
    def spoil(self, tensors):
        zeros = (unpack_awq(tensors["qzeros"], 4) + 1).clamp(max=15)
        return tensors | {"qzeros": pack_awq(zeros, 4)}


class WrongGroups(_PlantedGroups):
    def spoil(self, tensors):
        return tensors | {"scales": tensors["scales"].flip(0).contiguous(), "qzeros": tensors["qzeros"].flip(0).contiguous()}


@pytest.mark.parametrize(
    ("kind", "rules"),
    [(WrongScale, {"values"}), (WrongShape, {"layout"}), (NoScale, {"layout"}), (Random, {"deterministic"}),
     (Poor, {"near", "same_function"}), (WrongZero, {"values"}), (WrongGroups, {"values"})],
)  # fmt: skip
def test_planted_fault_is_found(kind, rules):
    report = SUITE.check(kind, rounds=1)
    broken = {result.rule for result in report.results if result.message}
    assert rules <= broken, broken


@pytest.mark.parametrize("bits", [4, 8])
def test_layouts_hold_every_level(bits):
    levels = torch.randint(0, 2**bits, (64, 32), dtype=torch.uint8)
    assert torch.equal(unpack_awq(pack_awq(levels, bits), bits), levels)
    for along in (0, 1):
        assert torch.equal(unpack_gptq(pack_gptq(levels, bits, along), bits, along), levels)


def test_awq_words_are_autoawqs():
    # AutoAWQ puts output 1 into nibble 4.
    levels = torch.zeros(1, 8, dtype=torch.uint8)
    levels[0, 1] = 5
    assert pack_awq(levels, 4).item() == 5 << 16


def gptq_layer(bits: int, size: int, is_ordered: bool) -> dict[str, torch.Tensor]:
    inputs, outputs = 128, 64
    groups = torch.arange(inputs) // size
    if is_ordered:
        groups = groups[torch.randperm(inputs)]
    return {
        "qweight": pack_gptq(torch.randint(0, 2**bits, (inputs, outputs)), bits, 0),
        "qzeros": pack_gptq(torch.randint(0, 2**bits - 1, (inputs // size, outputs)), bits, 1),
        "scales": torch.rand(inputs // size, outputs).half(), "g_idx": groups.to(torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize(("bits", "size", "is_ordered"), [(4, 32, False), (4, 32, True), (8, 64, True), (8, 128, False)])
def test_gptq_is_repacked_exactly(bits, size, is_ordered):
    group = size if size < 128 else -1
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": is_ordered}
    found, layer = quantization_of({"quantization_config": config}), gptq_layer(bits, size, is_ordered)
    orders: dict[str, torch.Tensor] = {}
    given = [(f"a.{part}", tensor) for part, tensor in layer.items()] + [("norm.weight", torch.ones(3))]
    made = dict(to_container(found, 32, iter(given), orders))
    assert set(made) == {"a.qweight", "a.qzeros", "a.scales", "norm.weight"} and ("a" in orders) == is_ordered
    levels, zeros = (unpack_awq(made[f"a.{part}"], bits).float() for part in ("qweight", "qzeros"))
    group_of = torch.arange(128) // 32
    weight = ((levels - zeros[group_of]) * made["a.scales"].float()[group_of]).T
    if is_ordered:
        weight = weight[:, orders["a"].long().argsort()]
    torch.testing.assert_close(weight, plain_weight(found, layer), rtol=0, atol=0)


def test_clipping_and_gptq_lose_less_than_rounding():
    torch.manual_seed(0)
    x = torch.randn(2000, 64) @ torch.randn(64, 256) + 0.3 * torch.randn(2000, 256)  # inputs that resemble each other
    weight, gram = torch.randn(64, 256), x.T @ x / len(x)
    grid = choose_grid(weight, 4, 64)
    rounded = grid.rounded(weight)
    clipped = choose_grid(weight, 4, 64, gram=gram).rounded(weight)
    made_up = InputOrder(gram).rounded(weight, lambda at, column: grid.of_group(at // 64).rounded(column))
    loss = {name: float(((w - weight) @ x.T).norm()) for name, w in (("rtn", rounded), ("clip", clipped), ("gptq", made_up))}
    assert loss["clip"] < loss["rtn"] and loss["gptq"] < 0.8 * loss["rtn"], loss
    assert torch.equal(grid.rounded(made_up), made_up), "values that the grid does not have"


def test_awq_with_the_rounding_of_gptq_is_off_less(tiny, tmp_path):
    """Each layer's outputs are off less, and the two ways are kept apart in the cache."""
    errors = {}
    for rounding in ("nearest", "gptq"):
        profile = Awq(rounding=rounding).quantize(tiny, FEW, tmp_path / rounding)
        assert profile.rounding == rounding
        errors[rounding] = [error.relative for error in profile.report.values()]
    assert all(gptq < nearest for gptq, nearest in zip(errors["gptq"], errors["nearest"], strict=True))
    assert cached_copy(tiny, Awq(), FEW) != cached_copy(tiny, Awq(rounding="nearest"), FEW)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [("awq", {"group_size": 128}, "group size 128 does not divide the 192 inputs of mlp.gate_proj; use 32 or 64"),
     ("awq", {"group_size": 48}, "AWQ takes 32, 64, 128"), ("gptq", {"bits": 3}, "takes 4 or 8"),
     ("awq", {"rounding": "up"}, "rounding is 'up'; AWQ takes gptq or nearest"),
     ("int8", {"head_bits": 4}, "allowed are 8 and 16"), ("smoothquant", {"strength": 2}, "allowed is 0 to 1"),
     ("nf4", {}, "unknown quantization method"), ("int8", {"group": 3}, "group")],
)  # fmt: skip
def test_refused_before_anything_is_loaded(tmp_path, name, options, words):
    model = write_random_model(tmp_path / "model", **SHAPE | {"hidden_size": 192, "intermediate_size": 384})
    with pytest.raises(SageError, match=words):
        make_quantizer(name, **options).check(model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_else_is_refused(tiny, tmp_path):
    out = tmp_path / "out"
    profile = Int8().quantize(tiny, out=out)
    assert QuantizationProfile.read(out) == profile and profile.source == str(tiny) and len(profile.report) == 14
    with pytest.raises(QuantizationError, match="quantized by smooth_quant already"):
        Int8().quantize(out, out=tmp_path / "again")
    with pytest.raises(QuantizationError, match="exists already"):
        Int8().quantize(tiny, out=out)
    with pytest.raises(QuantizationError, match="calibration text has 7 tokens; 4 pieces of 32 need at least 36"):
        Gptq(group_size=32).quantize(tiny, Calibration(("a text.",), "a test", 4, 32), tmp_path / "short")
    with pytest.raises(QuantizationError, match="cannot be read"):
        Calibration.from_file(tmp_path / "nothing.txt")
    (tmp_path / "quantization_profile.json").write_text("{")
    with pytest.raises(QuantizationError, match="is damaged"):
        QuantizationProfile.read(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert left == ["out", "quantization_profile.json"]


def test_nothing_is_left_of_a_method_that_fails_in_the_middle(tiny, tmp_path):
    class Fails(Int8):
        name = "fails"
        seen = 0

        def quantize_layer(self, layer, sites):
            self.seen += 1
            if self.seen == 2:
                raise OSError(28, "No space left on device")
            return super().quantize_layer(layer, sites)

    with pytest.raises(QuantizationError, match="No space left on device. Nothing is left"):
        Fails().quantize(tiny, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


def damaged(folder: Path, place: Path, change) -> Path:
    """A copy of a folder with other tensors."""
    from safetensors.torch import save_file

    shutil.copytree(folder, place)
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    return place


def test_damaged_checkpoints_are_refused(tiny, tmp_path):
    from sagellm.models.folder import check_folder

    whole = tmp_path / "whole"
    Awq(group_size=32).quantize(tiny, FEW, whole)
    check_folder(whole)
    name = "model.layers.1.mlp.down_proj"
    with pytest.raises(ModelError, match=f"lacks tensor {name}.scales; download it again"):
        check_folder(damaged(whole, tmp_path / "one", lambda tensors: tensors.pop(f"{name}.scales")))

    def halve(tensors):
        tensors[f"{name}.scales"] = tensors[f"{name}.scales"][::2].clone()

    with pytest.raises(ModelError, match=rf"has tensor {name}.scales of shape \[4, 128\].* needs \[8, 128\]"):
        check_folder(damaged(whole, tmp_path / "two", halve))
    config = json.loads((whole / "config.json").read_text())
    for change, words in (
        ({"quant_method": "hqq"}, "quantized by 'hqq'; known are awq, gptq, fp8, smooth_quant"),
        ({"bits": 3}, "AWQ with bits 3; allowed is 4"), ({"group_size": 100}, "group_size 100; allowed is 32 or 64 or 128"),
        ({"head_bits": 7}, "head_bits of quantization_config is 7"),
    ):  # fmt: skip
        changed = config | {"quantization_config": config["quantization_config"] | change}
        (whole / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=words):
            check_folder(whole)
