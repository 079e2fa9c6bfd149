"""Parameters of tests that are quick for some of them: the others are slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but `quick` as slow. A tuple is one value of several names."""
    values = list(values)
    assert all(each in values for each in quick), f"{quick} are not all among {values}"
    return [each if each in quick else _slow(each) for each in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
