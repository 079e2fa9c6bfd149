"""Message types by the name that they have on the wire. A type that is not registered is never built from received bytes."""

from pydantic import BaseModel

from sagellm.core.errors import ConfigError

__all__ = ["find", "register"]

_KNOWN: dict[str, type[BaseModel]] = {}


def register(*kinds: type[BaseModel]) -> None:
    """Let connections of this process receive messages of these types, named as their classes.

    Raises:
        ConfigError: another class has the name.
    """
    for kind in kinds:
        if _KNOWN.setdefault(kind.__name__, kind) is not kind:
            other = _KNOWN[kind.__name__]
            raise ConfigError(
                f"two types of messages are named {kind.__name__}: {other.__module__} and {kind.__module__}; rename one."
            )


def find(name: str) -> type[BaseModel] | None:
    return _KNOWN.get(name)
