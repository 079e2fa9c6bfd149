"""Find plug-ins, and classes of other kinds, by file, entry point or `module:Class`. An unknown name lists the known ones."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from sagellm.core.config import PluginSpec
from sagellm.core.errors import ConfigError, PluginError, SageError
from sagellm.core.hooks import DECISIONS, Plugin, overrides
from sagellm.core.packages import entry_points

GROUP = "sagellm.plugins"
Kind = TypeVar("Kind")


def known_plugins() -> list[str]:
    """Return the names that installed packages offer."""
    return offered_names(GROUP)


def offered_names(group: str) -> list[str]:
    """Return the names of the entry points of a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def find_plugin(name: str) -> type[Plugin]:
    """Return the plug-in class of that name.

    Raises:
        PluginError: no such entry point, module or class, or not a `Plugin`.
    """
    return PLUGINS.find(name)


def load_plugin(spec: PluginSpec) -> Plugin:
    """Return an instance built with the options of the specification.

    Raises:
        PluginError: the plug-in cannot be found, or its constructor failed.
    """
    kind = find_plugin(spec.name)
    try:
        return kind(**spec.options)
    except Exception as error:
        raise PluginError(f"plug-in {spec.name} cannot be built with options {spec.options}: {error}") from error


def check_owners(plugins: Iterable[tuple[str, Plugin]]) -> None:
    """Raise ConfigError if two plug-ins decide the same thing, or one is named twice."""
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
    """Return what `module:Class` names. `what` is its kind, for messages. Raises `error` if there is no such class."""
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
    """Return the object of an entry point, None if there is no such entry point. Raises `error` if it cannot be loaded."""
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as problem:
                raise error(f"{what} {name}: cannot load {entry.value} ({problem}).") from problem
    return None


class Registry(Generic[Kind]):
    """Classes of one kind by name.

    Names are compared without capitals, `-`, `_` and spaces. The project's own names go before those of installed packages.

    Args:
        what: name of the kind, for messages.
        base: class that all of them extend.
        error: raised if a class cannot be found or built.
        group: entry point group in which installed packages offer more.
        own: classes of the project, each with a text `name`, in the order of lists.
        folder: package of the project whose modules define its own classes, in place of `own`. A new file there is a new name.
        num_given: positional arguments of the constructor that the engine gives; the others are options.
        is_named: whether a class needs a text `name`.
        aliases: another name -> a name of the project's own.
    """

    def __init__(
        self, what: str, base: type[Kind], error: type[SageError], group: str, own: tuple[type[Kind], ...] = (), *,
        folder: str = "", num_given: int = 0, is_named: bool = True, aliases: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.what = what
        self.base = base
        self.error = error
        self.group = group
        self._given = own
        self._folder = folder
        self._num_given = num_given
        self._is_named = is_named
        self._aliases = dict(aliases or {})

    def names(self) -> list[str]:
        """Return the project's own names, those found in the folder in alphabetical order, then those of installed packages."""
        known = {_plain(name) for name in self._own}
        return [*self._own, *(name for name in offered_names(self.group) if _plain(name) not in known)]

    def find(self, name: str) -> type[Kind]:
        """Return the class of that name, or of `module:Class`.

        Raises:
            SageError: `error`, if the name is unknown, or the class cannot be loaded or is not a concrete, named `base`.
        """
        found = load_object(name, self.what, self.error) if ":" in name else self._find_named(name)
        if not (isinstance(found, type) and issubclass(found, self.base)):
            base = f"{self.base.__module__}.{self.base.__name__}"
            raise self.error(f"{name} is {found!r}, no {self.what}; give a subclass of {base}.")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise self.error(f"{self.what} {name} is abstract; define {', '.join(missing)}.")
        if self._is_named and not _name_of(found):
            raise self.error(f"{self.what} {name} has no name; give the class a text `name`.")
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Return facts for lists: `options`, `devices` of tensors, `here` ("yes", or why not), `summary`, `class`."""
        try:
            kind = self.find(name)
        except SageError as error:  # of a package that cannot be loaded
            return {"options": {}, "devices": "", "here": str(error), "summary": "", "class": ""}
        return self._facts(kind)

    def _facts(self, kind: type[Kind]) -> dict[str, Any]:
        parameters = list(inspect.signature(kind).parameters.values())[self._num_given :]
        options = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        # A file that was found in the folder says on its first line what its class is.
        documented = inspect.getmodule(kind) if self._folder and kind.__module__.startswith(self._folder) else kind
        return {
            "options": {item.name: None if item.default is item.empty else item.default for item in options},
            "devices": ", ".join(getattr(kind, "device_types", ())),
            "here": (kind.missing() if hasattr(kind, "missing") else "") or "yes",
            "summary": " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split()),
            "class": f"{kind.__module__}:{kind.__qualname__}",
        }

    def make(self, kind: Callable[..., Kind], name: str, /, *arguments: Any, **options: Any) -> Kind:
        """Return `kind(*arguments, **options)`. Raises `error` if it cannot be built."""
        try:
            return kind(*arguments, **options)
        except SageError:
            raise
        except (Exception, SystemExit) as error:
            raise self.error(f"{self.what} {name} cannot be built with options {options}: {error!r}") from error

    @cached_property
    def _own(self) -> dict[str, type[Kind]]:
        if not self._folder:
            return {_name_of(kind): kind for kind in self._given}
        found: dict[str, type[Kind]] = {}
        for entry in iter_modules(import_module(self._folder).__path__):
            if entry.ispkg:
                continue
            module = import_module(f"{self._folder}.{entry.name}")
            for kind in list(vars(module).values()):
                if not (isinstance(kind, type) and issubclass(kind, self.base) and kind.__module__ == module.__name__):
                    continue
                name = _name_of(kind)
                # A native class and its plain twin share a name; the file of that name wins.
                if name and not getattr(kind, "__abstractmethods__", ()) and (name not in found or name == entry.name):
                    found[name] = kind
        return dict(sorted(found.items()))

    def _find_named(self, name: str) -> object:
        wanted = _plain(name)
        wanted = _plain(self._aliases.get(wanted, wanted))
        for own_name, kind in self._own.items():  # first, since looking through what is installed takes milliseconds
            if _plain(own_name) == wanted:
                return kind
        for offered in offered_names(self.group):
            if _plain(offered) == wanted:
                return load_offered(offered, self.group, self.what, self.error)
        known = ", ".join(self.names()) or "none installed"
        raise self.error(f"unknown {self.what} {name!r}; known are: {known}. Or name a class as module:Class.")


def _name_of(kind: type) -> str:
    name = getattr(kind, "name", None)
    return name if isinstance(name, str) else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


PLUGINS: Registry[Plugin] = Registry("plug-in", Plugin, PluginError, GROUP, is_named=False)
