"""Guided decoding: a format that does not compile must be found here, since in the engine it ends every request."""

import json
from typing import Any

from sagellm.serve.parameters import Refused

# xgrammar takes time that grows with the square of the depth, during which the engine stands still.
MAX_SCHEMA_CHARS = 65536
MAX_SCHEMA_DEPTH = 64


def check_format(request: Any) -> None:
    """Check `response_format` of a chat request.

    Raises:
        Refused: it cannot be compiled, or other parameters would make the model write past its end.
    """
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return
    if request.ignore_eos or request.min_new_tokens:
        raise Refused(
            "response_format cannot be combined with ignore_eos or min_new_tokens: the format says where to end."
        )
    import xgrammar

    try:
        if wanted.type == "json_schema":
            xgrammar.Grammar.from_json_schema(_schema_text(wanted.json_schema))
        elif wanted.type == "regex_schema":
            xgrammar.Grammar.from_regex(_limited(wanted.regex_schema or "", "regex_schema is empty"))
    except RuntimeError as error:  # xgrammar's own; the first part names a file of its sources
        raise Refused(f"response_format cannot be compiled: {str(error).rpartition(': ')[2].strip()}") from None


def _schema_text(wanted: Any) -> str:
    schema = wanted.json_schema if wanted is not None else None
    if not isinstance(schema, dict):
        raise Refused(
            "response_format has no schema; send {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}."
        )
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise Refused(f"the schema in response_format is nested deeper than {MAX_SCHEMA_DEPTH} levels.")
    return _limited(json.dumps(schema), "the schema is empty")


def _limited(text: str, if_empty: str) -> str:
    if not text:
        raise Refused(f"response_format cannot be compiled: {if_empty}.")
    if len(text) > MAX_SCHEMA_CHARS:
        raise Refused(f"response_format has {len(text)} characters; allowed are {MAX_SCHEMA_CHARS}.")
    return text


def _depth(schema: Any) -> int:
    """Levels of nesting; without recursion, since the client chooses the depth."""
    deepest, level = 0, [schema]
    while level:
        deepest += 1
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    return deepest
