"""Names of a package whose modules are imported when they are asked for: some need what others can do without."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["late_imports"]


def late_imports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562). `homes`: name -> module of the package that has it."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: sorted(homes)
