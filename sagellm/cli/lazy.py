"""A group of commands that are imported when they are called, so that `--help` answers at once."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import click

__all__ = ["LazyGroup", "at"]

Loader = Callable[[], click.Command]


def at(path: str) -> Loader:
    """Return a loader of the command at `module:name`."""
    module, _, name = path.partition(":")
    return lambda: getattr(import_module(module), name)


class LazyGroup(click.Group):
    """Commands by name, each with its loader and its line of help."""

    def __init__(self, lazy: Mapping[str, tuple[Loader, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self._lazy = dict(lazy)

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return self._lazy[name][0]() if name in self._lazy else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])
