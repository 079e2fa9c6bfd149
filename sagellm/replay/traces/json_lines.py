"""JSON objects, one a line."""

import json
from typing import Any

from sagellm.replay.base import shortened
from sagellm.replay.traces.lines import Broken

ONE_A_LINE = "A trace has one JSON object a line, without brackets around all and commas between."


def parse_object(line: bytes) -> dict[str, Any]:
    """Raises Broken."""
    try:
        value = json.loads(line.decode())  # given bytes, json would guess their encoding first
    except UnicodeDecodeError:
        raise Broken("is not UTF-8 text.") from None
    except json.JSONDecodeError as error:
        if line.lstrip().startswith(b"["):
            raise Broken(f"begins a list. {ONE_A_LINE}") from None
        raise Broken(f"is not JSON: {error.msg} at column {error.colno}.") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets without end
        raise Broken(f"is not usable JSON: {error}.") from None
    if type(value) is list:
        raise Broken(f"holds a list. {ONE_A_LINE}")
    if type(value) is not dict:
        raise Broken(f"holds a {type(value).__name__}; a JSON object was expected.")
    return value


def member(row: dict[str, Any], name: str) -> Any:
    """Raises Broken."""
    try:
        return row[name]
    except KeyError:
        raise Broken(f"has no {name}; found {', '.join(map(shortened, sorted(row)[:8])) or 'nothing'}.") from None
