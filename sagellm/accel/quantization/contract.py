"""Contract of a quantization method: `sagellm check quantizer module:Class`."""

import json
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.calibration import Calibration
from sagellm.accel.quantization.profile import QuantizationProfile
from sagellm.core.contract import Broke, Played, Report, Scenario, Suite
from sagellm.core.errors import SageError
from sagellm.models.quantized import PARTS, plain_weight, quantization_of, wrong_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "has a name and can be built",
    "raises_nothing": "quantizes a tiny Llama without raising",
    "layout": "writes a quantization_config that engines know, and all tensors of its layout in their shapes",
    "values": "returns the weights that its tensors stand for",
    "near": "keeps the outputs of each layer, within half of their size",
    "others": "leaves embeddings and the output layer as they were",
    "same_function": "changes the model's logits no more than the rounding of its weights does",
    "deterministic": "writes the same tensors for the same model and texts",
    "profile": "names itself and its bits in the profile",
}
SHAPE = dict(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, vocab_size=512, dtype="float32",
    max_position_embeddings=256,
)  # fmt: skip
PIECES, LENGTH = 16, 64
LARGEST_ERROR, LARGEST_LOSS = 0.5, 0.5  # relative, of a layer's outputs and of the logits
ROUNDING = 1e-3  # of scales in half precision
Make = Callable[..., BaseQuantizer]


def tiny_model(make: Make, seed: int, report: Report) -> Played:
    """Quantize a tiny random model twice, and read what was written."""
    from sagellm.demo_model.random_model import write_random_model

    with tempfile.TemporaryDirectory(prefix="sagellm-check-") as place:
        source = write_random_model(Path(place) / "model", architecture="llama", seed=seed, **SHAPE)
        values: dict[str, torch.Tensor] = {}
        found = [_quantized(_watched(make(), values), source, Path(place) / f"copy{number}", report) for number in range(2)]
        _read(found[0], Path(place) / "copy0", source, values, report)
        tensors = [_tensors(Path(place) / f"copy{number}") for number in range(2)]
        if tensors[0].keys() != tensors[1].keys() or any(not _equal(tensors[0][name], tensors[1][name]) for name in tensors[0]):
            report("deterministic", "quantized again, the folder has other tensors.")
    return Played(2, set(RULES))


def _watched(quantizer: BaseQuantizer, values: "dict[str, torch.Tensor]") -> BaseQuantizer:
    """Note the weights that a quantizer returns, by the name of the layer."""
    quantize_layer, numbers = quantizer.quantize_layer, count()

    def watched(layer: Any, sites: Any) -> Any:
        found, number = quantize_layer(layer, sites), next(numbers)
        values.update({f"model.layers.{number}.{name}": one.values for name, one in found.items()})
        return found

    quantizer.quantize_layer = watched  # type: ignore[method-assign]
    return quantizer


def _quantized(quantizer: BaseQuantizer, source: Path, out: Path, report: Report) -> QuantizationProfile:
    if not (isinstance(getattr(quantizer, "name", None), str) and quantizer.name):
        report("builds", "it has no name; give the class a text `name`.")
        raise Broke
    try:
        return quantizer.quantize(source, Calibration.default(PIECES, LENGTH), out)
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"quantize raised {type(error).__name__}: {error}")
        raise Broke from error


def _read(
    profile: QuantizationProfile, folder: Path, source: Path, values: "dict[str, torch.Tensor]", report: Report
) -> None:
    import torch

    if not 1 <= profile.weight_bits <= 16 or not profile.method:
        report("profile", f"it has method {profile.method!r} and {profile.weight_bits} bits.")
    tensors, originals = _tensors(folder), _tensors(source)
    try:
        known = quantization_of(json.loads((folder / "config.json").read_text()))
        wrong = wrong_tensor(known, {name: list(tensor.shape) for name, tensor in tensors.items()}) if known else "has none"
    except SageError as error:
        report("layout", str(error))
        raise Broke from error
    if wrong:
        report("layout", f"the folder {wrong}.")
        raise Broke
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in originals and not _equal(tensors.get(name), originals[name]):
            report("others", f"{name} has changed.")
    weights = dict(tensors)
    for name, error in profile.report.items():
        layer = {part: weights.pop(f"{name}.{part}") for part in (*PARTS[known.method], "g_idx") if f"{name}.{part}" in weights}
        weight = weights[f"{name}.weight"] = plain_weight(known, layer)
        off = float((weight - values[name]).abs().max() / values[name].abs().max().clamp(min=1e-12))
        if not off <= ROUNDING:
            report("values", f"tensors of {name} stand for weights that are off by {off:.2g} of the largest one.")
        if error.relative > LARGEST_ERROR:
            report("near", f"outputs of {name} are off by {error.relative:.2f} of their size.")
    _compare(weights, source, report)
    missing = [name for name in originals if name not in weights and not name.startswith("lm_head")]
    if missing:
        report("layout", f"the folder lacks {missing[0]}.")
    if any(not torch.isfinite(tensor.float()).all() for tensor in weights.values()):
        report("values", "a weight is no number.")


def _compare(weights: "dict[str, torch.Tensor]", source: Path, report: Report) -> None:
    """Compare the model that the tensors stand for with the original, on texts of calibration."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = Calibration.default(PIECES, LENGTH).tokens(AutoTokenizer.from_pretrained(source))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        before = model(tokens).logits
        wrong = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
        if wrong.unexpected_keys:
            report("layout", f"the folder has a tensor {wrong.unexpected_keys[0]} that no engine reads.")
        after = model(tokens).logits
    loss = float((after - before).norm() / before.norm())
    if not loss <= LARGEST_LOSS:
        report("same_function", f"logits are off by {loss:.2f} of their size.")


def _tensors(folder: Path) -> "dict[str, torch.Tensor]":
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _equal(one: Any, other: Any) -> bool:
    import torch

    return one is not None and one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


SUITE = Suite("quantization method", RULES, {"tiny_model": Scenario(tiny_model)}, example={"head_bits": 16})
