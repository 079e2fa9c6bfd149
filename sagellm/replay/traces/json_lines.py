"""JSON objects, one a line."""

import json
from typing import Any

from sagellm.replay.traces.lines import Broken


def parse_object(line: bytes) -> dict[str, Any]:
    """Raises Broken."""
    try:
        value = json.loads(line.decode())  # given bytes, json would guess their encoding first
    except UnicodeDecodeError:
        raise Broken("is not UTF-8 text.") from None
    except json.JSONDecodeError as error:
        raise Broken(f"is not JSON: {error.msg} at column {error.colno}.") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets without end
        raise Broken(f"is not usable JSON: {error}.") from None
    if type(value) is not dict:
        raise Broken(f"holds a {type(value).__name__}; a JSON object was expected.")
    return value


def member(row: dict[str, Any], name: str) -> Any:
    """Raises Broken."""
    try:
        return row[name]
    except KeyError:
        raise Broken(f"has no {name}; found {', '.join(sorted(map(str, row))[:8]) or 'nothing'}.") from None
