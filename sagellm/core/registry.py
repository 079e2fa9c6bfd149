"""Finds plug-ins, and classes of other kinds, by entry point or `module:Class`; an unknown name fails at once and lists the
known ones."""

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from sagellm.core.config import PluginSpec
from sagellm.core.errors import ConfigError, PluginError, SageError
from sagellm.core.hooks import DECISIONS, Plugin, overrides

GROUP = "sagellm.plugins"
Kind = TypeVar("Kind")


def known_plugins() -> list[str]:
    """Names that installed packages offer."""
    return offered_names(GROUP)


def offered_names(group: str) -> list[str]:
    """Names of the entry points of a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def find_plugin(name: str) -> type[Plugin]:
    """The plug-in class of that name.

    Raises:
        PluginError: no such entry point, module or class, or not a `Plugin`.
    """
    found = load_object(name, "plug-in", PluginError) if ":" in name else _from_entry_point(name)
    if not (isinstance(found, type) and issubclass(found, Plugin)):
        raise PluginError(f"{name} is {found!r}; a plug-in is a subclass of sagellm.core.hooks.Plugin.")
    return found


def load_plugin(spec: PluginSpec) -> Plugin:
    """An instance built with the options of the specification.

    Raises:
        PluginError: as `find_plugin`, or the constructor failed.
    """
    kind = find_plugin(spec.name)
    try:
        return kind(**spec.options)
    except Exception as error:
        raise PluginError(f"plug-in {spec.name} cannot be built with options {spec.options}: {error}") from error


def check_owners(plugins: Iterable[tuple[str, Plugin]]) -> None:
    """Raises ConfigError when two plug-ins decide the same thing, or one is named twice."""
    owners: dict[str, str] = {}
    seen: set[str] = set()
    for name, plugin in plugins:
        if name in seen:
            raise ConfigError(f"plug-in {name} is named twice; name it once.")
        seen.add(name)
        for hook in DECISIONS:
            if overrides(plugin, hook) and owners.setdefault(hook, name) != name:
                raise ConfigError(f"plug-ins {owners[hook]} and {name} both decide {hook}; keep one of them.")


def load_object(name: str, what: str, error: type[SageError]) -> object:
    """What `module:Class` names. `what` it is to be, for the message. Raises `error`: no such module or class."""
    module_name, _, class_name = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as problem:  # a module of others may raise anything while it is imported
        raise error(
            f"{what} {name}: cannot import {module_name or 'a module without a name'} ({problem}); "
            "is its folder on PYTHONPATH, or installed?"
        ) from problem
    try:
        return getattr(module, class_name)
    except AttributeError:
        missing = class_name or "class without a name"
        raise error(f"{what} {name}: module {module_name} has no {missing}.") from None


def load_offered(name: str, group: str, what: str, error: type[SageError]) -> object | None:
    """What the entry point of that name stands for; None where nobody offers the name. Raises `error`: it cannot be loaded."""
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as problem:
                raise error(f"{what} {name}: cannot load {entry.value} ({problem}).") from problem
    return None


def _from_entry_point(name: str) -> object:
    found = load_offered(name, GROUP, "plug-in", PluginError)
    if found is None:
        known = ", ".join(known_plugins()) or "none installed"
        raise PluginError(f"unknown plug-in {name!r}; known are: {known}. Or name a class as module:Class.")
    return found


class Registry(Generic[Kind]):
    """Classes by name. Capitals, `-` and `_` do not count; a name of `own` goes before one that others offer.

    Args:
        what: they are, for messages.
        base: a class that all of them extend.
        error: raised where one cannot be found or built.
        group: of the entry points by which installed packages offer more.
        own: classes of the project, each with a text `name`.
        aliases: another name -> a name of `own`.
    """

    def __init__(
        self, what: str, base: type[Kind], error: type[SageError], group: str, own: tuple[type[Kind], ...], **aliases: str
    ) -> None:
        self._what = what
        self._base = base
        self._error = error
        self._group = group
        self._own = {kind.name: kind for kind in own}
        self._aliases = aliases

    def names(self) -> list[str]:
        """Those of `own`, in the order of the documentation, then those that installed packages offer."""
        known = {_plain(name) for name in self._own}
        return [*self._own, *(name for name in offered_names(self._group) if _plain(name) not in known)]

    def find(self, name: str) -> type[Kind]:
        """The class of that name, or of `module:Class`. Raises `error`: unknown, cannot be loaded, or none of `base`."""
        found = load_object(name, self._what, self._error) if ":" in name else self._find_named(name)
        if not (isinstance(found, type) and issubclass(found, self._base)):
            base = f"{self._base.__module__}.{self._base.__name__}"
            raise self._error(f"{name} is {found!r}, no {self._what}; give a subclass of {base}.")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise self._error(f"{self._what} {name} is abstract; define {', '.join(missing)}.")
        if not (isinstance(own_name := getattr(found, "name", None), str) and own_name):
            raise self._error(f"{self._what} {name} has no name; give the class a text `name`.")
        return found

    def make(self, kind: Callable[..., Kind], name: str, /, *arguments: Any, **options: Any) -> Kind:
        """`kind(*arguments, **options)`. Raises `error`: it cannot be built."""
        try:
            return kind(*arguments, **options)
        except SageError:
            raise
        except (Exception, SystemExit) as error:
            raise self._error(f"{self._what} {name} cannot be built with options {options}: {error!r}") from error

    def _find_named(self, name: str) -> object:
        wanted = _plain(name)
        wanted = _plain(self._aliases.get(wanted, wanted))
        for own_name, kind in self._own.items():  # first, since looking through what is installed takes milliseconds
            if _plain(own_name) == wanted:
                return kind
        for offered in offered_names(self._group):
            if _plain(offered) == wanted:
                return load_offered(offered, self._group, self._what, self._error)
        raise self._error(
            f"unknown {self._what} {name!r}; known are: {', '.join(self.names())}. Or name a class as module:Class."
        )


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())
