"""The process of one contestant.

    PYTHON -m benchmarks.policies.worker '{"contestant": NAME, "folder": FOLDER}'

FOLDER has requests as NumPy files, and takes hits. Runs in the environment of the peer, which needs NumPy and the peer.
"""

import sys
from pathlib import Path

import numpy as np

from benchmarks.peers.worker import answer_requests
from benchmarks.policies.contestants import CONTESTANTS
from benchmarks.process_cost import spent


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


if __name__ == "__main__":
    answer_requests(Worker)
