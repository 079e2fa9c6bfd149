"""The prompt in the answer of a completion (`echo`), with log probabilities of its tokens; evaluation harnesses need them."""

import asyncio
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Echo", "echo_of", "with_echo"]


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
    """
    model = engine.tokenizer.model
    if text is None:
        text = model.decode(tokens, skip_special_tokens=False)
    if num_top is None:
        return Echo(text, None)
    logits = await _logits(engine, tokens, session_id)
    own, top_ids, top_values = await asyncio.to_thread(_ranked, logits, tokens, num_top)
    pieces = [model.decode([token], skip_special_tokens=False) for token in tokens]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    top: list[Any] = [None]
    for ids, values, token, value in zip(top_ids, top_values, tokens[1:], own, strict=True):
        row = {model.decode([number], skip_special_tokens=False): score for number, score in zip(ids, values, strict=True)}
        top.append(row | {model.decode([token], skip_special_tokens=False): value})
    return Echo(
        text, {"tokens": pieces, "token_logprobs": [None, *own], "top_logprobs": top, "text_offset": [0, *ends[:-1]]}
    )


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
    from fastapi import HTTPException
    from lmdeploy.messages import GenerationConfig

    # Sampling works on the last row in place: any other temperature would scale it.
    config = GenerationConfig(max_new_tokens=0, output_logits="all", temperature=1.0, top_k=1)
    instance, logits = engine.engine.create_instance(), None
    try:
        async for output in instance.async_stream_infer(session_id, tokens, gen_config=config):
            logits = output.logits if output.logits is not None else logits
    finally:
        await instance.async_end(session_id)
    if logits is None or len(logits) != len(tokens):
        raise HTTPException(500, "the engine gave no scores for the prompt; its log says why.")
    return logits


def _ranked(logits: Any, tokens: list[int], num_top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the log probability of each token after the first, and the likeliest tokens at its place."""
    import torch

    scores = logits[:-1].float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    top = scores.topk(num_top) if num_top else None
    ids = top.indices.tolist() if top is not None else [[] for _ in tokens[1:]]
    return own.tolist(), ids, top.values.tolist() if top is not None else [[] for _ in tokens[1:]]
