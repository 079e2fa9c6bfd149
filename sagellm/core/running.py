"""Requests of an engine: parameters, results, those that go on while their caller does something else, and branches of them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

from sagellm.core.errors import EngineError
from sagellm.core.service import ServiceRequest

__all__ = [
    "MAX_BRANCHES", "Branches", "Draft", "Generation", "PaddedPrompt", "Request", "SamplingParams", "Transfer", "wait_for_news",
]  # fmt: skip

MAX_BRANCHES = 128  # of one call, as many as answers that OpenAI's API allows
CHECK_S = 1.0  # how often a caller that waits looks whether the engine still works

State = Literal["running", "finished", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Keys and values of a prompt that one engine of a group computes and another one reads.

    Attributes:
        peer: id of the other engine.
        transfer_id: the same on both sides, and used once.
        gives: this side computes them, and keeps them until they are read. Its request draws one token.
    """

    peer: str
    transfer_id: int
    gives: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`temperature` 0 is greedy; `top_k` 0 means all tokens; `seed` None draws a fresh one.

    `service` is for the scheduler; so is `adapter`, the key of the model or LoRA adapter that the request belongs to.
    `processors` change the scores of each token before it is drawn: each gets the tokens so far, int64 [tokens], and the
    scores, [vocabulary], and returns scores. They run in the engine process. `pattern`: a regular expression of the whole text,
    to which the tokens are held; "" for none. `transfer`: of the prompt's keys and values, for an engine of a group.
    `keep_drafts`: whether a `Request` keeps what was guessed for it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    service: ServiceRequest | None = None
    adapter: str | None = None
    processors: tuple[Callable[[Any, Any], Any], ...] = ()
    pattern: str = ""
    transfer: Transfer | None = None
    keep_drafts: bool = False


@dataclass(frozen=True, slots=True)
class PaddedPrompt:
    """Tells a processor of scores where its prompt lies: LMDeploy pads in front, with one token again and again.

    Attributes:
        length: tokens of the prompt.
        first: its first token.
        num_first: number of times that it begins with that token.
    """

    length: int = 0
    first: int = -1
    num_first: int = 0

    @classmethod
    def of(cls, prompt: Sequence[int]) -> "PaddedPrompt":
        num_first = next((place for place, token in enumerate(prompt) if token != prompt[0]), len(prompt))
        return cls(len(prompt), prompt[0], num_first)

    def end(self, ids: Any) -> int:
        """Return where the answer begins in padding, prompt and answer, int64 [tokens]."""
        others = (ids != ids[0]).nonzero()
        run = int(others[0]) if len(others) else len(ids)
        if int(ids[0]) == self.first:  # the prompt's own tokens, or padding that equals them
            run -= self.num_first
        return max(0, min(run, len(ids) - self.length)) + self.length


@dataclass(frozen=True, slots=True)
class Generation:
    """`token_s`: for each new token, seconds from the call to its arrival. `finish_reason`: stop, length or error."""

    token_ids: tuple[int, ...]
    finish_reason: str
    token_s: tuple[float, ...] = ()


class Draft(NamedTuple):
    """Guesses that one decode step has verified. `place`: number of new tokens before them; `tokens`: the guesses."""

    place: int
    tokens: tuple[int, ...]


class Watch:
    """Where the callers of an engine wait for news. `check` raises EngineError if the engine works no more."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self._check = check

    def wait(self, is_there: Callable[[], bool], timeout_s: float | None = None) -> None:
        """
        Raises:
            TimeoutError: after `timeout_s`.
            EngineError: the engine has stopped working.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not is_there():
                left_s = CHECK_S if end_s is None else min(CHECK_S, end_s - time.monotonic())
                if left_s <= 0:
                    raise TimeoutError(f"no result after {timeout_s} s; the request goes on. Wait again, or cancel it.")
                if not self.changed.wait(left_s):
                    self._check()


class Request:
    """A request of an engine in this process. An engine makes it, in `start` or `fork`. Safe in any thread.

    Iterate over it for its tokens, as they come.

    Attributes:
        request_id: its id in hooks and records.
        parent: the request that it is a branch of, or None.
        prompt: its token ids; of a branch, with those of its parent.
        keep: whether it stays after its last token, so that it can be forked, until `cancel`.
        guesses: counts of its guesses so far, as `accel.speculative.statistics.RequestGuesses`; empty for none.
        drafts: what was guessed for it, in order. It stays empty without `keep_drafts`, and where workers of their own compute.
    """

    def __init__(
        self, request_id: int, prompt: Sequence[int], params: SamplingParams, watch: Watch, parent: "Request | None" = None,
        keep: bool = False,
    ) -> None:  # fmt: skip
        self.request_id, self.prompt, self.params = request_id, tuple(prompt), params
        self.parent, self.keep = parent, keep
        self.guesses: tuple[Any, ...] = ()
        self.state: State = "running"
        self.stop: Callable[[], None] = lambda: None  # the engine sets it
        self.watch = watch
        self.drafts: list[Draft] = []
        self._tokens: list[int] = []
        self._times: list[float] = []
        self._start_s = time.perf_counter()
        self._reason = ""
        self._error: EngineError | None = None

    @property
    def group_id(self) -> int:
        """Id of the request that the group began with: its own, or that of the parent of its parents."""
        return self.request_id if self.parent is None else self.parent.group_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """New tokens so far."""
        return tuple(self._tokens)

    @property
    def num_tokens(self) -> int:
        """How many there are, without a copy."""
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        """
        Raises:
            EngineError: the engine gave the request up. Tokens that came before are given out first.
        """
        place = 0
        while self._wait_beyond(place):
            yield self._tokens[place]
            place += 1
        if self._error is not None:
            raise self._error

    def result(self, timeout_s: float | None = None) -> Generation:
        """Wait for the last token. The reason of a request that was cancelled is "cancelled".

        Raises:
            EngineError: the engine gave the request up.
            TimeoutError: it is not there after `timeout_s`.
        """
        self.watch.wait(lambda: self.state != "running", timeout_s)
        if self._error is not None:
            raise self._error
        return Generation(tuple(self._tokens), self._reason, tuple(self._times))

    def cancel(self) -> None:
        """End the request now, and give up what `keep` keeps. Its branches go on. A request that has ended stays as it is."""
        self.stop()

    def _wait_beyond(self, place: int) -> bool:
        self.watch.wait(lambda: len(self._tokens) > place or self.state != "running")
        return len(self._tokens) > place

    # ---- called by the engine, on its thread

    def add(self, token_ids: Sequence[int], guesses: tuple[Any, ...] = ()) -> None:
        with self.watch.changed:
            self.guesses = guesses
            self._times.extend([time.perf_counter() - self._start_s] * len(token_ids))
            self._tokens.extend(map(int, token_ids))
            self.watch.changed.notify_all()

    def end(self, state: State, reason: str, error: EngineError | None = None) -> None:
        with self.watch.changed:
            if self.state == "running":
                self.state, self._reason, self._error = state, reason, error
            self.watch.changed.notify_all()


class Branches(Sequence[Request]):
    """Branches that one call of `fork` has made, in the order of their prompts.

    Attributes:
        num_shared: tokens that every branch has of its parent, prompt and answer.
    """

    def __init__(self, requests: Sequence[Request], num_shared: int, watch: Watch) -> None:
        self._requests, self.num_shared, self._watch = tuple(requests), num_shared, watch

    @overload
    def __getitem__(self, place: int) -> Request: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Request]: ...
    def __getitem__(self, place: Any) -> Any:
        return self._requests[place]

    def __len__(self) -> int:
        return len(self._requests)

    def join(self, timeout_s: float | None = None) -> list[Generation]:
        """Wait for the last token of every branch.

        Raises:
            EngineError: the engine gave a branch up; the others are cancelled.
            TimeoutError: one is not there after `timeout_s`; all go on.
        """
        self._watch.wait(self._is_over, timeout_s)
        self._raise_failure()
        return [each.result() for each in self]

    def cancel(self) -> None:
        """Cancel every branch. The parent goes on."""
        for each in self:
            each.cancel()

    def stream(self) -> Iterator[tuple[int, int]]:
        """Yield (number of the branch, token) as tokens come.

        Raises:
            EngineError: the engine gave a branch up; the others are cancelled.
        """
        places, is_over = [0] * len(self), False
        while not is_over:
            self._watch.wait(lambda: self._is_over() or [each.num_tokens for each in self] != places)
            is_over = self._is_over()
            for number, each in enumerate(self):
                found = each.token_ids[places[number] :]
                places[number] += len(found)
                yield from ((number, token) for token in found)
        self._raise_failure()

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far, as OpenAI's API counts them: those that branches have of their parent count once."""
        prompt = self.num_shared + sum(len(each.prompt) - self.num_shared for each in self)
        completion = sum(each.num_tokens for each in self)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _is_over(self) -> bool:
        """Whether no branch goes on, or one has failed."""
        states = [each.state for each in self]
        return "failed" in states or "running" not in states

    def _raise_failure(self) -> None:
        for each in self:
            if each.state == "failed":
                self.cancel()
                each.result()


def wait_for_news(requests: Sequence[tuple[Request, int]]) -> None:
    """Wait until one of the requests, of one engine, has more tokens than those known, or has ended.

    Args:
        requests: each with the number of its tokens that are known.

    Raises:
        EngineError: the engine has stopped working.
    """
    if requests:
        requests[0][0].watch.wait(
            lambda: any(request.state != "running" or request.num_tokens > known for request, known in requests)
        )
