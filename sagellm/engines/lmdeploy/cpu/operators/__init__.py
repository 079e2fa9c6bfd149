"""The operators of the CPU device, one file a family. A new file with a `FAMILY` is found and used."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.models.gguf_levels import GGUFLevels

__all__ = ["builders", "extra_bytes", "families", "prepare"]


@cache
def families() -> dict[str, OperatorFamily]:
    """Collect the `FAMILY` of every file of this folder, by the name of the file, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = {name: import_module(f"{__name__}.{name}") for name in names}
    return {name: module.FAMILY for name, module in modules.items() if hasattr(module, "FAMILY")}


@cache
def builders() -> dict[str, Any]:
    """Map the names of LMDeploy's operator types to the builders of this folder.

    Raises:
        ConfigError: two files build the same operator.
    """
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for name, family in families().items():
        for operator, builder in family.builders.items():
            if operator in owners:
                raise ConfigError(f"{owners[operator]}.py and {name}.py both build {operator}; leave it to one of them.")
            owners[operator], found[operator] = name, builder
    return found


def prepare(model: nn.Module, levels: GGUFLevels | None = None) -> None:
    """Let each family change a loaded model in place.

    Args:
        levels: the file of the weights, if they are to stay as they are there.
    """
    for family in families().values():
        if family.prepare is not None:
            family.prepare(model, levels)


def extra_bytes(text_config: Mapping[str, Any], dtype: str, context_length: int) -> int:
    """Add up the bytes that the families keep in use besides the weights."""
    sizes = (family.extra_bytes for family in families().values() if family.extra_bytes is not None)
    return sum(size(text_config, dtype, context_length) for size in sizes)
