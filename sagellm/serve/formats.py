"""Guided decoding: a format that does not compile must be found here, since in the engine it ends every request."""

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from sagellm.serve.parameters import Refused

# xgrammar takes time that grows with the square of the depth, during which the engine stands still; and its parser
# recurses without a limit, so that enough brackets end the process.
MAX_SCHEMA_CHARS = 65536
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_DEPTH = 64
SOURCE_OF_ERROR = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time, file and line, with which xgrammar begins its messages
ALTERNATIVES = ("anyOf", "oneOf", "allOf")  # keywords whose schemas describe the same value, not a part of it


def check_format(request: Any, min_tokens: int | None = None) -> None:
    """Check `response_format` of a chat request.

    Args:
        min_tokens: a field that LMDeploy's model of the request does not have.

    Raises:
        Refused: it cannot be compiled, or other parameters would make the model write past its end.
    """
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return
    if request.ignore_eos or request.min_new_tokens or min_tokens:
        raise Refused("response_format cannot be combined with ignore_eos or min_tokens: the format says where to end.")
    compile_format(wanted)


def compile_format(wanted: Any) -> None:
    """Check that a `ResponseFormat` compiles.

    Raises:
        Refused: it does not.
    """
    import xgrammar

    try:
        if wanted.type == "json_schema":
            xgrammar.Grammar.from_json_schema(_schema_text(wanted.json_schema))
        elif wanted.type == "regex_schema":
            xgrammar.Grammar.from_regex(_pattern(wanted.regex_schema or "", "regex_schema"))
    except RuntimeError as error:
        raise Refused(f"response_format cannot be compiled: {SOURCE_OF_ERROR.sub('', str(error)).strip()}") from None


def _schema_text(wanted: Any) -> str:
    schema = wanted.json_schema if wanted is not None else None
    if not isinstance(schema, dict):
        raise Refused(
            "response_format has no schema; send {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}."
        )
    for node in _nodes(schema):
        _check_strings(node)
    _check_references(schema)
    return _limited(json.dumps(schema), "the schema")


def _pattern(text: str, name: str) -> str:
    """A regular expression that xgrammar's parser survives."""
    depth, in_class, escaped = 0, False, False
    for letter in text:
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif in_class or letter == "[":
            in_class = letter != "]"
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if depth > MAX_PATTERN_DEPTH:
                raise Refused(f"the brackets of {name} are nested deeper than {MAX_PATTERN_DEPTH} levels.")
    return _limited(_without_nul(text), name)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise Refused("response_format holds a NUL character, which cannot be compiled.")
    return text


def _limited(text: str, name: str) -> str:
    if not text:
        raise Refused(f"response_format cannot be compiled: {name} is empty.")
    if len(text) > MAX_SCHEMA_CHARS:
        raise Refused(f"{name} in response_format has {len(text)} characters; allowed are {MAX_SCHEMA_CHARS}.")
    return text


def _nodes(schema: Any) -> Iterator[dict | list]:
    """Every object and list of the schema, level by level; without recursion, since the client chooses the depth.

    Raises:
        Refused: it is nested too deep.
    """
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise Refused(f"the schema in response_format is nested deeper than {MAX_SCHEMA_DEPTH} levels.")
        yield from level
        level = [child for node in level for child in _values(node) if isinstance(child, (dict, list))]


def _values(node: dict | list) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def _check_strings(node: dict | list) -> None:
    for text in (*_values(node), *(node if isinstance(node, dict) else ())):
        if isinstance(text, str):
            _without_nul(text)
    if isinstance(node, dict):
        patterns = node.get("patternProperties")
        for text in (node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            if isinstance(text, str) and text:
                _pattern(text, "a pattern")


def _check_references(schema: dict) -> None:
    """Refuse a value that is described by itself: xgrammar compiles it to a grammar that allows anything."""
    described_by: dict[int, list[int]] = {}
    for node in _nodes(schema):
        if isinstance(node, dict):
            same = [child for name in ALTERNATIVES if isinstance(node.get(name), list) for child in node[name]]
            same.append(_target(schema, node.get("$ref")))
            described_by[id(node)] = [id(child) for child in same if isinstance(child, dict)]
    try:
        TopologicalSorter(described_by).prepare()
    except CycleError:
        raise Refused(
            "a $ref in response_format leads back to itself; between the two there must be a property or an item."
        ) from None


def _target(schema: dict, reference: Any) -> Any:
    """Target of a local `$ref`; None where that is nothing, which xgrammar refuses itself."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = schema
    for part in reference[1:].split("/")[1:]:
        node = node.get(part) if isinstance(node, dict) else None  # xgrammar knows no escapes either
    return node
