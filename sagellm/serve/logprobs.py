"""Log probabilities of chat answers as OpenAI's API words them.

LMDeploy names tokens as its vocabulary spells them (a space is a special letter there) and leaves the chosen token out
of `top_logprobs`.
"""

from typing import Any


def chat_logprobs(tokenizer: Any, token_ids: list[int] | None, logprobs: list[dict[int, float]] | None) -> Any:
    """Takes the place of LMDeploy's function of the same arguments; returns its `ChoiceLogprobs`, or None.

    `logprobs`: for each token the most likely ones; the chosen token is always among them, so that there may be one
    more than were asked for.
    """
    from lmdeploy.serve.openai.protocol import ChatCompletionTokenLogprob, ChoiceLogprobs, TopLogprob

    if not token_ids or not logprobs:
        return None
    content = []
    for chosen, likely in zip(token_ids, logprobs, strict=False):
        ranked = sorted(likely.items(), key=lambda item: -item[1])
        top = [TopLogprob(**_token(tokenizer, token), logprob=value) for token, value in ranked]
        entry = ChatCompletionTokenLogprob(**_token(tokenizer, chosen), logprob=likely[chosen], top_logprobs=top)
        content.append(entry)
    return ChoiceLogprobs(content=content)


def _token(tokenizer: Any, token: int) -> dict[str, Any]:
    text = tokenizer.decode([token], skip_special_tokens=False)
    return {"token": text, "bytes": list(text.encode())}
