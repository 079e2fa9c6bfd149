"""Builders, packing and size of the operators of one file of this folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sagellm.models.gguf_levels import GGUFLevels

__all__ = ["OperatorFamily"]


@dataclass(frozen=True, slots=True)
class OperatorFamily:
    """The constant `FAMILY` of an operator's file; everything else of the CPU device is found through it.

    Attributes:
        builders: name of LMDeploy's `OpType` -> builder of the implementation.
        prepare: changes a loaded model in place, once, as to pack its weights; with the file that they stay as in, or None.
        extra_bytes: (text part of config.json, dtype, context length) -> bytes that stay in use besides the weights.
    """

    builders: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module, GGUFLevels | None], None] | None = None
    extra_bytes: Callable[[Mapping[str, Any], str, int], int] | None = None
