"""The end of a contestant's process that answers: one line of JSON in, one out.

Runs in the environment of the peer, so it needs nothing but the standard library.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Worker(Protocol):
    """Its public methods are the requests; each takes and returns what JSON can say."""

    def about(self) -> dict[str, Any]:
        """Describe the contestant once it is up."""
        ...


def answer_requests(build: Callable[..., Worker]) -> None:
    """Builds the worker with the arguments of the command line, a JSON object, and answers until the input ends.

    A request names a method in `do` and has its arguments beside it. The first failure is told and ends the process.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints goes to the error stream
    for reply in _replies(build, json.loads(sys.argv[1])):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _replies(build: Callable[..., Worker], arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One to say that it is up, and one to each line; the first failure ends them."""
    try:
        worker = build(**arguments)
        yield {"answer": worker.about()}
        for line in sys.stdin:
            request = json.loads(line)
            yield {"answer": getattr(worker, request.pop("do"))(**request)}
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"}
