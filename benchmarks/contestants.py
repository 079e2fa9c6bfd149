"""Contestants of a comparison: one process each, all loaded, asked in turn over a pipe. Only the one that was asked works."""

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from typing import Any

STOP = "stop"


class Contestant:
    """A process that builds its state with `build(*args)` and then answers `state(request)` calls."""

    def __init__(self, name: str, build: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        # Not a daemon: an engine may start workers of its own.
        self._process = context.Process(target=_serve, args=(remote, build, args), name=f"contestant-{name}")
        self._process.start()

    def ask(self, request: Any) -> Any:
        """Raises RuntimeError with the contestant's own message when it fails."""
        self._pipe.send(request)
        try:
            ok, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended without an answer") from None
        if not ok:
            raise RuntimeError(f"{self.name}: {answer}")
        return answer

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(STOP)
        self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()


def _serve(pipe: Any, build: Callable[..., Callable[[Any], Any]], args: tuple) -> None:
    try:
        answer = build(*args)
    except Exception as error:
        pipe.recv()
        pipe.send((False, repr(error)))
        return
    while (request := pipe.recv()) != STOP:
        try:
            pipe.send((True, answer(request)))
        except Exception as error:
            pipe.send((False, repr(error)))
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def interleave(contestants: Sequence[Contestant], request: Any, rounds: int) -> dict[str, list[Any]]:
    """Answers of each contestant to the same request, asked A B B A ... so that drift hits all alike.

    With more than two the row is turned by one each time, or those at its ends, asked twice running, would find their
    caches warm more often than the others.
    """
    answers: dict[str, list[Any]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        turn = number // 2 % len(contestants)
        order = [*contestants[turn:], *contestants[:turn]]
        for contestant in order if number % 2 == 0 else reversed(order):
            answers[contestant.name].append(contestant.ask(request))
    return answers


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles as the spread."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio ours / theirs round by round: its median and quartiles."""
    return summary([a / b for a, b in zip(ours, theirs, strict=True)])
