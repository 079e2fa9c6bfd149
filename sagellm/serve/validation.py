"""Requests that LMDeploy would pass on to the engine although they cannot be served are answered here, with a 400.

Some of them would stop the engine for everybody: a token id outside the vocabulary, a schema that does not compile.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = (CHAT, COMPLETION, GENERATE)
COUNTS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n")
MAX_LOGPROBS = 20  # OpenAI's limit; a number beyond the vocabulary would end the engine's loop


class Refused(Exception):  # noqa: N818 - becomes a response, never an error of ours
    """The message for the client: what was got, what is allowed."""


class RequestValidation:
    """ASGI middleware. `engine` is LMDeploy's `AsyncEngine`."""

    def __init__(self, app: Callable[..., Awaitable[None]], engine: Any) -> None:
        self._app = app
        self._engine = engine
        config = engine.backend_config
        pool_tokens = (config.num_gpu_blocks - 1) * config.block_size
        self._context = min(engine.session_len, pool_tokens) if config.num_gpu_blocks else engine.session_len

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        try:
            request = _parse(body)
            if request is not None:
                await self._check(scope["path"], request)
        except Refused as refused:
            await _answer(send, 400, str(refused))
            return
        await self._app(scope, _replay(body, receive), send)

    async def _check(self, path: str, request: dict[str, Any]) -> None:
        if request.get("model") not in (None, self._engine.model_name):
            return  # LMDeploy answers 404
        for name in COUNTS:
            _check_count(name, request.get(name))
        for name in ("logprobs", "top_logprobs"):
            _check_logprobs(name, request.get(name))
        _check_format(request.get("response_format"))
        for tokens in await self._prompts(path, request):
            self._check_tokens(tokens, request)

    async def _prompts(self, path: str, request: dict[str, Any]) -> list[list[int]]:
        """Token ids of the prompts, as the handler will see them; empty where the handler itself refuses the form."""
        if path == CHAT:
            return await self._chat_prompt(request)
        if path == GENERATE and request.get("input_ids") is not None:
            return [request["input_ids"]]
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            prompt = [prompt]
        if not isinstance(prompt, list):
            return []
        if prompt and all(isinstance(item, int) for item in prompt):
            raise Refused("prompt is a list of token ids; send text, or use /generate with input_ids.")
        if not all(isinstance(item, str) for item in prompt):
            raise Refused("prompt must be a string or a list of strings.")
        return [self._engine.tokenizer.encode(text) for text in prompt]

    async def _chat_prompt(self, request: dict[str, Any]) -> list[list[int]]:
        messages = request.get("messages")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return []
        if not messages:
            raise Refused("messages is empty; send at least one message.")
        try:
            rendered = await self._engine._get_prompt_input(
                messages, True, True, self._engine.model_name, tools=request.get("tools")
            )
        except Exception as error:
            raise Refused(f"the chat template cannot render these messages: {error}") from None
        return [rendered["input_ids"]]

    def _check_tokens(self, tokens: list[int], request: dict[str, Any]) -> None:
        vocab = self._engine.tokenizer.vocab_size
        if not isinstance(tokens, list) or not tokens:
            raise Refused("the prompt is empty; send at least one token.")
        if not all(isinstance(token, int) and 0 <= token < vocab for token in tokens):
            raise Refused(f"input_ids must lie between 0 and {vocab - 1}.")
        if len(tokens) >= self._context:
            raise Refused(
                f"the prompt has {len(tokens)} tokens; with a context of {self._context} at most {self._context - 1} "
                "are allowed. Shorten it, or start the server with a larger --context-length or --kv-blocks."
            )


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise Refused(f"{name} is {value}; it must be at least 1.")


def _check_logprobs(name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value <= MAX_LOGPROBS:
        raise Refused(f"{name} is {value}; allowed are 0 to {MAX_LOGPROBS}.")


def _check_format(wanted: Any) -> None:
    """Compile a schema here: in the engine a schema that does not compile ends every request."""
    if not isinstance(wanted, dict):
        return
    import xgrammar

    kind = wanted.get("type")
    try:
        if kind == "json_schema":
            schema = wanted.get("json_schema")
            for key in ("json_schema", "schema"):
                if isinstance(schema, dict) and key in schema:
                    schema = schema[key]
                    break
            if not isinstance(schema, dict):
                raise ValueError(f"the schema is {schema!r}, not an object")
            xgrammar.Grammar.from_json_schema(json.dumps(schema))
        elif kind == "regex_schema":
            xgrammar.Grammar.from_regex(wanted.get("regex_schema", ""))
    except Exception as error:
        raise Refused(f"response_format cannot be compiled: {error}") from None


def _parse(body: bytes) -> dict[str, Any] | None:
    """The JSON object, or None where LMDeploy itself answers 422."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    return request if isinstance(request, dict) else None


async def _read(receive: Callable) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body") or message["type"] == "http.disconnect":
            return b"".join(parts)


def _replay(body: bytes, receive: Callable) -> Callable:
    sent = False

    async def replay() -> dict:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Callable, status: int, message: str) -> None:
    error = {"object": "error", "message": message, "type": "invalid_request_error", "code": status}
    body = json.dumps({**error, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
