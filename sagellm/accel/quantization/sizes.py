"""Sizes of groups of inputs that share a scale."""

from sagellm.core.errors import QuantizationError

__all__ = ["GROUPS", "allow_group", "check_group"]

GROUPS = (32, 64, 128)  # as checkpoints have them


def allow_group(method: str, group_size: int) -> int:
    """Return a group size. Raises QuantizationError if no checkpoint has it."""
    if group_size not in GROUPS:
        raise QuantizationError(f"group_size is {group_size}; {method} takes {', '.join(map(str, GROUPS))}.")
    return group_size


def check_group(name: str, size: int, group_size: int, what: str = "inputs") -> None:
    """Raise QuantizationError if a group size does not divide the inputs, or outputs, of the layer `name`."""
    if size % group_size:
        fitting = [str(group) for group in GROUPS if size % group == 0]
        advice = f"use {' or '.join(fitting)}" if fitting else f"none of {', '.join(map(str, GROUPS))} does"
        raise QuantizationError(f"group size {group_size} does not divide the {size} {what} of {name}; {advice}.")
