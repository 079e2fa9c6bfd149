"""Fields of a request that LMDeploy's handlers do not pass on to the engine.

They travel beside the handlers in a context variable, as in `service`, and `GuardedGeneration` puts them into the request's
`GenerationConfig`.
"""

import dataclasses
import json
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from lmdeploy.serve.openai.protocol import ResponseFormat
from pydantic import ValidationError

from sagellm.core.running import PaddedPrompt
from sagellm.engines.lmdeploy.adjust import ScoreChanges
from sagellm.serve.parameters import Refused, engine_seed
from sagellm.serve.prompts import split_prompt

__all__ = ["FIELDS", "WISHES", "apply", "set_wishes", "take_wishes"]

# By session id of a prompt: fields of `GenerationConfig`.
WISHES: ContextVar[dict[int, dict[str, Any]] | None] = ContextVar("sagellm_wishes", default=None)

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
_SCORES = frozenset({"presence_penalty", "frequency_penalty", "logit_bias"})
FIELDS = {
    CHAT: frozenset({"min_tokens", "stop_token_ids"}) | _SCORES,
    COMPLETION: frozenset({"min_tokens", "stop_token_ids", "response_format"}) | _SCORES,
    GENERATE: frozenset({"min_tokens", "seed", "response_format"}) | _SCORES,
}
TOKENS, PARENT = "input_ids", "parent"  # of a prompt; no fields of `GenerationConfig`
MAX_BIASED = 1024  # tokens
MAX_BIAS = 100.0


def take_wishes(path: str, raw: dict[str, Any], prompts: Sequence[list[int]], vocab_size: int) -> list[dict[str, Any]]:
    """Take the fields out of `raw`, check them, and return those of `GenerationConfig` for each prompt.

    Args:
        raw: JSON of the request, after `check_parameters`.
        prompts: token ids of each prompt.

    Raises:
        Refused: a value is out of range.
    """
    given = {name: raw.pop(name) for name in FIELDS.get(path, ()) if name in raw}
    wishes: dict[str, Any] = {}
    if (count := given.get("min_tokens")) is not None:
        wishes["min_new_tokens"] = count
    if (seed := given.get("seed")) is not None:
        wishes["random_seed"] = engine_seed(seed)
    if path == COMPLETION and raw.get("logprobs") == 0:  # the chosen token's alone; LMDeploy's handler takes 0 for none
        raw["logprobs"], wishes["logprobs"] = 1, 0
    if (tokens := given.get("stop_token_ids")) is not None:
        if not isinstance(tokens, list):
            raise Refused(f"stop_token_ids is {json.dumps(tokens)[:60]}; send a list of token ids.")
        wishes["stop_token_ids"] = [_whole("stop_token_ids", token, 0, vocab_size - 1) for token in tokens]
    if (wanted := given.get("response_format")) is not None and wanted != {"type": "text"}:
        if raw.get("ignore_eos") or wishes.get("min_new_tokens"):
            raise Refused("response_format cannot be combined with ignore_eos or min_tokens: the format says where to end.")
        wishes["response_format"] = _format(wanted)
    every = [wishes] * len(prompts)
    if path == COMPLETION and not all(isinstance(prompt, str) for prompt in split_prompt(raw["prompt"])):
        # LMDeploy's handler takes texts alone; the generation replaces these.
        raw["prompt"] = [""] * len(prompts)
        every = [wishes | {TOKENS: prompt} for prompt in prompts]
    presence, frequency = (float(given.get(name, 0)) for name in ("presence_penalty", "frequency_penalty"))
    bias = _bias(given.get("logit_bias") or {}, vocab_size)
    if not (presence or frequency or bias):
        return every
    return [
        own | {"logits_processors": [ScoreChanges(presence, frequency, bias, PaddedPrompt.of(prompt))]}
        for own, prompt in zip(every, prompts, strict=True)
    ]


def set_wishes(session_id: int, wishes: Sequence[dict[str, Any]], parent: int | None = None) -> None:
    """Let the generations of this context have what `take_wishes` returned.

    Args:
        session_id: of the first prompt; those of the others follow.
        parent: session id of another answer to the first prompt, of which these are branches.
    """
    if parent is not None:
        wishes = [each | {PARENT: parent + number} for number, each in enumerate(wishes)]
    WISHES.set({session_id + number: each for number, each in enumerate(wishes) if each} or None)


def apply(session_id: int, gen_config: Any) -> tuple[Any, list[int] | None, int | None]:
    """Return the configuration with what the request wishes, the prompt if it was given in token ids, and the parent."""
    wishes = dict((WISHES.get() or {}).get(session_id, {}))
    tokens, parent = wishes.pop(TOKENS, None), wishes.pop(PARENT, None)
    return (dataclasses.replace(gen_config, **wishes) if wishes else gen_config), tokens, parent


def _whole(name: str, value: Any, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise Refused(f"{name} holds {json.dumps(value)[:60]}; allowed are whole numbers from {lowest} to {highest}.")
    return value


def _format(wanted: Any) -> dict[str, Any]:
    from sagellm.serve.formats import compile_format

    try:
        model = ResponseFormat.model_validate(wanted)
    except ValidationError as error:
        raise Refused(f"response_format cannot be read: {error.errors()[0]['msg']}.") from None
    compile_format(model)
    return model.model_dump()


def _bias(given: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(given, dict) or len(given) > MAX_BIASED:
        raise Refused(f"logit_bias must be an object with at most {MAX_BIASED} token ids.")
    found = {}
    for key, value in given.items():
        if not key.isdecimal() or int(key) >= vocab_size:
            raise Refused(f"logit_bias has the key {key[:20]!r}; allowed are token ids from 0 to {vocab_size - 1}.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise Refused(f"logit_bias of {key} is {json.dumps(value)[:20]}; allowed: -{MAX_BIAS:g} to {MAX_BIAS:g}.")
        found[int(key)] = float(value)
    return found
