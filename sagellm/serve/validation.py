"""Requests that LMDeploy would pass on to the engine although they cannot be served are answered here, with a 4xx.

Some of them would stop the engine for all clients: a token id outside the vocabulary, a schema that does not compile.
Paths that belong to other kinds of deployment, which could do the same, are not served; `routes.py` lists the others.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import HTTPException
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import ValidationError
from starlette.datastructures import Headers

from sagellm.accel.sot.group import Master
from sagellm.serve.choices import Plan, answer_several, wait_left
from sagellm.serve.echo import Echo, echo_of
from sagellm.serve.embeddings import embed_with
from sagellm.serve.formats import check_format
from sagellm.serve.group import FIELDS, GroupGate, Membership, unsplit
from sagellm.serve.parameters import Refused, check_fields, check_parameters, engine_seed
from sagellm.serve.prompts import Prompts, in_turn, split_prompt, together
from sagellm.serve.routes import CHAT, COMPLETION, ENCODE, GENERATE, HARMLESS, HEALTH, Request, Route, Server, route_of
from sagellm.serve.service import ALLOWED, SERVICE, take_service
from sagellm.serve.sot import Asked, SkeletonAnswers
from sagellm.serve.speculation import FIELD as USAGE_FIELD
from sagellm.serve.speculation import USAGE, take_wish
from sagellm.serve.wishes import FIELDS as WISH_FIELDS
from sagellm.serve.wishes import set_wishes, take_wishes

logger = logging.getLogger("sagellm")


class RequestValidation:
    """ASGI middleware in front of LMDeploy's application.

    Args:
        engine: LMDeploy's `AsyncEngine`.
        interface: the state that LMDeploy's handlers share.
        member: the server's part in a prefill/decode group, if it has one.
        policies, command: see `Server`.
        max_body_bytes: size of the largest body that is read.
        sampling: fields that a request for an answer gets where it does not have them.
        describe: see `Server`.
        trouble: why no request is worked on any more, or nothing; `/health` asks it.
        sot_group: workers of skeleton-of-thought.
    """

    def __init__(
        self, app: Callable[..., Awaitable[None]], engine: Any, interface: Any, member: Membership | None = None,
        policies: tuple[str, ...] = (), command: Callable[..., Awaitable[Any]] | None = None, max_body_bytes: int = 8 << 20,
        sampling: dict[str, float] | None = None, trouble: Callable[[], str] = str, sot_group: Master | None = None,
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self._trouble = trouble
        self._app, self._engine, self._interface = app, engine, interface
        self._gate = GroupGate(member)
        self._max_body_bytes, self._sampling = max_body_bytes, sampling or {}
        embed = embed_with(engine, self._next_session)
        self._server = Server(engine.model_name, Prompts(engine), member, policies, command, embed, describe)
        self._sot = SkeletonAnswers(engine, self._server.prompts, self._next_session, trouble, sot_group)

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_trusted = self._gate.is_trusted(scope, headers)
        app = self._app
        try:
            route = route_of(scope["method"], scope["path"])
            if route.path == HEALTH and (reason := self._trouble()):
                raise Refused(reason, 503)
            if route.access != "all":
                self._check_access(route, headers, is_trusted)  # before the body is read: strangers may send any amount
                never = asyncio.get_running_loop().create_future()
                body = await self._run(self._read(headers, receive), never)
                is_signed = self._gate.check_signature(scope, headers, body)
                request, replaced = await self._request(route, headers, body, is_signed, is_trusted)
                if route.handler is not None:
                    answer = await self._run(route.handler(self._server, request), wait_left(receive))
                    if answer is not None:
                        await _answer(send, 200, answer)
                    return
                if isinstance(replaced, Asked):
                    answer = await self._sot.answer(replaced, self._run, wait_left(receive), send)
                    if answer is not None:
                        await _answer(send, 200, answer)
                    return
                if isinstance(replaced, Plan):
                    app = partial(answer_several, app, replaced)
                else:
                    receive = _replay(replaced, receive)
            await _passed_on(app, scope, receive, send)
        except Refused as refused:
            kind = "invalid_request_error" if refused.status < 500 else "server_error"
            error = {"message": str(refused), "type": kind, "param": None, "code": refused.status}
            document = {"object": "error", **error, "error": error} | self._gate.answer_of_refusal(is_trusted)
            await _answer(send, refused.status, document)

    async def _live(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Serve the life of the application, from its start to its end."""
        preparing = asyncio.ensure_future(self._sot.prepare(self._server.command))
        try:
            await self._app(scope, receive, send)
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    def _run(self, work: Awaitable[Any], left: Awaitable[Any]) -> Awaitable[Any]:
        return self._engine.generate.run(work, left)

    def _check_access(self, route: Route, headers: Headers, is_trusted: bool) -> None:
        if route.access == "group":
            self._gate.check_path(route.path, headers, is_trusted)
        else:
            self._check_key(headers)
            if route.model is not None:
                _check_media_type(headers)

    async def _request(
        self, route: Route, headers: Headers, body: bytes, is_signed: bool, is_trusted: bool
    ) -> tuple[Request, bytes | Plan | Asked]:
        """Return the checked request, and what LMDeploy's handler gets: a body, or several. Or a chat that it cannot answer.

        Raises:
            Refused: it must not be answered.
        """
        if route.model is None:
            return Request(None, len(body)), body
        raw = {name: value for name, value in _parse(body).items() if value is not None}  # null: the default
        if route.access != "admin":
            self._gate.check_body(raw, is_signed, is_trusted)
        if is_trusted and not is_signed:
            raw = unsplit(raw)
        if route.path in (CHAT, COMPLETION, GENERATE):
            raw = self._sampling | raw
        request = self._model(route, raw)
        if route.access == "key":
            check_fields(raw, _known_fields(route))
        raw.update((name, value) for name, value in request if name in raw and isinstance(value, str | int | float))
        # Also where nothing is asked for: a pipelined request begins in the context of the one before it.
        SERVICE.set(take_service(raw, headers.raw))
        if route.handler is not None:
            return Request(request, len(body)), b""
        USAGE.set(take_wish(raw))
        return Request(request, len(body)), await self._plan(route.path, raw, request, len(body))

    async def _read(self, headers: Headers, receive: Callable) -> bytes:
        """Return the body.

        Raises:
            Refused: it is too large, by its header or by what came; the rest is not read.
        """
        parts, size = [], 0
        announced = headers.get("content-length", "")
        is_large = announced.isdecimal() and int(announced) > self._max_body_bytes
        while not is_large:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            is_large = size > self._max_body_bytes
            if not message.get("more_body") or message["type"] == "http.disconnect":
                break
        if is_large:
            limit = self._max_body_bytes / 2**20
            raise Refused(f"the body is larger than {limit:g} MiB, the limit of this server (--max-body-mib).", 413)
        return b"".join(parts)

    def _check_key(self, headers: Headers) -> None:
        """LMDeploy's own check, with the same parser: where two of them differ, a body would pass unchecked."""
        keys = self._interface.api_keys
        if not keys:
            return
        scheme, key = get_authorization_scheme_param(headers.get("authorization"))
        known = any([secrets.compare_digest(key.encode(), each.encode()) for each in keys])
        if scheme.lower() != "bearer" or not known:
            raise Refused("send a valid API key with the header Authorization: Bearer KEY.", 401)

    def _model(self, route: Route, raw: dict[str, Any]) -> Any:
        """The request as the route's model reads it.

        Raises:
            Refused: it does not, or another model is wanted; `/generate` does not look at the name.
        """
        try:
            request = route.model.model_validate(raw)
        except ValidationError as error:
            raise Refused(_explain(error)) from None
        name = raw.get("model", self._engine.model_name)
        if route.path != GENERATE and name != self._engine.model_name:
            raise Refused(f"The model {name!r} does not exist.", 404)
        return request

    async def _plan(self, path: str, raw: dict[str, Any], request: Any, num_bytes: int) -> bytes | Plan | Asked:
        """Return the body that LMDeploy's handler gets, or the bodies of several answers. A chat with `sot` does not get there.

        Raises:
            Refused: it must not get any.
        """
        echoes, keeps_answer = path == COMPLETION and bool(request.echo), True
        raw.pop("echo", None)
        if echoes and raw.get("max_tokens") == 0:  # LMDeploy generates one token at least
            raw["max_tokens"], request.max_tokens, keeps_answer = 1, 1, False
        check_parameters(request, raw, self._server.prompts.vocab_size)
        if path == CHAT:
            check_format(request, raw.get("min_tokens"))
        prompts = await in_turn(num_bytes, self._server.prompts.tokens, request)
        if path == CHAT and request.sot is not None:
            return self._sot.read(request, raw, HARMLESS | self._sampling)
        wishes = take_wishes(path, raw, prompts, self._server.prompts.vocab_size)
        if self._engine.backend == "turbomind" and any(wish.keys() & {"logits_processors"} for wish in wishes):
            raise Refused("logit_bias and penalties are not supported by the engine turbomind; leave them out.")
        if self._engine.backend == "turbomind" and any("logprobs" in wish for wish in wishes):
            raise Refused("logprobs 0 is not supported by the engine turbomind; send 1 or more.")
        if request.stream and len(prompts) > 1:
            raise Refused(f"stream with {len(prompts)} prompts is not supported; send one prompt a request.")
        num_kept = getattr(request, "n", 1)
        raw.pop("n", None)
        num_answers = raw.pop("best_of", num_kept)
        if raw.get("migration_request") and (len(prompts) > 1 or num_answers != 1):
            raise Refused("migration_request is of one prompt and one answer; split requests have no more.")
        if raw.get("preserve_cache") and len(prompts) > 1:
            raise Refused("preserve_cache is of one prompt; send one.")
        if num_answers > 1 and USAGE.get() is not None:
            raise Refused(f"{USAGE_FIELD} is of one answer; leave it out, or n and best_of.")
        bodies = [
            {**raw, **self._amended(path, request, len(prompts), bool(raw.get("preserve_cache")), number)}
            for number in range(num_answers)
        ]
        options = raw.get("stream_options") or {}
        usage_chunk = bool(options and request.stream_options.include_usage)
        usage_so_far = bool(options.get("continuous_usage_stats"))
        echo = self._echo(request, prompts) if echoes else None
        if num_answers == 1 and not usage_chunk and echo is None:
            set_wishes(bodies[0]["session_id"], wishes)
            return json.dumps(bodies[0]).encode()
        keeps_logprobs = bool(raw.get("logprobs")) or num_kept == num_answers
        if not keeps_logprobs:
            bodies = [{**body, "logprobs": 1} for body in bodies]
        first, forks = bodies[0]["session_id"], self._engine.backend == "pytorch"

        def before(number: int) -> None:
            set_wishes(bodies[number]["session_id"], wishes, first if forks and number else None)

        return Plan(
            bodies, num_kept, bool(request.stream), usage_chunk, usage_so_far, keeps_logprobs,
            before=before, echo=echo, keeps_answer=keeps_answer, forks=forks,
        )  # fmt: skip

    def _echo(
        self, request: Any, prompts: list[list[int]]
    ) -> Callable[[Awaitable[Any]], Awaitable[list[Echo] | None]]:
        """Return what makes the echoes of the prompts; see `Plan.echo`.

        Raises:
            Refused: a stream, or an engine that does not compute log probabilities of prompts.
        """
        if request.stream:
            raise Refused("echo in a stream is not supported; leave out one of them.")
        if request.logprobs is not None:
            if self._engine.backend == "turbomind":
                raise Refused("echo with logprobs is not supported by the engine turbomind; leave out one of them.")
        given = split_prompt(request.prompt)
        first = self._next_session(len(prompts))


        def one(number: int) -> Awaitable[Echo]:
            text = given[number] if isinstance(given[number], str) else None
            return echo_of(self._engine, prompts[number], text, request.logprobs, first + number)

        at_once = self._engine.backend_config.max_batch_size
        return lambda left: self._run(together(one, len(prompts), at_once), left)

    def _amended(self, path: str, request: Any, num_prompts: int, is_prompt: bool, number: int = 0) -> dict[str, Any]:
        """Return fields that LMDeploy would take differently from what OpenAI's API says.

        Args:
            is_prompt: whether the prompt alone is to be computed, for another engine.
            number: of the answer among several, each of which has a seed of its own.
        """
        # LMDeploy counts requests but uses one id a prompt, so that ids of concurrent requests would collide.
        fields: dict[str, Any] = {"session_id": self._next_session(num_prompts)}
        if (seed := getattr(request, "seed", None)) is not None:
            fields["seed"] = engine_seed(seed + number)
        if path == CHAT and request.logprobs and not request.top_logprobs:
            fields["top_logprobs"] = 1  # without it the chosen token's would be left out too
        if is_prompt and getattr(request, "min_new_tokens", None):
            fields["min_new_tokens"] = 1  # one token is drawn there; a minimum above that would count as none
        return fields

    def _next_session(self, count: int) -> int:
        """Take so many session ids that follow each other, and return the first."""
        first = self._interface.session_id + 1
        self._interface.session_id += count
        return first


async def _passed_on(app: Callable[..., Awaitable[None]], scope: dict, receive: Callable, send: Callable) -> None:
    """Let LMDeploy's application answer.

    A stream that fails half-way ends with an error event. Errors after the client has left are dropped: LMDeploy's handler
    then builds an answer from nothing.
    """
    in_stream = has_left = False

    async def watched(message: dict) -> None:
        nonlocal in_stream
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            in_stream = kind.startswith(b"text/event-stream")
        elif not message.get("more_body"):
            in_stream = False
        await send(message)

    async def heard() -> dict:
        nonlocal has_left
        message = await receive()
        has_left = has_left or message["type"] == "http.disconnect"
        return message

    try:
        await app(scope, heard, watched)
    except Exception as error:
        if has_left:
            return
        if not in_stream:
            raise
        reason = _reason(error)
        logger.warning("a stream ended with an error: %s", reason)
        event = json.dumps({"error": {"message": reason, "type": "server_error", "param": None, "code": 503}})
        await send({"type": "http.response.body", "body": f"data: {event}\n\ndata: [DONE]\n\n".encode()})


def _known_fields(route: Route) -> set[str]:
    """Return the names of the fields that are read on a route for clients."""
    known = {*route.model.model_fields, "model"}
    if route.path != ENCODE:  # which is not scheduled
        known |= ALLOWED.keys()
    if route.handler is None:
        known |= {*FIELDS, *WISH_FIELDS[route.path], USAGE_FIELD}
    return known | ({"best_of"} if route.path == COMPLETION else set())


def _reason(error: BaseException) -> str:
    """Return the detail of the HTTP error that led to `error`, or what there is to say of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HTTPException):
            return str(cause.detail)
        inner = getattr(cause, "exceptions", None)
        cause = inner[0] if inner else cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


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
