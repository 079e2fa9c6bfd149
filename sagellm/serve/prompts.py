"""The prompt of a request in tokens, as LMDeploy's handler will see it, without holding up the other requests."""

import asyncio
import copy
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sagellm.serve.parameters import ROLES, Refused, check_known

# Tokenizing takes about a second a megabyte, and the event loop would stand still; a thread costs a tenth of a millisecond.
THREAD_FROM_BYTES = 64 << 10
MESSAGE_FIELDS = ("role", "content", "name")  # `name` changes no answer where the template does not read it
TOOL_FIELDS = ("tool_calls", "tool_call_id", "reasoning_content")  # taken if the template reads them


class Prompts:
    """`engine` is LMDeploy's `AsyncEngine`. `context`: most tokens of a prompt and its answer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # The rows of the embedding: a tokenizer's own count leaves out tokens that were added to it.
        self.context = engine.session_len
        if engine.backend == "turbomind":  # it has cut its own context to its pool
            self.vocab_size = engine.engine.config.vocab_size
        else:
            self.vocab_size = engine.engine.model_config.vocab_size
            config = engine.backend_config
            if config.num_gpu_blocks:
                self.context = min(self.context, (config.num_gpu_blocks - 1) * config.block_size)
        # A vocabulary spells a token with at least as many letters as its text has.
        self._most_chars = self.context * max(map(len, engine.tokenizer.model.model.get_vocab()))
        # Renders as the engine does, but with `encode` below.
        self._rendering = copy.copy(engine)
        self._rendering.tokenizer = self

    def tokens(self, request: Any) -> list[list[int]]:
        """Return the token ids of every prompt, checked. From any thread.

        Raises:
            Refused: no prompt, one that is too long, or one that cannot be rendered.
        """
        if hasattr(request, "messages"):
            self._check_reads(request)
            check_messages(request.messages, [name for name in TOOL_FIELDS if self._reads(name)])
            prompts = [self._chat(request)]
        elif hasattr(request, "input_ids"):
            if (request.prompt is None) == (request.input_ids is None):
                raise Refused("give either prompt or input_ids.")
            texts = [] if request.prompt is None else [request.prompt]
            prompts = [self.encode(text) for text in texts] or [request.input_ids]
        else:
            given = split_prompt(request.prompt)
            prompts = [prompt if isinstance(prompt, list) else self.encode(prompt) for prompt in given]
        for tokens in prompts:
            self.check_tokens(tokens)
        return prompts

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the tokens of the text.

        Raises:
            Refused: so much text cannot fit, whatever it is.
        """
        if len(text) > self._most_chars:
            raise Refused(f"the prompt has {len(text)} characters; {self._how_much_fits()}")
        return self._engine.tokenizer.encode(text, **options)

    def check_tokens(self, tokens: list[int]) -> None:
        """Raises Refused for a prompt that the engine could not work on."""
        if not tokens:
            raise Refused("the prompt is empty; send at least one token.")
        if not all(0 <= token < self.vocab_size for token in tokens):
            raise Refused(f"token ids must lie between 0 and {self.vocab_size - 1}.")
        if len(tokens) >= self.context:
            raise Refused(f"the prompt has {len(tokens)} tokens; {self._how_much_fits()}")

    def encoded(self, request: Any) -> dict[str, Any]:
        """The answer of `/v1/encode`; of any length, since it is only counted."""
        texts = [request.input] if isinstance(request.input, str) else request.input
        if request.do_preprocess:
            texts = [self._engine.chat_template.get_prompt(text, sequence_start=request.add_bos) for text in texts]
        ids = [self._engine.tokenizer.encode(text, add_bos=request.add_bos) for text in texts]
        if isinstance(request.input, str):
            return {"input_ids": ids[0], "length": len(ids[0])}
        return {"input_ids": ids, "length": [len(each) for each in ids]}

    def _how_much_fits(self) -> str:
        return (
            f"with a context of {self.context} at most {self.context - 1} tokens are allowed. "
            "Shorten it, or start the server with a larger --context-length or --kv-blocks."
        )

    def _reads(self, word: str) -> bool:
        """Whether the chat template of the model has the word; LMDeploy's own templates read roles and contents alone."""
        tokenizer = getattr(getattr(self._engine, "chat_template", None), "tokenizer", None)
        return re.search(rf"\b{word}\b", str(getattr(tokenizer, "chat_template", None))) is not None

    def _check_reads(self, request: Any) -> None:
        is_rendered = request.do_preprocess and not isinstance(request.messages, str)
        for name in ("reasoning_effort", "enable_thinking"):
            if getattr(request, name) is not None and not (is_rendered and self._reads(name)):
                raise Refused(f"{name} is not read by the chat template of this model; leave it out.")

    def _chat(self, request: Any) -> list[int]:
        plain = isinstance(request.messages, str)
        coroutine = self._rendering._get_prompt_input(
            request.messages,
            request.do_preprocess and not plain,
            True,
            None,
            tools=None,
            reasoning_effort=request.reasoning_effort,
            enable_thinking=request.enable_thinking,
        )
        try:
            coroutine.send(None)  # it awaits nothing, so that it runs in any thread
        except StopIteration as end:
            return end.value["input_ids"]
        except Refused:
            raise
        except Exception as error:  # templates come with the model and raise what they like
            raise Refused(f"the chat template cannot render these messages: {error}") from None
        raise AssertionError("LMDeploy's _get_prompt_input awaits something")


async def in_turn(num_bytes: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)`, in a thread when there is much to do."""
    if num_bytes > THREAD_FROM_BYTES:
        return await asyncio.to_thread(work, *arguments)
    return work(*arguments)


async def together(work: Callable[[int], Awaitable[Any]], count: int, at_once: int) -> list[Any]:
    """Return `await work(number)` for each number below `count`.

    Once one fails, or this is cancelled, the others are cancelled too, and have ended when this does.

    Args:
        at_once: LMDeploy ends a request only when one of so many places is free, so others must not wait for one.
    """
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> Any:
        async with places:
            return await work(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_messages(messages: Any, more: Sequence[str] = ()) -> None:
    """Text is all that a language model reads; LMDeploy would drop the rest, or put its Python spelling into the prompt.

    Args:
        more: further fields of a message that the chat template reads.

    Raises:
        Refused: a message holds something else.
    """
    if not messages:
        raise Refused("messages is empty; send at least one message.")
    for number, message in enumerate([] if isinstance(messages, str) else messages):
        content, role = message.get("content"), message.get("role")
        if role not in ROLES:
            raise Refused(f"messages[{number}].role is {json.dumps(role)}; allowed are {', '.join(ROLES)}.")
        check_known(message, (*MESSAGE_FIELDS, *more), f"messages[{number}].")
        if not isinstance(message.get("name", ""), str | None):
            raise Refused(f"messages[{number}].name is {json.dumps(message['name'])[:60]}; send a string.")
        if content is None and role != "assistant":
            raise Refused(f"messages[{number}] of role {role} has no content; send a string.")
        if content is None or isinstance(content, str):
            continue
        for part in content if isinstance(content, list) else [content]:
            fits = isinstance(content, list) and isinstance(part, dict) and part.get("type") == "text"
            if not (fits and isinstance(part.get("text"), str)):
                raise Refused(
                    f"messages[{number}].content holds {json.dumps(part)[:60]}; allowed are null, a string, or a list "
                    "of {'type': 'text', 'text': ...}."
                )


def split_prompt(prompt: Any, field: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a request, each as text or as token ids.

    Args:
        prompt: one of the four forms of OpenAI's API.
        field: name of the field that holds it, for errors.

    Raises:
        Refused: it has none of these forms.
    """
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and all(_is_id(item) for item in prompts):
        return [prompts]
    for form in (lambda item: isinstance(item, str), lambda item: isinstance(item, list) and all(map(_is_id, item))):
        if prompts and all(map(form, prompts)):
            return prompts
    raise Refused(f"{field} must be a string, a list of strings, a list of token ids, or a list of such lists.")


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
