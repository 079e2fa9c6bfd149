"""The text of an answer, token by token, also where a step of the engine gave several.

LMDeploy turns the tokens of a step into text at once, and keeps all of it back while its last character is not complete.
An answer that ends there would lose the text of further tokens, and the token that completes a stop string would be
unknown.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

# Texts of the tokens of the chunk that is being made, which the reader of the generation takes out; None without a reader.
TEXTS: ContextVar[list[str] | None] = ContextVar("sagellm_token_texts", default=None)


def by_token(detokenize: Callable[..., tuple[str, Any]]) -> Callable[..., tuple[str, Any]]:
    """For LMDeploy's `detokenize_incrementally`: the same, given one token after the other. O(text) a token, as there."""

    def run(all_input_ids: Sequence[int], state: Any, *args: Any, **options: Any) -> tuple[str, Any]:
        size, texts = len(all_input_ids), []
        for end in range(state.ids_offset + 1, size):
            text, state = detokenize(all_input_ids[:end], state, *args, **options)
            texts.append(text)
        text, state = detokenize(all_input_ids, state, *args, **options)
        texts.append(text)
        if (read := TEXTS.get()) is not None:
            read[:] = texts
        return "".join(texts), state

    return run
