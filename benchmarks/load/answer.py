"""One streamed answer as it comes in: server-sent events, and the tokens in each, read with as little work as will do.

All but the last events of an answer are recognized by two regular expressions instead of being parsed as JSON. They
cannot be taken in by generated text: within a JSON string every quote has a backslash before it.
"""

import json
import re
from typing import Any

FINE_ENDS = ("stop", "length", "tool_calls")
_UNFINISHED = re.compile(rb'"finish_reason": ?null').search
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)').search
_TEXT = re.compile(rb'"(?:text|content|reasoning_content)": ?"[^"]').search


class AnswerError(Exception):
    """The server answered, but not what was asked for."""


class Answer:
    """Times and tokens of the chunks of one answer.

    Attributes:
        prompt_tokens, output_tokens: as the server counted them; of a broken answer, 0 and the tokens seen.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._rest = b""
        self._finish: Any = None
        self._complete = False

    def feed(self, arrived_s: float, data: bytes) -> None:
        """Events that end in `data` arrived with it. Raises AnswerError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(arrived_s, line[5:].strip())

    def end(self) -> None:
        """The connection has ended. Raises AnswerError unless the answer is whole."""
        if not self._complete:
            raise AnswerError("the stream ended early, without [DONE]")
        if self._finish not in FINE_ENDS:
            raise AnswerError(f"finish_reason is {self._finish!r}; whole answers end with {', '.join(FINE_ENDS)}")
        if not self._times_s:
            raise AnswerError("the answer has no token")

    def chunks(self) -> tuple[list[float], list[int]]:
        """Arrival and number of tokens of each chunk that carried any."""
        return self._times_s, self._counts

    def _event(self, arrived_s: float, event: bytes) -> None:
        if event == b"[DONE]":
            self._complete = True
        elif not (_UNFINISHED(event) and self._quick(arrived_s, event)):
            try:
                message = json.loads(event)
                if "error" in message or message.get("object") == "error":
                    raise AnswerError(f"error in the stream: {event.decode()[:200]}")
                self._parsed(arrived_s, message)
            except (ValueError, TypeError, KeyError, AttributeError, IndexError):
                raise AnswerError(f"not an answer of this endpoint: {event.decode(errors='replace')[:200]}") from None

    def _quick(self, arrived_s: float, event: bytes) -> bool:
        """Read an unfinished event without parsing it; False if it has to be parsed."""
        raise NotImplementedError

    def _parsed(self, arrived_s: float, message: dict) -> None:
        raise NotImplementedError

    def _add(self, arrived_s: float, num_tokens: int) -> None:
        self._times_s.append(arrived_s)
        self._counts.append(num_tokens)
        self.output_tokens += num_tokens


class GenerateAnswer(Answer):
    """/generate: every event has the number of tokens so far, so that the tokens in it are known exactly."""

    def _quick(self, arrived_s: float, event: bytes) -> bool:
        found = _COMPLETION_TOKENS(event)
        if found:
            self._count(arrived_s, int(found[1]))
        return found is not None

    def _parsed(self, arrived_s: float, message: dict) -> None:
        meta = message["meta_info"]
        self._count(arrived_s, meta["completion_tokens"])
        self.prompt_tokens = meta["prompt_tokens"]
        if meta["finish_reason"] is not None:
            self._finish = meta["finish_reason"]["type"]

    def _count(self, arrived_s: float, so_far: int) -> None:
        if so_far > self.output_tokens:
            self._add(arrived_s, so_far - self.output_tokens)


class OpenAiAnswer(Answer):
    """OpenAI's API: an event with text counts as one token, one without as none; `usage` at the end tells the total.

    Tokens that the total has and the events had not (several in one event, text held back until it is a whole
    character) go to the last event with text. If there were more events than tokens, those before the last are dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._total: int | None = None

    def end(self) -> None:
        super().end()
        if self._total is not None and self._total > 0:
            surplus = max(0, len(self._times_s) - self._total)
            if surplus:
                del self._times_s[-1 - surplus : -1], self._counts[-1 - surplus : -1]
            self._counts[-1] += self._total - len(self._counts)
            self.output_tokens = self._total

    def _quick(self, arrived_s: float, event: bytes) -> bool:
        if _TEXT(event):
            self._add(arrived_s, 1)
        return True

    def _parsed(self, arrived_s: float, message: dict) -> None:
        for choice in message["choices"]:
            part = choice.get("delta") or choice
            if any(part.get(name) for name in ("text", "content", "reasoning_content")):
                self._add(arrived_s, 1)
            self._finish = choice["finish_reason"] or self._finish
        usage = message.get("usage")
        if usage:
            self.prompt_tokens, self._total = usage["prompt_tokens"], usage["completion_tokens"]


ANSWERS = {"generate": GenerateAnswer, "completions": OpenAiAnswer, "chat": OpenAiAnswer}
