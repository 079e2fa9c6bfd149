"""Scheduling wishes of a request: read from its body or its headers, checked, and passed to its generation.

LMDeploy's handlers do not know these fields. So they leave the body here and travel in a context variable: the handler
and the stream of its answer run in the context of the request, or in a copy of it.
"""

import json
import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError

from sagellm.core.service import LONGEST_MS, MAX_PRIORITY, MIN_PRIORITY, NOTHING_ASKED, ServiceRequest
from sagellm.serve.parameters import Refused

# JSON of the `ServiceRequest` of the request that is being handled; None where it asks for nothing.
SERVICE: ContextVar[str | None] = ContextVar("sagellm_service", default=None)

HEADER_PREFIX = "x-sagellm-"
LONGEST_WAIT_S = 366 * 24 * 3600  # milliseconds taken for seconds lie far beyond
_MILLISECONDS = f"a number of milliseconds above 0, at most {LONGEST_MS}"
# Field of the body -> what may stand there.
ALLOWED = {
    "priority": f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}, lower is more urgent",
    "tenant": "up to 64 of the letters A to Z and a to z, digits, and _ . : @ -",
    "deadline": f"Unix time in seconds, later than now and at most {LONGEST_WAIT_S} seconds away",
    "ttft_slo_ms": _MILLISECONDS,
    "tpot_slo_ms": _MILLISECONDS,
}
HEADERS = {HEADER_PREFIX + name.replace("_", "-"): name for name in ALLOWED}
_PREFIX = HEADER_PREFIX.encode()
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?")


def take_service(body: dict[str, Any], headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Take what is asked for out of `body`; JSON of the `ServiceRequest`, None if nothing is. O(number of headers).

    `headers`: names in lower case and values, as ASGI gives them.

    Raises:
        Refused: a value is out of range, body and headers or two headers contradict each other, an unknown header of ours.
    """
    ours = [pair for pair in headers if pair[0].startswith(_PREFIX)]
    if not ours and body.keys().isdisjoint(ALLOWED):
        return None
    given = _from_headers(ours)
    for name in [name for name in ALLOWED if name in body]:
        value = body.pop(name)
        if name in given and given[name] != value:
            raise Refused(f"{name} is {_short(value)} in the body and {_short(given[name])} in the header; send one of them.")
        given[name] = value
    asked = _checked(given)
    return None if asked == NOTHING_ASKED else asked.model_dump_json(exclude_defaults=True)


def _from_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for header, text in headers:
        header, text = header.decode("latin-1"), text.decode("latin-1").strip()
        if header not in HEADERS:
            raise Refused(f"there is no header {_short(header)}; known are {', '.join(HEADERS)}.")
        name = HEADERS[header]
        value = text if name == "tenant" else _number(text, _WHOLE if name == "priority" else _DECIMAL)
        if given.setdefault(name, value) != value:
            raise Refused(f"{header} is there twice, as {_short(given[name])} and {_short(value)}; send it once.")
    return given


def _number(text: str, form: re.Pattern[str]) -> Any:
    """The text itself where it is no such number: the model refuses it then."""
    if not form.fullmatch(text):
        return text
    return int(text) if _WHOLE.fullmatch(text) else float(text)


def _checked(given: dict[str, Any]) -> ServiceRequest:
    try:
        asked = ServiceRequest(**given)
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors(include_url=False)}
        raise Refused("; ".join(_explain(name, given[name]) for name in ALLOWED if name in wrong) + ".") from None
    if asked.is_past() or (asked.deadline is not None and asked.deadline > time.time() + LONGEST_WAIT_S):
        raise Refused(f"{_explain('deadline', asked.deadline)}. Now it is {time.time():.0f}.")
    return asked


def _explain(name: str, value: Any) -> str:
    return f"{name} is {_short(value)}; allowed: {ALLOWED[name]}"


def _short(value: Any, most: int = 60) -> str:
    """As JSON writes it, so that a number in quotes is seen to be a text."""
    if isinstance(value, (list, dict)):  # nested as deep as the client likes
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."
