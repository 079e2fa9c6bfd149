"""Ranges of the request parameters that LMDeploy hands to its engine unchecked.

A value that the engine cannot use ends its loop, and with it every request, so it must be found here.
"""

import json
import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MAX_LOGPROBS = 20  # OpenAI's limit; a number beyond the vocabulary would end the engine's loop
MAX_COUNT = 2**31 - 1
MAX_ANSWERS = 128  # of one prompt, as OpenAI allows
MAX_STOPS = 16
MIN_TEMPERATURE = 1e-5  # below it scores divided by it leave the range of the numbers, and the answer is noise
# (name, lowest, highest) of whole numbers
COUNTS = (
    ("max_tokens", 1, MAX_COUNT),
    ("max_completion_tokens", 1, MAX_COUNT),
    ("n", 1, MAX_ANSWERS),
    ("best_of", 1, MAX_ANSWERS),
    ("min_new_tokens", 0, MAX_COUNT),
    ("top_logprobs", 0, MAX_LOGPROBS),
    ("logprobs", 0, MAX_LOGPROBS),
)
# Fields that no answer is built for: refused with any value that asks for something.
FOREIGN = (
    "image_data", "return_routed_experts", "suffix", "functions", "function_call", "audio", "prediction",
    "web_search_options", "verbosity",
)  # fmt: skip
# Fields of OpenAI's API that change no answer, and the values that are taken; None takes any.
WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "user": None, "metadata": None, "safety_identifier": None, "prompt_cache_key": None, "prompt_cache_retention": None,
    "store": (False,), "service_tier": ("auto", "default"), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
PENALTIES = ("presence_penalty", "frequency_penalty")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Refused(Exception):
    """The message for the client: what was got, what is allowed. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_fields(raw: dict[str, Any], known: Iterable[str]) -> None:
    """Check that nothing is asked for that would be ignored.

    Args:
        raw: JSON of the request, without fields that are null.
        known: fields that the server reads.

    Raises:
        Refused: a field is unknown or has no effect here.
    """
    allowed = {*known, *WITHOUT_EFFECT, *FOREIGN, "session_id"}
    if unknown := sorted(raw.keys() - allowed):
        near = get_close_matches(unknown[0], sorted(set(known)), 1)
        hint = f"did you mean {near[0]}?" if near else "leave it out."
        raise Refused(f"{unknown[0]} is not a field of this request; {hint}")
    for name in PENALTIES:
        _check_penalty(name, raw.get(name, 0))
    for name in FOREIGN:
        if raw.get(name):
            raise Refused(f"{name} is not supported by this server; leave it out.")
    for name, values in WITHOUT_EFFECT.items():
        if values is not None and name in raw and raw[name] not in values:
            raise Refused(f"{name} is {json.dumps(raw[name])}; allowed: {', '.join(map(json.dumps, values))}.")


def _check_penalty(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and -2 <= value <= 2):
        raise Refused(f"{name} is {json.dumps(value)}; allowed: -2 to 2.")


def check_parameters(request: Any, raw: dict[str, Any], vocab_size: int) -> None:
    """Check a request of LMDeploy's pydantic model; `raw` is its JSON, with the fields the model does not know.

    Raises:
        Refused: the first value that is out of range.
    """
    if raw.get("session_id", -1) != -1:
        raise Refused("session_id is given by the server; leave it out.")
    if getattr(request, "tool_choice", None) == "required":
        raise Refused("tool_choice 'required' is not supported by this server; send 'auto', 'none' or a function.")
    for name, lowest, highest in COUNTS:
        _check_count(name, getattr(request, name, raw.get(name)), lowest, highest)
    wanted, best_of = raw.get("n", 1), raw.get("best_of")
    if best_of is not None and (best_of < wanted or (request.stream and best_of > wanted)):
        raise Refused(f"best_of is {best_of} with n {wanted}; it must not be less, and in a stream not more.")
    if getattr(request, "stream_options", None) and not request.stream:
        raise Refused("stream_options needs stream: true.")
    if getattr(request, "top_logprobs", None) and not request.logprobs:
        raise Refused("top_logprobs needs logprobs: true.")
    _check_sampling(request, vocab_size)
    _check_stops(request, vocab_size)


def stop_strings(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])


def _check_count(name: str, value: Any, lowest: int, highest: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int) and lowest <= value <= highest:
        return
    allowed = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
    raise Refused(f"{name} is {value}; allowed: {allowed}.")


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
