"""Enumerations whose members are their strings."""

from enum import Enum

__all__ = ["StrEnum"]


class StrEnum(str, Enum):
    """As `enum.StrEnum`, which Python 3.10 has not: a member is its value wherever it is compared, printed or written."""

    __str__ = str.__str__
    __format__ = str.__format__
