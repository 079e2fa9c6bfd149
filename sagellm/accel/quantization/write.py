"""Quantizes a folder: layer by layer, in a hidden folder that is renamed when everything is in it."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sagellm.accel.quantization.calibration import Calibration
from sagellm.accel.quantization.profile import (
    ALIGNMENT_NAME,
    PROFILE_NAME,
    LayerError,
    QuantizationProfile,
    Quantized,
)
from sagellm.accel.quantization.sizes import check_group
from sagellm.core.cached_folder import build_once
from sagellm.core.errors import QuantizationError
from sagellm.models.folder import check_folder, read_hf_config

if TYPE_CHECKING:
    import torch

    from sagellm.accel.quantization.layers import Site

__all__ = ["check_model", "quantize_folder"]

# Files of a model's folder that are written anew, or belong to its weights.
NOT_COPIED = ("config.json", "conversion.json", PROFILE_NAME, ALIGNMENT_NAME, "*.index.json")
SUFFIXES = (".json", ".jinja", ".model", ".txt")  # of a tokenizer and its settings
WEIGHTS = "model.safetensors"


class Method(Protocol):
    """The part of `BaseQuantizer` that writes nothing."""

    name: str
    needs_calibration: bool
    has_whole_groups: bool
    head_bits: int

    def profile(self) -> QuantizationProfile: ...

    def settings(self) -> dict[str, Any]: ...

    def quantize_layer(self, layer: Any, sites: "list[Site]") -> dict[str, Quantized]: ...


def check_model(quantizer: Method, model: Path) -> None:
    """Do what `BaseQuantizer.check` says."""
    check_folder(model)
    config = read_hf_config(model)
    if (found := config.get("quantization_config")) is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise QuantizationError(f"{model} is quantized by {method} already; quantize the model that it was made from.")
    if "text_config" in config:
        raise QuantizationError(f"{model} is a model of text and images, which no method here quantizes.")
    if quantizer.has_whole_groups:
        heads, group = config.get("num_attention_heads") or 1, quantizer.profile().group_size
        head_size = config.get("head_dim") or config.get("hidden_size", 0) // heads
        sizes = {"mlp.gate_proj": config.get("hidden_size"), "mlp.down_proj": config.get("intermediate_size"),
                 "self_attn.o_proj": heads * head_size}  # fmt: skip
        for name, inputs in sizes.items():
            if inputs:
                check_group(name, inputs, group)
        # LMDeploy splits outputs in whole groups too, on one rank as well.
        check_group("self_attn.k_proj", head_size * (config.get("num_key_value_heads") or heads), group, "outputs")


def quantize_folder(
    quantizer: Method, model: Path, calibration: Calibration | None, out: Path | None
) -> QuantizationProfile:
    """Do what `BaseQuantizer.quantize` says."""
    check_model(quantizer, model)
    config = read_hf_config(model)
    out = (out or model.parent / f"{model.name}-{quantizer.name}").absolute()
    if out.exists():
        raise QuantizationError(f"{out} exists already; give another folder, or remove it.")
    if quantizer.needs_calibration and calibration is None:
        calibration = Calibration.default()

    def find() -> QuantizationProfile | None:
        return None if not out.exists() else QuantizationProfile.read(out)

    try:
        build = partial(_build, quantizer, model, config, calibration)
        profile, _ = build_once(out, find, build, waiting=f"Another process is writing {out.name}; waiting for it.")
    except OSError as error:
        raise QuantizationError(f"{out} cannot be written: {error.strerror or error}. Nothing is left of it.") from None
    return profile


def _build(
    quantizer: Method, model: Path, config: dict[str, Any], calibration: Calibration | None, hidden: Path
) -> QuantizationProfile:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sagellm.accel.quantization.layers import decoder_layers, walk, walk_weights

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().requires_grad_(False)
    tensors: dict[str, torch.Tensor] = {}
    report: dict[str, LayerError] = {}
    prefix = next(name for name, module in loaded.named_modules() if module is decoder_layers(loaded))

    def visit(number: int, layer: Any, sites: list["Site"]) -> None:
        found = quantizer.quantize_layer(layer, sites)
        linears = {name: (linear, site) for site in sites for name, linear in site.linears.items()}
        if found.keys() - linears.keys():
            unknown = ", ".join(sorted(found.keys() - linears.keys()))
            raise QuantizationError(f"{quantizer.name} quantized {unknown}, which are no linear layers of the decoder layer.")
        for name, quantized in found.items():
            linear, site = linears[name]
            place = f"{prefix}.{number}.{name}"
            report[place] = _error(place, linear.weight.data, quantized, site)
            tensors.update({f"{place}.{part}": tensor.contiguous() for part, tensor in quantized.tensors.items()})
            linear.weight.data = quantized.values

    if quantizer.needs_calibration:
        tokenizer = AutoTokenizer.from_pretrained(model)
        walk(loaded, calibration.tokens(tokenizer), visit)
    else:
        walk_weights(loaded, visit)
    names = {name.removesuffix(".weight") for name in loaded.state_dict() if name.endswith(".weight")}
    ignored = tuple(sorted(name for name in names - report.keys() if _is_linear(loaded, name)))
    profile = quantizer.profile().model_copy(
        update={
            "ignored_layers": ignored, "report": report, "source": str(model.absolute()),
            "calibration": calibration.facts() if quantizer.needs_calibration and calibration else {},
        }
    )  # fmt: skip
    dtype = getattr(torch, str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch."))
    is_tied = bool(loaded.config.tie_word_embeddings)
    for name, tensor in loaded.state_dict().items():
        place = name.rpartition(".")[0]
        if (name.endswith(".weight") and place in report) or (is_tied and place == "lm_head"):
            continue
        tensors[name] = tensor.to(dtype).contiguous().clone()
    for file in model.iterdir():
        if file.is_file() and file.suffix in SUFFIXES and not any(file.match(pattern) for pattern in NOT_COPIED):
            shutil.copyfile(file, hidden / file.name)
    save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
    settings = quantizer.settings() | {"head_bits": quantizer.head_bits, "modules_to_not_convert": list(ignored)}
    changed = json.dumps(config | {"quantization_config": settings}, indent=1)
    (hidden / "config.json").write_text(changed + "\n", encoding="utf-8")
    (hidden / PROFILE_NAME).write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return profile


def _is_linear(model: Any, name: str) -> bool:
    from torch import nn

    return isinstance(model.get_submodule(name), nn.Linear)


def _error(name: str, weight: "torch.Tensor", quantized: Quantized, site: "Site") -> LayerError:
    import torch

    if quantized.values.shape != weight.shape:
        raise QuantizationError(f"{name} has shape {list(weight.shape)}, its quantized weights {list(quantized.values.shape)}.")
    if not torch.isfinite(quantized.values).all():
        raise QuantizationError(f"{name} has quantized weights that are no numbers.")
    off = quantized.values - weight

    def product(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one * other).sum() if site.gram is None else ((one @ site.gram) * other).sum())

    own, rounded = product(weight, weight), product(quantized.values, quantized.values)
    cosine = product(weight, quantized.values) / max(1e-30, (own * rounded) ** 0.5)
    return LayerError(
        cosine=min(1.0, cosine), largest=float(off.abs().max()), relative=(max(0.0, product(off, off)) / max(1e-30, own)) ** 0.5
    )
