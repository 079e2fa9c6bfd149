"""Walks a model of transformers layer by layer, with the inputs that calibration brings to each linear layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from sagellm.core.errors import QuantizationError

__all__ = ["Producer", "Site", "decoder_layers", "producer_of", "walk", "walk_weights"]

BATCH = 4  # texts that go through a layer at once


@dataclass
class Site:
    """Linear layers of a decoder layer that have the same input.

    Attributes:
        linears: by name in the decoder layer.
        gram: sum of x x^T over all inputs x, float32 [inputs, inputs], divided by their number.
        mean: mean of |x|, [inputs].
        largest: largest |x|, [inputs].
    """

    linears: dict[str, nn.Linear] = field(default_factory=dict)
    gram: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    count: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Take in inputs, [..., inputs]."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if self.gram is None:
            self.gram = torch.zeros(rows.shape[1], rows.shape[1])
            self.mean, self.largest = torch.zeros(rows.shape[1]), torch.zeros(rows.shape[1])
        total = self.count + len(rows)
        if total == 0:
            return
        self.gram.mul_(self.count / total).addmm_(rows.T, rows, alpha=1 / total)
        self.mean.mul_(self.count / total).add_(rows.abs().sum(0), alpha=1 / total)
        torch.maximum(self.largest, rows.abs().amax(0), out=self.largest)
        self.count = total

    def rescale(self, scales: torch.Tensor) -> None:
        """The inputs are divided by `scales`, [inputs]."""
        self.gram /= torch.outer(scales, scales)
        self.mean /= scales
        self.largest /= scales


class Producer(NamedTuple):
    """Source of a site's inputs: a norm, or rows of a linear layer that they are in proportion to.

    Attributes:
        module: norm or linear layer.
        first: first of its rows.
        rows: their number.
        share: heads of the site that read the same head of these rows.
        head_size: numbers of a head.
    """

    module: nn.Module
    first: int
    rows: int
    share: int = 1
    head_size: int = 1

    def shared(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the mean of [inputs] over those that come from the same row, for each of them."""
        grouped = numbers.view(-1, self.share, self.head_size)
        return grouped.mean(1, keepdim=True).expand_as(grouped).reshape(-1)

    def divide(self, scales: torch.Tensor) -> None:
        """Divide what the inputs come from by `scales`, [inputs], which are the same for inputs of the same row."""
        by = scales.view(-1, self.share, self.head_size)[:, 0].reshape(-1)
        rows = slice(self.first, self.first + self.rows)
        weight, bias = self.module.weight.data, getattr(self.module, "bias", None)
        if weight.dim() == 2:
            weight[rows] /= by[:, None]
        elif type(self.module).__name__.startswith("Gemma"):  # multiplies by one more than its weight
            weight[rows] = (1 + weight[rows]) / by - 1
        else:
            weight[rows] /= by
        if bias is not None:
            bias.data[rows] /= by


# Norms before a site, by the name of a linear layer of it. Gemma 2 has the last one.
NORMS = {
    "self_attn.q_proj": ("input_layernorm",),
    "self_attn.qkv_proj": ("input_layernorm",),
    "mlp.gate_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
    "mlp.gate_up_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
}


def producer_of(layer: nn.Module, site: Site) -> Producer | None:
    """Return what the inputs of a site come from, if they can be scaled there; else None."""
    modules, name = dict(layer.named_modules()), next(iter(site.linears))
    for norm in NORMS.get(name, ()):
        if norm in modules:
            return Producer(modules[norm], 0, len(modules[norm].weight))
    inputs = site.linears[name].in_features
    if name == "mlp.down_proj":
        module = modules.get("mlp.up_proj") or modules["mlp.gate_up_proj"]
        return Producer(module, len(module.weight) - inputs, inputs)
    if name == "self_attn.o_proj":
        head_size = layer.self_attn.head_dim
        if "self_attn.v_proj" in modules:
            module = modules["self_attn.v_proj"]
            rows = len(module.weight)
        else:
            module = modules["self_attn.qkv_proj"]
            rows = (len(module.weight) - inputs) // 2
        return Producer(module, len(module.weight) - rows, rows, inputs // rows, head_size)
    return None


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a causal model of transformers.

    Raises:
        QuantizationError: it has none where transformers' models have them.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise QuantizationError(f"{type(model).__name__} has no decoder layers at model.layers, so no method quantizes it.")
    if any("expert" in name for name, _ in layers.named_modules()):
        raise QuantizationError(f"{type(model).__name__} is a mixture of experts, which no method here quantizes.")
    return layers


@torch.inference_mode()
def walk(model: nn.Module, tokens: torch.Tensor, visit: Callable[[int, nn.Module, list[Site]], None]) -> None:
    """Call `visit` with each decoder layer and its sites, in order. Later layers see its changes.

    Args:
        model: of transformers, in float32.
        tokens: texts of calibration, int64 [texts, tokens].
        visit: (number, decoder layer, sites), which may change the weights in place.
    """
    layers = decoder_layers(model)
    batches = list(_first_inputs(model, layers[0], tokens))
    for number, layer in enumerate(layers):
        sites = _observe(layer, batches)
        visit(number, layer, sites)
        for batch in batches:
            batch[0] = _call(layer, batch)


@torch.inference_mode()
def walk_weights(model: nn.Module, visit: Callable[[int, nn.Module, list[Site]], None]) -> None:
    """Call `visit` with each decoder layer as `walk` does, without calibration: each linear layer is a site without inputs."""
    for number, layer in enumerate(decoder_layers(model)):
        linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        visit(number, layer, [Site({name: linear}) for name, linear in linears.items()])


class _Reached(Exception):
    """The first decoder layer was called."""


def _first_inputs(model: nn.Module, first: nn.Module, tokens: torch.Tensor) -> Iterator[list[Any]]:
    """Yield [hidden states, keyword arguments] of the first decoder layer, batch by batch."""
    caught: list[Any] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught[:] = [args[0] if args else kwargs.pop("hidden_states"), kwargs]
        raise _Reached

    for batch in tokens.split(BATCH):
        handle = first.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            model(batch, use_cache=False)
        except _Reached:
            pass
        finally:
            handle.remove()
        yield list(caught)


def _call(layer: nn.Module, batch: list[Any]) -> torch.Tensor:
    hidden = layer(batch[0], **batch[1])
    return hidden[0] if isinstance(hidden, tuple) else hidden


def _observe(layer: nn.Module, batches: list[list[Any]]) -> list[Site]:
    sites: dict[str, Site] = {}  # by the name of the first linear layer
    latest: list[Any] = [None, ""]  # the input, and the site that it belongs to

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
            if args[0] is not latest[0]:
                latest[:] = [args[0], name]
                sites.setdefault(name, Site()).add(args[0])
            sites[latest[1]].linears[name] = linear

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name)) for name, module in layer.named_modules() if isinstance(module, nn.Linear)
    ]
    try:
        for batch in batches:
            latest[:] = [None, ""]
            _call(layer, batch)
    finally:
        for handle in handles:
            handle.remove()
    return list(sites.values())
