"""The layer between LMDeploy's handlers and its `AsyncEngine.generate`: stop strings, scheduling wishes, errors, and
clients that leave.

LMDeploy stops at single tokens whose text contains the stop word, which cuts text before it, and ignores words of
several tokens without a word. The text decides, as in OpenAI's API. The answer ends before the first complete match, so
it does not depend on how the text was cut into pieces. Tokens behind it are left out,
where a step of the engine gave several.
"""

import asyncio
import copy
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import HTTPException

from sagellm.core.service import EngineRequest
from sagellm.serve.choices import PROGRESS
from sagellm.serve.parameters import Refused
from sagellm.serve.service import SERVICE
from sagellm.serve.speculation import add_guesses
from sagellm.serve.token_texts import TEXTS
from sagellm.serve.wishes import apply

END = object()
LOOP_IS_DEAD = "HANDLER_NOT_EXIST"  # LMDeploy's name for a request that is never computed


class StopStrings:
    """Finds the first of some strings in text that arrives in pieces, keeping back what may be the start of one."""

    def __init__(self, words: list[str], keep_word: bool = False) -> None:
        self._words = words
        self._keep_word = keep_word
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a word was found. O(len(text) * number of words)."""
        self._held += text
        found = [(at + len(word), at) for word in self._words if (at := self._held.find(word)) >= 0]
        if found:
            end, start = min(found)
            return self._held[: end if self._keep_word else start], True
        keep = max((_overlap(self._held, word) for word in self._words), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """Return the text that was kept back, when nothing more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`."""
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0


class GuardedGeneration:
    """Stands before `engine.generate`. `on_dead` is called when the engine turns out to have stopped working."""

    def __init__(self, engine: Any, on_dead: Callable[[], None]) -> None:
        self._engine = engine
        self._generate = engine.generate
        self._on_dead = on_dead
        self._open: set[asyncio.Queue] = set()  # of requests in the engine
        self._ends: set[asyncio.Future] = set()  # of other work
        self._reason = ""  # why all was ended

    def end_all(self, reason: str) -> None:
        """End every answer and all other work with an error; clients learn the reason.

        Answers and other work that begin later end at once, too.
        """
        self._reason = reason
        for outputs in self._open:
            outputs.put_nowait(HTTPException(503, reason))
        for end in self._ends:
            if not end.done():
                end.set_result(reason)

    async def run(self, work: Awaitable[Any], left: Awaitable[Any]) -> Any:
        """Do other work than an answer, such as embeddings.

        Args:
            left: is over when the client has left.

        Returns:
            The result; None once the client has left, which ends the work.

        Raises:
            Refused: `end_all` was called.
        """
        end = asyncio.get_running_loop().create_future()
        if self._reason:
            end.set_result(self._reason)
        self._ends.add(end)
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(left)
        try:
            await asyncio.wait({task, watch, end}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if end.done():
                raise Refused(end.result(), 503)
            return None
        finally:
            self._ends.discard(end)
            for each in (task, watch):
                each.cancel()
            ended = asyncio.gather(task, watch, return_exceptions=True)
            if not end.done():  # the answer of a server that ends does not wait for the engine, which may be in a long step
                await ended

    async def __call__(
        self, messages: Any, session_id: int, gen_config: Any = None, **options: Any
    ) -> AsyncIterator[Any]:
        """Takes the place of LMDeploy's generator; same arguments, same `GenOut`s.

        Raises:
            HTTPException: 500, where LMDeploy would put the text of its error into the answer.
        """
        gen_config, tokens, parent = apply(session_id, gen_config)
        if tokens is not None:
            messages, options = None, options | {"input_ids": tokens}
        words = list(gen_config.stop_words or []) if gen_config is not None else []
        stops = StopStrings(words, bool(words) and gen_config.include_stop_str_in_output)
        if words:
            gen_config = dataclasses.replace(gen_config, stop_words=None, include_stop_str_in_output=False)
        if gen_config is not None and (asked := EngineRequest.text(SERVICE.get(), parent)) is not None:
            gen_config = copy.copy(gen_config)  # the prompts of a request have one object
            gen_config.sage = asked  # no field of it: copies and pickles keep it, `dataclasses.replace` would not
        guesses, num_decoded = (), 0
        is_first = True
        outputs: asyncio.Queue = asyncio.Queue()
        left = asyncio.Event()
        inner = self._generate(messages, session_id, gen_config=gen_config, **options)
        # A task of its own: when a client leaves, the server cancels every `await` of its handler, also those with which
        # LMDeploy takes the request out of the engine; its blocks would never come back.
        task = asyncio.create_task(self._pump(session_id, inner, outputs, left), name=f"sagellm-generate-{session_id}")
        try:
            while (out := await outputs.get()) is not END:
                if isinstance(out, BaseException):
                    raise out
                self._check(out)
                if is_first and gen_config is not None and gen_config.with_cache:
                    # LMDeploy's handler fails where the first piece has no token: an answer that ends at once. Engines of a
                    # group tell each other which one was drawn; it is not read here.
                    out.token_ids = out.token_ids or [0]
                is_first = False
                now, num_now = getattr(out, "sage", None) or guesses, max(out.generate_token_len - 1, num_decoded)
                add_guesses(guesses, now, num_now - num_decoded)  # the first token is the prompt's
                guesses, num_decoded = now, num_now
                if found := _cut(out, stops):
                    out.finish_reason = "stop"
                elif out.finish_reason:
                    out.response += stops.flush()
                if (progress := PROGRESS.get()) is not None:
                    progress.begun.set()
                    progress.num_prompt, progress.num_answer = out.input_token_len, out.generate_token_len
                yield out
                if found:
                    return
        finally:
            left.set()
            task.cancel()

    async def _pump(
        self, session_id: int, inner: AsyncIterator[Any], outputs: asyncio.Queue, left: asyncio.Event
    ) -> None:
        texts: list[str] = []
        TEXTS.set(texts)  # for this task alone, in which `inner` runs
        self._open.add(outputs)
        if self._reason:
            outputs.put_nowait(HTTPException(503, self._reason))
        try:
            async for out in inner:
                if left.is_set():  # the engine's wait drops a cancellation that comes in the same moment as a token
                    break
                out.texts = texts.copy()
                texts.clear()
                outputs.put_nowait(out)
            outputs.put_nowait(END)
        except Exception as error:  # the handler's side raises it
            outputs.put_nowait(error)
        finally:
            await inner.aclose()
            self._forget(session_id)
            self._open.discard(outputs)
            self._count_finished()

    def _count_finished(self) -> None:
        """Count requests whose client has left as finished; LMDeploy counts only those that it answered to the end."""
        from lmdeploy.metrics.metrics_processor import get_current_scheduler_stats

        stats = get_current_scheduler_stats()
        stats.num_finished_reqs = max(stats.num_finished_reqs, stats.num_total_reqs - len(self._open))

    def _forget(self, session_id: int) -> None:
        """LMDeploy keeps a step for every session that there ever was; one that is over stands at 0, which says nothing."""
        steps = self._engine.id2step
        if session_id not in self._engine.id2inst and not steps.get(session_id):
            steps.pop(session_id, None)

    def _check(self, out: Any) -> None:
        if out.finish_reason != "error":
            return
        if LOOP_IS_DEAD in out.response:
            self._on_dead()
        raise HTTPException(500, f"the engine gave this request up: {out.response}")


def _cut(out: Any, stops: StopStrings) -> bool:
    """Leave of a `GenOut` what may be shown; True where a word was found: it ends with the token that makes the word whole."""
    texts = out.texts or [out.response or ""]
    shown = ""
    for number, text in enumerate(texts, 1):
        piece, found = stops.feed(text)
        shown += piece
        if found and (rest := len(texts) - number):
            out.generate_token_len -= rest
            out.token_ids = out.token_ids[:-rest]
            out.logprobs = out.logprobs and out.logprobs[:-rest]
        if found:
            break
    out.response = shown
    return found
