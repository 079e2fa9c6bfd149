"""The prompt in the answer of a completion (`echo`), with log probabilities of its tokens; evaluation harnesses need them."""

import asyncio
import copy
from typing import Any, NamedTuple

import numpy as np

from sagellm.engines.lmdeploy.pooling import infer_prompt
from sagellm.serve.parameters import Refused

__all__ = ["Echo", "TokenTexts", "echo_of", "with_echo"]

INCOMPLETE = "\ufffd"  # ends the text of tokens that end within a character
ROWS = 256  # of scores that are looked at together: each has a number for every token of the vocabulary


class Echo(NamedTuple):
    """A prompt as an answer begins with it. `logprobs`: in the form of OpenAI's completions, or None."""

    text: str
    logprobs: dict[str, list[Any]] | None


async def echo_of(engine: Any, tokens: list[int], text: str | None, num_top: int | None, session_id: int) -> Echo:
    """Make the echo of a prompt.

    Args:
        engine: LMDeploy's `AsyncEngine`.
        text: of the prompt; None decodes the tokens.
        num_top: likeliest tokens to name at each place; None leaves out log probabilities.
        session_id: an unused one, for the pass that scores the prompt.

    Raises:
        Refused: the engine gives no scores.
    """
    tokenizer = engine.tokenizer.model.model
    if num_top is None:
        return Echo(text if text is not None else TokenTexts(tokenizer).of(tokens), None)
    logits = await _logits(engine, tokens, session_id)
    return await asyncio.to_thread(_scored, tokenizer, tokens, text, logits, num_top)


def _scored(tokenizer: Any, tokens: list[int], text: str | None, logits: Any, num_top: int) -> Echo:
    own, top_ids, top_values = _ranked(logits, tokens, num_top)
    texts, pieces, names = TokenTexts(tokenizer), [], []
    for place, token in enumerate(tokens):
        names.append([texts.look(other) for other in top_ids[place - 1]] if place else [])
        pieces.append(texts.take(token))
    if text is None:
        text = "".join(pieces)
    pieces = _aligned(pieces, text, [token in tokenizer.all_special_ids for token in tokens])
    top: list[Any] = [None]
    for place in range(1, len(tokens)):
        row = {pieces[place]: own[place - 1]}
        for other, name, value in zip(top_ids[place - 1], names[place], top_values[place - 1], strict=True):
            if other != tokens[place]:
                # A part of a character has no text of its own, and tokens may share theirs.
                has_name = name and INCOMPLETE not in name and name not in row
                row[name if has_name else tokenizer.convert_ids_to_tokens(other) or str(other)] = value
        top.append(row)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return Echo(
        text, {"tokens": pieces, "token_logprobs": [None, *own], "top_logprobs": top, "text_offset": [0, *ends[:-1]]}
    )


class TokenTexts:
    """Texts of tokens one after the other, each as what it adds to those before it.

    A character that several tokens make is the text of the last of them.

    Args:
        skip_special: whether special tokens have no text.
    """

    def __init__(self, tokenizer: Any, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special else frozenset()
        self._shown: list[int] = []  # the last tokens with a text; a tokenizer may write the first token otherwise
        self._begun: list[int] = []  # tokens of a character that is not complete

    def anew(self) -> "TokenTexts":
        """Return the same for another text."""
        other = copy.copy(self)
        other._shown, other._begun = [], []
        return other

    def of(self, tokens: list[int]) -> str:
        return "".join(map(self.take, tokens))

    def take(self, token: int) -> str:
        """Return the text of the next token."""
        if token in self._skipped:
            return ""
        text = self.look(token)
        if text:
            self._shown, self._begun = [*self._begun, token], []
        else:
            self._begun.append(token)
        return text

    def look(self, token: int) -> str:
        """Return the text that the token would have here; empty where it completes no character."""
        after = self._decoded([*self._shown, *self._begun, token])
        return "" if after.endswith(INCOMPLETE) else after[len(self._decoded(self._shown)) :]

    def _decoded(self, tokens: list[int]) -> str:
        words = [word for word in self._tokenizer.convert_ids_to_tokens(tokens) if word is not None]
        return self._tokenizer.convert_tokens_to_string(words) if words else ""


def _aligned(pieces: list[str], text: str, special: list[bool]) -> list[str]:
    """Return the pieces as the text has them: without tokens and a first space that the tokenizer has added to it.

    Where a tokenizer changes texts in other ways they do not fit, and come back as they are.
    """
    found, at = [], 0
    for piece, is_special in zip(pieces, special, strict=True):
        forms = (piece, "") if is_special else (piece, piece.removeprefix(" "))
        fitting = next((form for form in forms if text.startswith(form, at)), None)
        if fitting is None:
            return pieces
        found.append(fitting)
        at += len(fitting)
    return found


def with_echo(choice: dict[str, Any], echo: Echo, keeps_answer: bool) -> dict[str, Any]:
    """Return a choice that begins with its prompt.

    Args:
        keeps_answer: whether anything was to be generated; LMDeploy generates one token at least.
    """
    answer = choice["text"] if keeps_answer else ""
    found = choice | {"text": echo.text + answer}
    if echo.logprobs is None:
        return found
    logprobs = {name: list(values) for name, values in echo.logprobs.items()}
    own = choice.get("logprobs") if keeps_answer else None
    for name, values in (own or {}).items():
        added = [len(echo.text) + offset for offset in values] if name == "text_offset" else values
        logprobs[name] += added or []
    return found | {"logprobs": logprobs}


async def _logits(engine: Any, tokens: list[int], session_id: int) -> Any:
    from lmdeploy.messages import GenerationConfig

    # Sampling works on the last row in place: any other temperature would scale it.
    config = GenerationConfig(max_new_tokens=0, output_logits="all", temperature=1.0, top_k=1)
    _, logits = await infer_prompt(engine.engine, session_id, tokens, config)
    if logits is None or len(logits) != len(tokens):
        raise Refused("the engine gave no scores for the prompt; its log says why.", 500)
    return logits


def _ranked(logits: Any, tokens: list[int], num_top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the log probability of each token after the first, and the likeliest tokens at its place."""
    import torch

    own, ids, values = [], [], []
    for start in range(0, len(tokens) - 1, ROWS):
        scores = logits[start : min(start + ROWS, len(tokens) - 1)].float().log_softmax(-1)
        chosen = torch.tensor(tokens[start + 1 : start + 1 + len(scores)])
        own += scores.gather(1, chosen[:, None])[:, 0].tolist()
        top = scores.topk(num_top)
        ids += top.indices.tolist()
        values += top.values.tolist()
    return own, ids, values
