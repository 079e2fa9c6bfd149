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


def generate(text: str, *, block_size: int | None = None) -> Trace:
    """A trace from `name:parameter=value,...`. `block_size`: tokens, as if it were a parameter of the text.

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
        if key.strip() in values:
            raise TraceError(f"{text}: {key.strip()} is there twice; give each parameter once.")
        values[key.strip()] = value.strip()
    if block_size is not None:
        if "block_size" in values:
            raise TraceError(f"{text}: block_size is there, and given apart as {block_size}; give it once.")
        values["block_size"] = block_size
    try:
        options = kind(**values)
    except ValidationError as error:
        item = error.errors()[0]
        wrong = item["loc"][0]
        if item["type"] == "extra_forbidden":
            raise TraceError(
                f"{name} has no parameter {wrong}; known are {', '.join(sorted(kind.model_fields))}."
            ) from None
        raise TraceError(f"{name}: {wrong}={str(item['input'])[:40]}: {item['msg']}.") from None
    return build(text, options, generator)
