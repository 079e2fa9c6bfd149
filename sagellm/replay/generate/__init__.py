"""Traces made up from a seed, named on the command line as `zipf:requests=10000,alpha=1.0`."""

import re
from typing import Any

from pydantic import ValidationError

from sagellm.core.errors import TraceError
from sagellm.replay.base import Trace
from sagellm.replay.generate.agentic import AgenticOptions, agentic
from sagellm.replay.generate.base import Generator, Options, build
from sagellm.replay.generate.conversation import ConversationOptions, conversation
from sagellm.replay.generate.scan import ScanOptions, scan
from sagellm.replay.generate.zipf import ZipfOptions, zipf

__all__ = ["GENERATORS", "generate", "is_generator"]

GENERATORS: dict[str, tuple[type[Options], Generator]] = {
    "zipf": (ZipfOptions, zipf),
    "conversation": (ConversationOptions, conversation),
    "agentic": (AgenticOptions, agentic),
    "scan": (ScanOptions, scan),
}


def is_generator(text: str) -> bool:
    """Whether `text` asks for a generated trace, rather than naming a file."""
    return text.partition(":")[0] in GENERATORS


def generate(text: str, **overrides: Any) -> Trace:
    """A trace from `name:parameter=value,...`; `overrides` go before what the text says.

    Raises:
        TraceError: an unknown generator or parameter, or a value out of range.
    """
    name, _, rest = text.partition(":")
    if name not in GENERATORS:
        raise TraceError(f"unknown generator {name!r}; known are {', '.join(GENERATORS)}.")
    kind, generator = GENERATORS[name]
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"\w+", key.strip()):
            raise TraceError(f"{text}: {part!r} is not parameter=value.")
        values[key.strip()] = value.strip()
    try:
        options = kind(**{**values, **overrides})
    except ValidationError as error:
        item = error.errors()[0]
        wrong = item["loc"][0]
        if item["type"] == "extra_forbidden":
            raise TraceError(
                f"{name} has no parameter {wrong}; known are {', '.join(sorted(kind.model_fields))}."
            ) from None
        raise TraceError(f"{name}: {wrong}={item['input']}: {item['msg']}.") from None
    return build(text, options, generator)
