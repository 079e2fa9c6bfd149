"""Requests that LMDeploy would pass on to the engine although they cannot be served are answered here, with a 4xx.

Some of them would stop the engine for everybody: a token id outside the vocabulary, a schema that does not compile.
Paths that belong to other kinds of deployment, which could do the same, are not served at all.
"""

import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from sagellm.serve.formats import check_format
from sagellm.serve.parameters import Refused, check_parameters

CHAT, COMPLETION, GENERATE, ENCODE = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/encode"
POST_PATHS = (CHAT, COMPLETION, GENERATE, ENCODE)
GET_PATHS = ("/", "/health", "/metrics", "/openapi.json", "/v1/models")
MAX_BODY_BYTES = 32 << 20


class RequestValidation:
    """ASGI middleware. `engine` is LMDeploy's `AsyncEngine`, `interface` what its handlers share."""

    def __init__(self, app: Callable[..., Awaitable[None]], engine: Any, interface: Any) -> None:
        from lmdeploy.serve.openai import protocol

        self._app, self._engine, self._interface = app, engine, interface
        self._models: dict[str, type[BaseModel]] = {
            CHAT: protocol.ChatCompletionRequest,
            COMPLETION: protocol.CompletionRequest,
            GENERATE: protocol.GenerateReqInput,
            ENCODE: protocol.EncodeRequest,
        }
        # The rows of the embedding: a tokenizer's own count leaves out tokens that were added to it.
        self._vocab = engine.engine.model_config.vocab_size
        config = engine.backend_config
        pool_tokens = (config.num_gpu_blocks - 1) * config.block_size
        self._context = min(engine.session_len, pool_tokens) if config.num_gpu_blocks else engine.session_len

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            path = self._known_path(scope)
            if path in POST_PATHS and self._has_key(scope):
                _check_media_type(scope)
                raw = _parse(await _read(receive))
                raw = await self._checked(path, raw)
                receive = _replay(json.dumps(raw).encode(), receive)
        except Refused as refused:
            await _answer(send, refused.status, str(refused))
            return
        await self._app(scope, receive, send)

    def _known_path(self, scope: dict) -> str:
        """The path, "" where LMDeploy or the layers around it answer for themselves."""
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in POST_PATHS:
            return path
        if method in ("GET", "HEAD") and (path in GET_PATHS or path.startswith("/metrics/")):
            return ""
        if path in POST_PATHS or path in GET_PATHS:
            raise Refused(f"{path} does not take {method}.", 405)
        known = ", ".join((*GET_PATHS, *POST_PATHS))
        raise Refused(f"there is no {path} here; known are {known}.", 404)

    def _has_key(self, scope: dict) -> bool:
        """False where LMDeploy answers 401; a client without a key is not worth the work of a check."""
        keys = self._interface.api_keys
        if not keys:
            return True
        kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return kind.lower() == b"bearer" and any(secrets.compare_digest(key, known.encode()) for known in keys)

    async def _checked(self, path: str, raw: dict[str, Any]) -> dict[str, Any]:
        """The JSON that the handler gets.

        Raises:
            Refused: it must not get any.
        """
        raw = {name: value for name, value in raw.items() if value is not None}  # null means: the default
        try:
            request = self._models[path].model_validate(raw)
        except ValidationError as error:
            raise Refused(_explain(error)) from None
        if path == ENCODE:
            return raw
        if getattr(request, "model", self._engine.model_name) != self._engine.model_name:
            return raw  # LMDeploy answers 404
        check_parameters(request, raw, self._vocab)
        if path == CHAT:
            check_format(request)
        prompts = await self._prompts(path, request)
        for tokens in prompts:
            self._check_tokens(tokens)
        if request.stream and len(prompts) > 1:
            raise Refused(f"stream with {len(prompts)} prompts is not supported; send one prompt a request.")
        return {**raw, **self._amended(path, request, len(prompts))}

    def _amended(self, path: str, request: Any, num_prompts: int) -> dict[str, Any]:
        """Fields that LMDeploy would take differently from what OpenAI's API says."""
        # LMDeploy counts requests but uses one id a prompt, so that ids of concurrent requests would collide.
        fields: dict[str, Any] = {"session_id": self._interface.session_id + 1}
        self._interface.session_id += num_prompts
        if getattr(request, "seed", None) == 0:
            fields["seed"] = 1 << 32  # 0 would mean none; the engine uses the low 32 bits
        if path == CHAT and request.logprobs and not request.top_logprobs:
            fields["top_logprobs"] = 1  # without it the chosen token's would be left out too
        return fields

    async def _prompts(self, path: str, request: Any) -> list[list[int]]:
        """Token ids of the prompts, as the handler will see them."""
        if path == CHAT:
            return [await self._chat_prompt(request)]
        if path == GENERATE:
            if (request.prompt is None) == (request.input_ids is None):
                raise Refused("give either prompt or input_ids.")
            return [self._encode(request.prompt) if request.input_ids is None else request.input_ids]
        prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if prompts and all(isinstance(item, int) for item in prompts):
            raise Refused("prompt is a list of token ids; send text, or use /generate with input_ids.")
        if not prompts or not all(isinstance(item, str) for item in prompts):
            raise Refused("prompt must be a string, or a list of at least one string.")
        return [self._encode(text) for text in prompts]

    def _encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    async def _chat_prompt(self, request: Any) -> list[int]:
        if not request.messages:
            raise Refused("messages is empty; send at least one message.")
        plain = isinstance(request.messages, str)
        try:
            rendered = await self._engine._get_prompt_input(
                request.messages,
                request.do_preprocess and not plain,
                True,
                None,
                tools=self._tools(request),
                reasoning_effort=request.reasoning_effort,
                enable_thinking=request.enable_thinking,
            )
        except Refused:
            raise
        except Exception as error:  # templates come with the model and raise what they like
            raise Refused(f"the chat template cannot render these messages: {error}") from None
        return rendered["input_ids"]

    def _tools(self, request: Any) -> list[dict[str, Any]] | None:
        if not request.tools or request.tool_choice == "none":
            return None
        tools = request.tools
        if not isinstance(request.tool_choice, str):
            wanted = request.tool_choice.function.name
            tools = [tool for tool in tools if tool.function.name == wanted]
            if not tools:
                raise Refused(f"tool_choice names {wanted!r}, which is not among the tools.")
        whole = self._engine.arch == "GptOssForCausalLM"
        return [tool.model_dump() if whole else tool.function.model_dump() for tool in tools]

    def _check_tokens(self, tokens: list[int]) -> None:
        if not tokens:
            raise Refused("the prompt is empty; send at least one token.")
        if not all(0 <= token < self._vocab for token in tokens):
            raise Refused(f"token ids must lie between 0 and {self._vocab - 1}.")
        if len(tokens) >= self._context:
            raise Refused(
                f"the prompt has {len(tokens)} tokens; with a context of {self._context} at most {self._context - 1} "
                "are allowed. Shorten it, or start the server with a larger --context-length or --kv-blocks."
            )


def _check_media_type(scope: dict) -> None:
    media = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise Refused("send the body with the header Content-Type: application/json.", 415)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body, parse_constant=_no_constant)
        json.dumps(request, ensure_ascii=False).encode()  # fails for half a surrogate pair, which no tokenizer takes
    except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
        raise Refused(f"the body is not JSON: {error}.") from None
    if not isinstance(request, dict):
        raise Refused(f"the body is a JSON {type(request).__name__}; send an object.")
    return request


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _explain(error: ValidationError) -> str:
    """One sentence a field."""
    lines = {".".join(str(part) for part in item["loc"][:1]): item["msg"] for item in error.errors()}
    return "; ".join(f"{name}: {message}" for name, message in lines.items()) + "."


async def _read(receive: Callable) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise Refused(f"the body is larger than {MAX_BODY_BYTES} bytes.", 413)
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
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    body = json.dumps({"object": "error", **error, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
