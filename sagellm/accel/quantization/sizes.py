"""Sizes of groups of inputs that share a scale."""

from sagellm.core.errors import QuantizationError

__all__ = ["GROUPS", "allow_group", "check_group"]

GROUPS = (32, 64, 128)  # as checkpoints have them


def allow_group(method: str, group_size: int) -> int:
    """Return a group size. Raises QuantizationError if no checkpoint has it."""
    if group_size not in GROUPS:
        raise QuantizationError(f"group_size is {group_size}; {method} takes {', '.join(map(str, GROUPS))}.")
    return group_size


def check_group(name: str, inputs: int, group_size: int) -> None:
    """Raise QuantizationError if a group size does not divide the inputs of the layer `name`."""
    if inputs % group_size:
        fitting = [str(size) for size in GROUPS if inputs % size == 0]
        advice = f"use {' or '.join(fitting)}" if fitting else f"none of {', '.join(map(str, GROUPS))} does"
        raise QuantizationError(f"group size {group_size} does not divide the {inputs} inputs of {name}; {advice}.")
