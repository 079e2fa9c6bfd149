"""Requests that LMDeploy would pass on to the engine although they cannot be served are answered here, with a 4xx.

Some of them would stop the engine for everybody: a token id outside the vocabulary, a schema that does not compile.
Paths that belong to other kinds of deployment, which could do the same, are not served at all.
"""

import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers

from sagellm.serve.formats import check_format
from sagellm.serve.group import DROP, INFO, GroupGate, Membership, unsplit
from sagellm.serve.parameters import Refused, check_parameters
from sagellm.serve.prompts import Prompts, in_turn
from sagellm.serve.service import SERVICE, take_service
from sagellm.serve.speculation import USAGE, take_wish

CHAT, COMPLETION, GENERATE, ENCODE = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/encode"
POST_PATHS = (CHAT, COMPLETION, GENERATE, ENCODE)
GET_PATHS = ("/", "/health", "/metrics", "/openapi.json", "/v1/models")
MAX_BODY_BYTES = 32 << 20


class RequestValidation:
    """ASGI middleware. `engine` is LMDeploy's `AsyncEngine`, `interface` what its handlers share; `member`: where the server is
    one of a prefill/decode group."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], engine: Any, interface: Any, member: Membership | None = None
    ) -> None:
        from lmdeploy.serve.openai import protocol

        self._app, self._engine, self._interface = app, engine, interface
        self._gate = GroupGate(member)
        self._models: dict[str, type[BaseModel]] = {
            CHAT: protocol.ChatCompletionRequest,
            COMPLETION: protocol.CompletionRequest,
            GENERATE: protocol.GenerateReqInput,
            ENCODE: protocol.EncodeRequest,
        }
        self._prompts = Prompts(engine)

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_trusted = self._gate.is_trusted(scope, headers)
        try:
            path = self._known_path(scope)
            if self._gate.is_for_group(path):
                self._gate.check_path(path, headers, is_trusted)
                body = await _read(receive)
                self._gate.check_signature(scope, headers, body)
                if path == INFO:
                    await _answer(send, 200, self._gate.info)
                    return
                if path == DROP:
                    # LMDeploy's handler would end all connections to its engine process, over a coroutine that it pickles.
                    # There is nothing to do: a connection between engines ends with either of them.
                    await _answer(send, 200, {"success": True})
                    return
                receive = _replay(body, receive)
            elif path in POST_PATHS:
                self._check_key(headers)  # before the body is read: a stranger may send as much as he likes
                _check_media_type(headers)
                body = await _read(receive)
                is_signed = self._gate.check_signature(scope, headers, body)
                raw = {name: value for name, value in _parse(body).items() if value is not None}  # null: the default
                self._gate.check_body(raw, is_signed, is_trusted)
                if is_trusted and not is_signed:
                    raw = unsplit(raw)
                request = self._model(path, raw)
                if path == ENCODE:
                    await _answer(send, 200, await self._encoded(request, len(body)))
                    return
                # Also where nothing is asked for: a pipelined request begins in the context of the one before it.
                SERVICE.set(take_service(raw, headers.raw))
                USAGE.set(take_wish(raw))
                raw = await self._checked(path, raw, request, len(body))
                receive = _replay(json.dumps(raw).encode(), receive)
        except Refused as refused:
            error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.status}
            document = {"object": "error", **error, "error": error} | self._gate.answer_of_refusal(is_trusted)
            await _answer(send, refused.status, document)
            return
        await self._app(scope, receive, send)

    def _known_path(self, scope: dict) -> str:
        """The path, "" where LMDeploy or the layers around it answer for themselves."""
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in POST_PATHS:
            return path
        if self._gate.is_for_group(path) and (path != INFO or method == "GET"):
            return path
        if method in ("GET", "HEAD") and (path in GET_PATHS or path.startswith("/metrics/")):
            return ""
        if path in POST_PATHS or path in GET_PATHS or path == INFO:
            raise Refused(f"{path} does not take {method}.", 405)
        known = ", ".join((*GET_PATHS, *POST_PATHS))
        raise Refused(f"there is no {path} here; known are {known}.", 404)

    def _check_key(self, headers: Headers) -> None:
        """LMDeploy's own check, with the same parser: where two of them differ, a body would pass unchecked."""
        keys = self._interface.api_keys
        if not keys:
            return
        scheme, key = get_authorization_scheme_param(headers.get("authorization"))
        known = any([secrets.compare_digest(key.encode(), each.encode()) for each in keys])
        if scheme.lower() != "bearer" or not known:
            raise Refused("send a valid API key with the header Authorization: Bearer KEY.", 401)

    def _model(self, path: str, raw: dict[str, Any]) -> Any:
        """The request as LMDeploy's own model reads it.

        Raises:
            Refused: it does not, or another model is wanted; `/generate` does not look at the name.
        """
        try:
            request = self._models[path].model_validate(raw)
        except ValidationError as error:
            raise Refused(_explain(error)) from None
        name = raw.get("model", self._engine.model_name)
        if path != GENERATE and name != self._engine.model_name:
            raise Refused(f"The model {name!r} does not exist.", 404)
        return request

    async def _encoded(self, request: Any, num_bytes: int) -> dict[str, Any]:
        """LMDeploy's handler would hold up all other requests for as long as a text takes."""
        try:
            return await in_turn(num_bytes, self._prompts.encoded, request)
        except Exception as error:  # as in `Prompts`: the template's
            raise Refused(f"input cannot be encoded: {error}") from None

    async def _checked(self, path: str, raw: dict[str, Any], request: Any, num_bytes: int) -> dict[str, Any]:
        """The JSON that the handler gets.

        Raises:
            Refused: it must not get any.
        """
        check_parameters(request, raw, self._prompts.vocab_size)
        if path == CHAT:
            check_format(request)
        prompts = await self._prompts.tokens(request, num_bytes)
        if request.stream and len(prompts) > 1:
            raise Refused(f"stream with {len(prompts)} prompts is not supported; send one prompt a request.")
        if raw.get("migration_request") and (len(prompts) > 1 or raw.get("n", 1) != 1):
            raise Refused("migration_request is of one prompt and one answer; split requests have no more.")
        if raw.get("preserve_cache") and len(prompts) > 1:
            raise Refused("preserve_cache is of one prompt; send one.")
        return {**raw, **self._amended(path, request, len(prompts), bool(raw.get("preserve_cache")))}

    def _amended(self, path: str, request: Any, num_prompts: int, is_prompt: bool) -> dict[str, Any]:
        """Fields that LMDeploy would take differently from what OpenAI's API says. `is_prompt`: the prompt alone is to be
        computed, for another engine."""
        # LMDeploy counts requests but uses one id a prompt, so that ids of concurrent requests would collide.
        fields: dict[str, Any] = {"session_id": self._interface.session_id + 1}
        self._interface.session_id += num_prompts
        if getattr(request, "seed", None) == 0:
            fields["seed"] = 1 << 32  # 0 would mean none; the engine uses the low 32 bits
        if path == CHAT and request.logprobs and not request.top_logprobs:
            fields["top_logprobs"] = 1  # without it the chosen token's would be left out too
        if is_prompt and getattr(request, "min_new_tokens", None):
            fields["min_new_tokens"] = 1  # one token is drawn there; a minimum above that would count as none
        return fields


def _check_media_type(headers: Headers) -> None:
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
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


async def _answer(send: Callable, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
