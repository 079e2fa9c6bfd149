"""Ranges of the request parameters that LMDeploy hands to its engine unchecked.

A value that the engine cannot use ends its loop, and with it every request, so it must be found here.
"""

import json
import math
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

MAX_LOGPROBS = 20  # OpenAI's limit; a number beyond the vocabulary would end the engine's loop
MAX_COUNT = 2**31 - 1
MAX_ANSWERS = 128  # of one prompt, as OpenAI allows
MAX_STOPS = 16
MAX_SEED = 1 << 32  # the engine uses the low 32 bits
MIN_TEMPERATURE = 1e-5  # below it scores divided by it leave the range of the numbers, and the answer is noise
# (name, lowest, highest) of whole numbers
COUNTS = (
    ("max_tokens", 1, MAX_COUNT),
    ("max_completion_tokens", 1, MAX_COUNT),
    ("n", 1, MAX_ANSWERS),
    ("best_of", 1, MAX_ANSWERS),
    ("min_tokens", 0, MAX_COUNT),
    ("min_new_tokens", 0, MAX_COUNT),
    ("seed", -(2**63), 2**63 - 1),
    ("top_logprobs", 0, MAX_LOGPROBS),
    ("logprobs", 0, MAX_LOGPROBS),
)
# Two names of one limit.
SAME = (("max_tokens", "max_completion_tokens"), ("min_tokens", "min_new_tokens"))
# Fields that no answer is built for, and the value that asks for nothing; None: there is no such value.
FOREIGN: dict[str, Any] = {
    "suffix": "", "return_routed_experts": False, "image_data": None, "functions": None, "function_call": None, "audio": None,
    "prediction": None, "web_search_options": None, "verbosity": None,
}  # fmt: skip
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
FORMATS = ("json_schema", "regex_schema")  # types of `response_format` with a part of the same name
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
PENALTIES = ("presence_penalty", "frequency_penalty")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Refused(Exception):
    """The message for the client: what was got, what is allowed. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_fields(raw: dict[str, Any], known: Collection[str]) -> None:
    """Check that nothing is asked for that would be ignored.

    Args:
        raw: JSON of the request, without fields that are null.
        known: fields that are read on this route.

    Raises:
        Refused: a field or a part of one is unknown or has no effect here.
    """
    for name, nothing in FOREIGN.items():
        if name in raw and raw[name] != nothing:
            raise Refused(f"{name} is not supported by this server; leave it out.")
    check_known(raw, known)
    check_known(raw.get("stream_options"), STREAM_OPTIONS, "stream_options.")
    wanted = raw.get("response_format")
    if isinstance(wanted, dict):
        check_known(wanted, ("type", *(name for name in FORMATS if name == wanted.get("type"))), "response_format.")
        check_known(wanted.get("json_schema"), SCHEMA_FIELDS, "response_format.json_schema.")
    for name in PENALTIES:
        _check_penalty(name, raw.get(name, 0))


def check_known(given: Any, known: Collection[str], where: str = "") -> None:
    """Check the names in a JSON object; anything else passes, and so do names without a value.

    Args:
        where: put before a name in the error.

    Raises:
        Refused: a name is unknown.
    """
    if not isinstance(given, dict):
        return
    for name in sorted(given.keys() - set(known)):
        if given[name] is None:
            continue
        near = get_close_matches(name, sorted(known), 1)
        hint = f"did you mean {near[0]}?" if near else "leave it out."
        raise Refused(f"{where}{name} is not a field of this request; {hint}")


def _check_penalty(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and -2 <= value <= 2):
        raise Refused(f"{name} is {json.dumps(value)}; allowed: -2 to 2.")


def check_parameters(request: Any, raw: dict[str, Any], vocab_size: int) -> None:
    """Check a request of LMDeploy's pydantic model.

    Args:
        raw: its JSON, with values as the model reads them, and with fields that the model does not know.

    Raises:
        Refused: the first value that is out of range.
    """
    if raw.get("session_id", -1) != -1:
        raise Refused("session_id is given by the server; leave it out.")
    _check_tools(request)
    for name, lowest, highest in COUNTS:
        _check_count(name, getattr(request, name, raw.get(name)), lowest, highest)
    _check_limits(request, raw)
    wanted, best_of = getattr(request, "n", 1), raw.get("best_of")
    if best_of is not None and (best_of < wanted or (request.stream and best_of > wanted)):
        raise Refused(f"best_of is {best_of} with n {wanted}; it must not be less, and in a stream not more.")
    if getattr(request, "stream_options", None) is not None:
        _check_stream_options(request, raw["stream_options"].get("continuous_usage_stats"))
    if getattr(request, "top_logprobs", None) and not request.logprobs:
        raise Refused("top_logprobs needs logprobs: true.")
    _check_sampling(request, vocab_size)
    _check_stops(request, vocab_size)


def stop_strings(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])


def engine_seed(seed: int) -> int:
    """Return the seed as the engine takes it: it would read 0 as none."""
    return seed % MAX_SEED or MAX_SEED


def _check_stream_options(request: Any, in_every_chunk: Any) -> None:
    if not request.stream:
        raise Refused("stream_options needs stream: true.")
    if not isinstance(in_every_chunk, bool | None):
        raise Refused(f"continuous_usage_stats is {json.dumps(in_every_chunk)[:60]}; allowed: true or false.")
    if in_every_chunk and not request.stream_options.include_usage:
        raise Refused("continuous_usage_stats needs include_usage: true.")


def _check_tools(request: Any) -> None:
    choice = getattr(request, "tool_choice", "none")
    if choice not in ("auto", "none"):
        wanted = repr(choice) if isinstance(choice, str) else "a function"
        raise Refused(f"tool_choice is {wanted}, which is not supported by this server; send 'none', or leave it out.")
    if choice == "auto" and request.tools:
        raise Refused("tools is not supported by this server: no call is read out of an answer. Leave it out.")


def _check_limits(request: Any, raw: dict[str, Any]) -> None:
    if raw.get("preserve_cache"):  # a prompt alone, for which a proxy sets max_tokens to 1 beside what the client sent
        return
    for name, other in SAME:
        if name in raw and other in raw and raw[name] != raw[other]:
            raise Refused(f"{name} is {raw[name]} and {other} is {raw[other]}; send one of them.")
    least = raw.get("min_tokens") or raw.get("min_new_tokens") or 0
    most = raw.get("max_completion_tokens") or request.max_tokens or math.inf
    if least > most:
        raise Refused(f"min_tokens is {least} and max_tokens is {most}; the minimum must not be above the maximum.")


def _check_count(name: str, value: Any, lowest: int, highest: int) -> None:
    if value is None or (name == "logprobs" and isinstance(value, bool)):  # a boolean in chats
        return
    if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest:
        return
    raise Refused(f"{name} is {json.dumps(value)[:60]}; allowed: {lowest} to {highest}.")


def _check_sampling(request: Any, vocab_size: int) -> None:
    for name, lowest, highest in (("temperature", 0.0, 2.0), ("min_p", 0.0, 1.0)):
        value = getattr(request, name)
        if not lowest <= value <= highest:
            raise Refused(f"{name} is {value}; allowed: {lowest:g} to {highest:g}.")
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise Refused(
            f"temperature is {request.temperature}; allowed: 0 (always the likeliest token), or {MIN_TEMPERATURE} to 2."
        )
    if not 0 < request.top_p <= 1:
        raise Refused(f"top_p is {request.top_p}; allowed: more than 0, at most 1.")
    if not (request.repetition_penalty > 0 and math.isfinite(request.repetition_penalty)):
        raise Refused(f"repetition_penalty is {request.repetition_penalty}; it must be a positive number.")
    if not 0 <= request.top_k <= vocab_size:
        raise Refused(f"top_k is {request.top_k}; allowed: 0 (all tokens) to {vocab_size}, the size of the vocabulary.")


def _check_stops(request: Any, vocab_size: int) -> None:
    words = stop_strings(request.stop)
    if len(words) > MAX_STOPS or not all(words):
        raise Refused(f"stop has {len(words)} words; allowed are up to {MAX_STOPS}, none of them empty.")
    for token in getattr(request, "stop_token_ids", None) or ():
        if not 0 <= token < vocab_size:
            raise Refused(f"stop_token_ids holds {token}; allowed: 0 to {vocab_size - 1}.")
