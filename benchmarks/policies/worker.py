"""The process of one contestant: one line of JSON in, one out.

    PYTHON -m benchmarks.policies.worker '{"contestant": NAME, "folder": FOLDER}'

FOLDER has requests as NumPy files, and takes hits. Runs in the environment of the peer, which needs NumPy and the peer.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policies.contestants import CONTESTANTS
from benchmarks.prefix.measure import spent


class Worker:
    """The public methods are the requests; `load` comes first."""

    def __init__(self, contestant: str, folder: str) -> None:
        self._contestant = CONTESTANTS[contestant]()
        self._folder = Path(folder) / contestant
        self._folder.mkdir()

    def about(self) -> dict[str, str]:
        return {
            "version": self._contestant.version, "note": self._contestant.note, "python": sys.version.split()[0]
        }  # fmt: skip

    def load(self, file: str) -> int:
        keys = np.load(self._folder.parent / file)
        self._contestant.load(keys, self._folder)
        return len(keys)

    def hits(self, policy: str, capacity: int) -> str | None:
        """The file that holds them."""
        hits = self._contestant.hits(policy, capacity)
        if hits is None:
            return None
        path = self._folder / "hits.npy"
        np.save(path, hits)
        return str(path)

    def batch(self, policy: str, capacity: int) -> dict[str, int]:
        return spent(lambda: self._contestant.batch(policy, capacity))._asdict()

    def singly(self, policy: str, capacity: int) -> dict[str, int]:
        return spent(lambda: self._contestant.singly(policy, capacity))._asdict()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints goes to the error stream
    for reply in _replies(json.loads(sys.argv[1])):
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _replies(about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One to say that it is up, and one to each line; the first failure ends them."""
    try:
        worker = Worker(**about)
        yield {"answer": worker.about()}
        for line in sys.stdin:
            request = json.loads(line)
            yield {"answer": getattr(worker, request.pop("do"))(**request)}
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
