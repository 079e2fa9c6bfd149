"""Requests that go on while their caller does something else, and branches of them, over LMDeploy's engine.

The engine is in this process, or in one of its own, as in the server. Callers may be in any thread but that of the event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from sagellm.core.errors import EngineError
from sagellm.core.running import MAX_BRANCHES, Branches, Draft, Request, SamplingParams, Watch
from sagellm.core.service import NOTHING_ASKED, EngineRequest
from sagellm.engines.lmdeploy.workers import failure_of

__all__ = ["RunningRequests", "check_params", "finish_reason"]


class RunningRequests:
    """
    Args:
        engine: LMDeploy's `Engine`, or its `MPEngine` in front of another process.
        on_loop: runs a coroutine on the event loop of the engine's client, and returns its result.
        take_id: returns an unused id of a request. Called on the loop.
        watch: where callers wait.
        longest: most tokens of a prompt.
        is_remote: whether the engine is in another process.
        grammars: of an engine in this process: keeps the state of grammars by request id, and would not forget it.
        guessing: returns the `Speculator` of an engine in this process, or None.
    """

    def __init__(
        self, engine: Any, on_loop: Callable[[Coroutine[Any, Any, Any]], Any], take_id: Callable[[], int], watch: Watch,
        longest: int, is_remote: bool = False, grammars: Any = None, guessing: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        self._engine, self._on_loop, self._take_id = engine, on_loop, take_id
        self._watch, self._longest = watch, longest
        self._is_remote, self._grammars, self._guessing = is_remote, grammars, guessing
        self._requests: dict[int, Request] = {}  # those that are in the engine

    def start(self, prompt: Sequence[int], params: SamplingParams | None = None, keep: bool = False) -> Request:
        """See `BaseEngine.start`."""
        self._check_length(len(prompt), "the prompt")
        params = params or SamplingParams()
        check_params([params])

        async def begin() -> Request:
            return self._begin(Request(self._take_id(), prompt, params, self._watch, keep=keep))

        return self._on_loop(begin())

    def fork(
        self, request: Request, prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None, num_tokens: int | None = None,
    ) -> Branches:  # fmt: skip
        """See `BaseEngine.fork`."""
        if num_tokens is not None and not 0 <= num_tokens <= request.num_tokens:
            raise EngineError(f"fork got num_tokens {num_tokens}; allowed are 0 to {request.num_tokens}, its new tokens.")
        if not 0 < len(prompts) <= MAX_BRANCHES:
            raise EngineError(f"fork got {len(prompts)} prompts; allowed are 1 to {MAX_BRANCHES}. A prompt may be empty.")
        every = list(params) if isinstance(params, Sequence) else [params or request.params] * len(prompts)
        if len(every) != len(prompts):
            raise EngineError(f"fork got {len(every)} params for {len(prompts)} prompts; give one for each, or one for all.")
        every = [replace(each, service=each.service or request.params.service) for each in every]
        check_params(every)
        return self._on_loop(self._fork(request, prompts, every, num_tokens))

    async def stream(
        self, request_id: int, prompt: Sequence[int], params: SamplingParams, parent: int | None = None,
        kept: asyncio.Event | None = None,
    ) -> AsyncIterator[tuple[list[int], tuple[Any, ...]]]:  # fmt: skip
        """Yield the new tokens of a request, and the counts of its guesses so far (`RequestGuesses`).

        Args:
            parent: id of the request that this one is a branch of.
            kept: the request stays after its last token until this is set.

        Raises:
            EngineError: the engine gave it up.
        """
        from lmdeploy.messages import ResponseType

        instance, status, guesses = self._engine.create_instance(), None, ()
        is_over = False
        try:
            options = {"gen_config": _gen_config(params, parent), "adapter_name": params.adapter}
            async for output in instance.async_stream_infer(request_id, list(prompt), **options):
                status, guesses = output.status, getattr(output.req_metrics, "sage", None) or guesses
                yield [int(token) for token in output.token_ids], guesses
            is_over = True
            if status not in (ResponseType.FINISH, ResponseType.SUCCESS):
                why = None if self._is_remote else failure_of(self._engine.executor)
                raise EngineError(f"{why}; its log says why." if why else f"the engine ended the request with {status}.")
            if kept is not None:
                yield [], guesses
                await kept.wait()
        finally:
            if self._is_remote and not is_over:
                await instance.async_cancel(request_id)  # or the other process would wait for its next token without an end
            await instance.async_end(request_id)
            if self._grammars is not None:
                self._grammars.remove_processor(request_id)

    def _begin(self, request: Request) -> Request:
        """Runs on the loop's thread, as all that changes a request."""
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        task = loop.create_task(self._follow(request, stopped), name=f"sagellm-request-{request.request_id}")
        self._requests[request.request_id] = request
        if request.params.keep_drafts and (guessing := self._guessing()) is not None:
            before = len(request.prompt)
            guessing.listeners[request.request_id] = lambda size, guesses: request.drafts.append(
                Draft(size - before, tuple(guesses))
            )

        def stop() -> None:
            if not stopped.is_set():  # a second cancellation would interrupt what the first one does in the engine
                stopped.set()
                task.cancel()

        request.stop = lambda: loop.is_closed() or loop.call_soon_threadsafe(stop)
        return request

    async def _follow(self, request: Request, stopped: asyncio.Event) -> None:
        """Tell a request of its tokens and its end. Its task is cancelled to end it.

        Args:
            stopped: set before that. LMDeploy's wait drops a cancellation that comes in the same moment as a token.
        """
        number, parent = request.request_id, None if request.parent is None else request.parent.request_id
        stream = self.stream(number, request.prompt, request.params, parent, stopped if request.keep else None)
        try:
            async for found, guesses in stream:
                if found:
                    request.add(found, guesses)
                elif request.keep:
                    request.end("finished", finish_reason(request.token_ids, request.params))
                if stopped.is_set():
                    raise asyncio.CancelledError
            request.end("finished", finish_reason(request.token_ids, request.params))
        except asyncio.CancelledError:
            request.end("cancelled", "cancelled")
        except EngineError as error:
            request.end("failed", "error", error)
        finally:
            del self._requests[number]
            await stream.aclose()
            if (guessing := self._guessing()) is not None:
                guessing.listeners.pop(number, None)

    async def _fork(
        self, request: Request, prompts: Any, every: list[SamplingParams], num_tokens: int | None = None
    ) -> Branches:
        number = request.request_id
        if request.watch is not self._watch:
            raise EngineError(f"request {number} is not of this engine; fork it on the engine that started it.")
        if number not in self._requests:
            raise EngineError(
                f"request {number} is {request.state}, and its blocks are gone; fork a request while it runs, or start it "
                "with keep=True."
            )
        common = [*request.prompt, *request.token_ids]
        if num_tokens is not None:
            common = common[: len(request.prompt) + num_tokens]
        for place, prompt in enumerate(prompts):
            self._check_length(len(common) + len(prompt), f"branch {place}, with {len(common)} tokens of its parent,")
        made = [
            Request(self._take_id(), [*common, *prompt], params, self._watch, request)
            for prompt, params in zip(prompts, every, strict=True)
        ]
        for each in made:
            self._begin(each)
        await asyncio.sleep(0)  # the branches are on their way to the engine before the parent can end
        return Branches(made, len(common), self._watch)

    def _check_length(self, num_tokens: int, what: str) -> None:
        if not 0 < num_tokens <= self._longest:
            raise EngineError(f"{what} has {num_tokens} tokens; allowed are 1 to {self._longest}.")


def check_params(params: Sequence[SamplingParams]) -> None:
    """Raise EngineError for a pattern that is no regular expression, and for a deadline that has passed."""
    for number, each in enumerate(params):
        if each.service is not None and each.service.is_past():
            raise EngineError(
                f"the deadline of prompt {number}, {each.service.deadline}, has passed: it is Unix time in seconds, now "
                f"{time.time():.0f}. Give a later one, or none."
            )
    for pattern in {each.pattern for each in params if each.pattern}:  # in a step it would end the engine
        import xgrammar

        try:
            xgrammar.Grammar.from_regex(pattern)
        except RuntimeError as error:
            raise EngineError(f"pattern {pattern[:60]!r} cannot be compiled: {str(error).splitlines()[0]}") from None


def finish_reason(tokens: Sequence[int], params: SamplingParams) -> str:
    stopped = bool(tokens) and tokens[-1] in params.stop_token_ids and not params.ignore_eos
    return "stop" if stopped else "length"


def _gen_config(params: SamplingParams, parent: int | None = None) -> Any:
    from lmdeploy.messages import GenerationConfig

    greedy = params.temperature == 0
    gen_config = GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        do_sample=not greedy,
        top_k=1 if greedy else params.top_k,
        top_p=params.top_p,
        temperature=1.0 if greedy else params.temperature,
        random_seed=params.seed,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logits_processors=list(params.processors) or None,
        response_format={"type": "regex_schema", "regex_schema": params.pattern} if params.pattern else None,
    )
    if (transfer := params.transfer) is not None:
        from lmdeploy.pytorch.disagg.conn.protocol import MigrationProtocol, MigrationRequest

        gen_config.with_cache = gen_config.preserve_cache = transfer.gives
        gen_config.migration_request = MigrationRequest(
            protocol=MigrationProtocol.TCP, remote_engine_id=transfer.peer, remote_session_id=transfer.transfer_id,
            remote_token_id=0, remote_block_ids=[],
        )  # fmt: skip
    asks = params.service is not None and params.service != NOTHING_ASKED
    gen_config.sage = EngineRequest.text(params.service.model_dump_json(exclude_defaults=True) if asks else None, parent)
    return gen_config
