"""Several answers to one request (`n`, `best_of`), each an LMDeploy request of its own, merged into one response.

The others are branches of the first one: the engine lets them share its keys and values once its prompt is computed. TurboMind
knows no branches. There they begin when the first one has its first token, and find its prompt in the prefix cache.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from sagellm.serve.echo import Echo, with_echo

__all__ = ["PROGRESS", "Plan", "Progress", "answer_several", "wait_left"]

App = Callable[..., Awaitable[None]]


class Progress:
    """How far a sub-request has come; its generation writes it.

    Attributes:
        begun: set at its first token.
        num_prompt, num_answer: tokens of the prompt, and of the answer so far.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.num_prompt = self.num_answer = 0

    @property
    def usage(self) -> dict[str, int]:
        total = self.num_prompt + self.num_answer
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_answer, "total_tokens": total}


# The sub-request that is being handled writes it; None where a request has one answer.
PROGRESS: ContextVar[Progress | None] = ContextVar("sagellm_progress", default=None)


class Plan(NamedTuple):
    """How a request is answered.

    Attributes:
        bodies: body of each sub-request.
        num_kept: number of answers that the client gets, the likeliest ones.
        stream: whether the client reads a stream.
        usage_chunk: whether the stream ends with a chunk of usage, as `stream_options.include_usage` asks.
        usage_so_far: whether each chunk has the usage of its answer up to it, as `continuous_usage_stats` asks.
        keeps_logprobs: whether the client asked for log probabilities; otherwise they only rank.
        before: called before each sub-request, in its context.
        echo: makes the echo of each prompt, with which its answers begin; None once its argument says that the client left.
        keeps_answer: whether more than the echo was asked for.
        forks: whether the engine knows the others as branches of the first.
    """

    bodies: list[dict[str, Any]]
    num_kept: int
    stream: bool
    usage_chunk: bool
    usage_so_far: bool
    keeps_logprobs: bool
    before: Callable[[int], None]
    echo: Callable[[Awaitable[Any]], Awaitable[list[Echo] | None]] | None = None
    keeps_answer: bool = True
    forks: bool = False


async def answer_several(app: App, plan: Plan, scope: dict, receive: Callable, send: Callable) -> None:
    """Run the sub-requests through `app` and answer with what they say together.

    The first one that fails answers for all.

    Raises:
        Refused: the echo could not be made.
    """
    gone = asyncio.Event()
    progress = [Progress() for _ in plan.bodies]
    merged = _Stream(plan, send, progress) if plan.stream else _Whole(plan, send)

    async def run(number: int) -> None:
        plan.before(number)
        PROGRESS.set(progress[number])
        if number and not plan.forks:
            await progress[0].begun.wait()
        try:
            await app(scope, _receiver(plan.bodies[number], gone), merged.sender(number))
        finally:
            progress[number].begun.set()

    watch = asyncio.create_task(_watch(receive, gone))
    tasks: list[asyncio.Task] = []
    try:
        if plan.echo is not None:
            echoes = await plan.echo(gone.wait())
            if echoes is None:
                return
            merged.begin_with(echoes)
        # A task runs in a copy of the context that creates it.
        tasks += [asyncio.create_task(run(number)) for number in range(len(plan.bodies))]
        await asyncio.gather(*tasks)
        await merged.finish()
    finally:
        for task in (watch, *tasks):
            task.cancel()
        await asyncio.gather(watch, *tasks, return_exceptions=True)


async def wait_left(receive: Callable) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watch(receive: Callable, gone: asyncio.Event) -> None:
    await wait_left(receive)
    gone.set()


def _receiver(body: dict[str, Any], gone: asyncio.Event) -> Callable:
    content = [json.dumps(body).encode()]

    async def receive() -> dict:
        if content:
            return {"type": "http.request", "body": content.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


class _Whole:
    """Merges answers that are not streamed."""

    def __init__(self, plan: Plan, send: Callable) -> None:
        self._plan, self._send = plan, send
        self._echoes: list[Echo] = []
        self._starts: list[dict] = [{} for _ in plan.bodies]
        self._parts: list[list[bytes]] = [[] for _ in plan.bodies]

    def begin_with(self, echoes: list[Echo]) -> None:
        """Let the answers to each prompt begin with its echo."""
        self._echoes = echoes

    def sender(self, number: int) -> Callable:
        async def send(message: dict) -> None:
            if message["type"] == "http.response.start":
                self._starts[number] = message
            else:
                self._parts[number].append(message.get("body", b""))

        return send

    async def finish(self) -> None:
        bodies = [b"".join(parts) for parts in self._parts]
        start, body = self._starts[0], bodies[0]
        failed = next((number for number, each in enumerate(self._starts) if each["status"] != 200), None)
        if failed is not None:
            start, body = self._starts[failed], bodies[failed]
        else:
            body = json.dumps(self._merged([json.loads(each) for each in bodies])).encode()
        headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _merged(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        choices = []
        for prompt in range(len(answers[0]["choices"])):
            own = [answer["choices"][prompt] for answer in answers]
            if self._plan.num_kept < len(own):
                own = sorted(own, key=_likelihood, reverse=True)[: self._plan.num_kept]
            if self._echoes:
                own = [with_echo(choice, self._echoes[prompt], self._plan.keeps_answer) for choice in own]
            choices += own
        for number, choice in enumerate(choices):
            choice["index"] = number
            if not self._plan.keeps_logprobs:
                choice["logprobs"] = None
        usage = merged_usage([answer["usage"] for answer in answers])
        if not self._plan.keeps_answer:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return answers[0] | {"choices": choices, "usage": usage}


class _Stream:
    """Merges streams: events as they come, each with the index of its answer; one end, and usage in a chunk of its own."""

    def __init__(self, plan: Plan, send: Callable, progress: list[Progress]) -> None:
        self._plan, self._send, self._progress = plan, send, progress
        self._started = False
        self._refused_by: int | None = None
        self._rest = [b""] * len(plan.bodies)
        self._usage: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {}

    def sender(self, number: int) -> Callable:
        async def send(message: dict) -> None:
            if message["type"] == "http.response.start":
                if not self._started:
                    self._started = True
                    # An answer that is no stream refuses the request; it answers for all.
                    kind = dict(message.get("headers", ())).get(b"content-type", b"")
                    self._refused_by = None if kind.startswith(b"text/event-stream") else number
                    await self._send(message)
                return
            if self._refused_by is not None:
                if number == self._refused_by:
                    await self._send(message)
                return
            *lines, self._rest[number] = (self._rest[number] + message.get("body", b"")).split(b"\n\n")
            for line in lines:
                await self._event(number, line)

        return send

    async def _event(self, number: int, line: bytes) -> None:
        if line == b"data: [DONE]":
            return
        event = json.loads(line.removeprefix(b"data: "))
        for choice in event.get("choices", ()):
            choice["index"] = number
        if self._plan.usage_chunk:
            if usage := event.get("usage"):
                self._usage.append(usage)
            event["usage"] = self._progress[number].usage if self._plan.usage_so_far else None
        self._head = self._head or {name: event.get(name) for name in ("id", "object", "created", "model")}
        await self._write(event | self._head)

    async def finish(self) -> None:
        if self._refused_by is not None:
            return
        if self._plan.usage_chunk and self._usage:
            await self._write({**self._head, "choices": [], "usage": merged_usage(self._usage)})
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _write(self, event: dict[str, Any]) -> None:
        body = f"data: {json.dumps(event)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def merged_usage(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the usage of several answers to the same prompts, which count once."""
    if len(usages) == 1:
        return usages[0]
    prompt = usages[0]["prompt_tokens"]
    completion = sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _likelihood(choice: dict[str, Any]) -> float:
    """Mean log probability of a token of the answer, as OpenAI's `best_of` ranks."""
    found = [value for value in ((choice.get("logprobs") or {}).get("token_logprobs") or []) if value is not None]
    return sum(found) / len(found) if found else float("-inf")
