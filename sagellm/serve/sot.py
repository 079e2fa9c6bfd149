"""Skeleton-of-thought for chats: the field `sot` of a request.

The stages run on a thread, and their requests in the engine process, beside all others.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from sagellm.accel.sot.group import Master
from sagellm.accel.sot.pipeline import SpecSoT
from sagellm.accel.sot.results import Listener, SoTAnswer, TaskData
from sagellm.accel.sot.skeleton import heading, lead, plan_patterns, plan_tokens
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.running import MAX_BRANCHES, SamplingParams, Watch
from sagellm.core.service import ServiceRequest
from sagellm.engines.lmdeploy.running import RunningRequests
from sagellm.serve.echo import TokenTexts
from sagellm.serve.parameters import Refused, engine_seed
from sagellm.serve.service import SERVICE

if TYPE_CHECKING:
    from sagellm.serve.prompts import Prompts

__all__ = ["FIELD", "SkeletonAnswers", "SoTWish"]

logger = logging.getLogger("sagellm")

FIELD = "sot"
MAX_THREADS = 64  # answers at once; others wait
MAX_TOKENS = 1024  # of a point, or of an answer as one text, where the request does not say
SHAPE = frozenset({"model", "messages", FIELD, "stream", "stream_options", "max_tokens", "max_completion_tokens"})
SAMPLING = frozenset({"temperature", "top_p", "top_k", "seed"})
Run = Callable[[Awaitable[Any], Awaitable[Any]], Awaitable[Any]]


class SoTWish(BaseModel):
    """The field `sot` of a chat.

    Attributes:
        max_parallel: points that are written at once.
        max_kv_len: tokens of all points that are written at once, with the plan; None for no limit but the engine's.
        plan: "always", or "auto": the model may answer without one.
        schedule: which points begin first: the longest ones, or those that stand first.
        order: of a stream. "written": tokens as they come, each point as a choice of its own. "plan": one text.
    """

    model_config = ConfigDict(extra="forbid")

    max_parallel: int = Field(default=16, ge=1, le=MAX_BRANCHES)
    max_kv_len: int | None = Field(default=None, ge=1)
    plan: Literal["auto", "always"] = "auto"
    schedule: Literal["longest", "even"] = "longest"
    order: Literal["written", "plan"] = "written"


class Asked(NamedTuple):
    """A chat that is to be answered with a plan."""

    wish: SoTWish
    question: str
    history: list[dict[str, str]]
    params: SamplingParams
    stream: bool
    usage: bool


class SkeletonAnswers:
    """Answers the chats of a server that have the field `sot`.

    Args:
        engine: LMDeploy's `AsyncEngine`.
        next_session: takes so many session ids that follow each other, and returns the first.
        trouble: why the engine does not work any more, or nothing.
        group: workers that write some of the points.
    """

    def __init__(
        self, engine: Any, prompts: "Prompts", next_session: Callable[[int], int], trouble: Callable[[], str],
        group: Master | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._prompts, self._next_session, self._trouble = engine, prompts, next_session, trouble
        self._group = group
        self._tokenizer = engine.tokenizer.model.model
        self._threads = ThreadPoolExecutor(MAX_THREADS, "sagellm-sot")  # makes a thread when one is needed
        self._running: RunningRequests | None = None

    async def prepare(self, command: Callable[..., Awaitable[Any]]) -> None:
        """Let the engine compile the grammars of plans, off the path of requests. With workers, read the vocabulary meanwhile.

        Args:
            command: asks the hooks of the engine for something.
        """
        if self._engine.backend == "turbomind" or self._tokenizer.chat_template is None:
            return
        try:
            await command("compile_ahead", patterns=plan_patterns())
        except ConfigError as error:
            logger.info("plans of skeleton-of-thought: %s", error)
        if self._group is not None:  # it holds Python's lock, which servers without plans need
            await asyncio.get_running_loop().run_in_executor(self._threads, plan_tokens, self._tokenizer)

    def read(self, request: Any, raw: Mapping[str, Any], harmless: Mapping[str, Any]) -> Asked:
        """Check a request.

        Args:
            request: the chat, as the route's model reads it.
            raw: its JSON.
            harmless: fields that change no answer, or that the server has set itself, with these values.

        Raises:
            Refused: a field that does not go with `sot`, or no question.
        """
        if self._engine.backend == "turbomind":
            raise Refused("sot is not supported by the engine turbomind; start the server with --engine pytorch.")
        for name, value in raw.items():
            if name not in SHAPE | SAMPLING and harmless.get(name, ...) not in (None, value):
                raise Refused(f"{name} is not supported together with sot; leave out one of them.")
        messages = [{"role": each["role"], "content": _text(each.get("content"))} for each in _listed(request.messages)]
        if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
            raise Refused("with sot the last message is the question: a text with the role user.")
        *history, question = messages
        service = SERVICE.get()
        params = SamplingParams(
            max_new_tokens=request.max_completion_tokens or request.max_tokens or MAX_TOKENS,
            temperature=request.temperature, top_k=request.top_k, top_p=request.top_p,
            seed=None if request.seed is None else engine_seed(request.seed),
            service=None if service is None else ServiceRequest.model_validate_json(service),
        )  # fmt: skip
        wants_usage = bool(request.stream and request.stream_options and request.stream_options.include_usage)
        return Asked(request.sot, question["content"], history, params, bool(request.stream), wants_usage)

    async def answer(self, asked: Asked, run: Run, left: Awaitable[Any], send: Callable) -> dict[str, Any] | None:
        """Send a stream, or return an answer that is not streamed. None if the client has left, too.

        Args:
            run: `GuardedGeneration.run`, which ends the work when the client leaves or the server ends.

        Raises:
            Refused: it failed before anything was sent.
        """
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._engine.model_name}
        if not asked.stream:
            answer = await run(self._write(asked), left)
            return None if answer is None else head | {"object": "chat.completion"} | _whole(answer, self._tokenizer)
        stream = _Stream(asked, TokenTexts(self._tokenizer, True), send, head | {"object": "chat.completion.chunk"})
        try:
            await run(self._streamed(asked, stream), left)
        except Refused as refused:
            if not stream.has_begun:
                raise
            error = {"message": str(refused), "type": "server_error", "param": None, "code": refused.status}
            await stream.end({"error": error})
        return None

    async def _streamed(self, asked: Asked, stream: "_Stream") -> None:
        writing = asyncio.ensure_future(self._write(asked, stream))
        writing.add_done_callback(lambda _: stream.news.put_nowait(None))
        try:
            while (event := await stream.news.get()) is not None:
                await stream.show(event)
            await stream.finish(writing.result())
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, asked: Asked, listener: Listener | None = None) -> SoTAnswer:
        """
        Raises:
            Refused: the engine gave it up, or a limit of the request does not allow it.
        """
        loop = asyncio.get_running_loop()
        wish, params = asked.wish, asked.params
        limit = min(params.max_new_tokens, self._prompts.context - 1)

        sot = SpecSoT(self._requests(loop), self._tokenizer, wish.plan == "auto", params, self._group)

        def generate() -> SoTAnswer:
            return sot.generate(
                asked.question, max_new_tokens=limit, max_parallel=wish.max_parallel, max_kv_len=wish.max_kv_len,
                use_scheduling=wish.schedule == "longest", listener=listener, history=asked.history,
            )  # fmt: skip

        try:
            return await loop.run_in_executor(self._threads, generate)
        except ConfigError as error:
            raise Refused(str(error)) from None
        except EngineError as error:
            raise Refused(str(error), 500) from None
        finally:
            sot.cancel()

    def _requests(self, loop: asyncio.AbstractEventLoop) -> RunningRequests:
        def check() -> None:
            if reason := self._trouble():
                raise EngineError(f"the engine has stopped: {reason}")

        def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        if self._running is None:
            self._running = RunningRequests(
                self._engine.engine, on_loop, lambda: self._next_session(1), Watch(check), self._prompts.context - 1,
                is_remote=True,
            )  # fmt: skip
        return self._running


class _Stream(Listener):
    """Turns what is heard on the thread of an answer into events of a stream.

    Attributes:
        news: what was heard, to be shown in order; None at the end.
    """

    def __init__(self, asked: Asked, texts: "TokenTexts", send: Callable, head: dict[str, Any]) -> None:
        self._asked, self._send, self._head = asked, send, head
        self._loop, self.news = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any, Any] | None]()
        self._tasks: Sequence[TaskData] = ()
        self._texts, self._by_branch = texts, dict[int, TokenTexts]()
        self._kept: dict[int, list[str]] = {}  # in the order of the plan: texts of points that others stand before
        self._ended: set[int] = set()
        self._shown = 0  # the point whose text is being shown in the order of the plan
        self._choices: set[int] = set()  # indices that have begun
        self.has_begun = False

    # ---- on the answer's thread

    def planned(self, tasks: Sequence[TaskData]) -> None:
        self._tell("planned", tuple(tasks), None)

    def token(self, branch_id: int, token: int) -> None:
        self._tell("token", branch_id, token)

    def ended(self, branch_id: int, reason: str) -> None:
        self._tell("ended", branch_id, reason)

    def _tell(self, *event: Any) -> None:
        self._loop.call_soon_threadsafe(self.news.put_nowait, event)

    # ---- on the event loop

    async def show(self, event: tuple[str, Any, Any]) -> None:
        kind, what, value = event
        if kind == "planned":
            self._tasks = what
            await self._write({"choices": [], FIELD: _plan(what)})
            for task in what:
                await self._piece(task.branch_id, heading(task))
        elif kind == "token":
            await self._piece(what, self._by_branch.setdefault(what, self._texts.anew()).take(value))
        elif self._asked.wish.order == "written":
            await self._choice(what, {}, value)
        else:
            self._ended.add(what)
            while self._shown in self._ended:
                self._shown += 1
                for text in self._kept.pop(self._shown, ()):
                    await self._choice(0, {"content": text})

    async def finish(self, answer: SoTAnswer) -> None:
        if self._asked.wish.order == "plan":
            await self._choice(0, {}, _reason(answer))
        await self._write({"choices": [], FIELD: _facts(answer)})
        if self._asked.usage:
            await self._write({"choices": [], "usage": _usage(answer)})
        await self.end()

    async def end(self, event: dict[str, Any] | None = None) -> None:
        """End the stream, after this event."""
        last = b"" if event is None else f"data: {json.dumps(event)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n"})

    async def _piece(self, branch_id: int, text: str) -> None:
        if not text:
            return
        if self._asked.wish.order == "written":
            await self._choice(branch_id, {"content": text})
        elif branch_id == self._shown:
            await self._choice(0, {"content": text})
        else:
            self._kept.setdefault(branch_id, []).append(text)

    async def _choice(self, index: int, delta: dict[str, str], reason: str | None = None) -> None:
        if index not in self._choices:
            self._choices.add(index)
            delta = {"role": "assistant"} | delta
        await self._write({"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}]})

    async def _write(self, event: dict[str, Any]) -> None:
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = f"data: {json.dumps(self._head | event)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def _whole(answer: SoTAnswer, tokenizer: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answer)}
    found = _facts(answer)
    for point, task in zip(found.get("points", ()), answer.tasks, strict=True):
        point["text"] = lead(task) + tokenizer.decode(answer.branches[task.branch_id], skip_special_tokens=True)
    return {"choices": [choice], "usage": _usage(answer), FIELD: found}


def _facts(answer: SoTAnswer) -> dict[str, Any]:
    """How an answer came about. `planned_tokens`: the length that the plan gave a point."""
    points = [
        {
            "index": task.branch_id, "title": task.title, "planned_tokens": task.num_tokens,
            "tokens": len(answer.branches[task.branch_id]), "finish_reason": answer.finish_reasons[task.branch_id],
        }
        for task in answer.tasks
    ]  # fmt: skip
    error = {"error": answer.error_msg} if answer.error_msg else {}
    return {"mode": answer.mode, "points": points, "stats": answer.stats} | error


def _plan(tasks: Sequence[TaskData]) -> dict[str, Any]:
    points = [{"index": task.branch_id, "title": task.title, "planned_tokens": task.num_tokens} for task in tasks]
    return {"points": points}


def _usage(answer: SoTAnswer) -> dict[str, int]:
    prompt, completion = answer.stats["prompt_tokens"], answer.stats["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _reason(answer: SoTAnswer) -> str:
    return "length" if "length" in answer.finish_reasons.values() else "stop"


def _listed(messages: Any) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _text(content: Any) -> str:
    """The text of a message, whose parts are texts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
