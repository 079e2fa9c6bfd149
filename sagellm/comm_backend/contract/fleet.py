"""The ranks of the scenarios: threads of this process, or processes that wait for the next scenario."""

import multiprocessing
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from sagellm.comm_backend.contract.seat import Facts, Seat, Task, run_seat

__all__ = ["Fleet", "ProcessFleet", "ThreadFleet"]

Play = Callable[[Seat], None]


class Fleet:
    """Plays scenarios with so many ranks. None stands for a rank that did not come to its end in time, or died."""

    can_build = True  # otherwise what is left need not be tried

    def __init__(self, world_size: int, limit_s: float) -> None:
        self.world_size, self.limit_s = world_size, limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="sagellm-comm-")
        self._num_played = 0

    def rendezvous(self, scheme: str) -> str:
        """One that was never used. The ports of `tcp://` are for who knows which are free."""
        self._num_played += 1
        path = str(Path(self._folder.name) / str(self._num_played))
        return f"file://{path}" if scheme == "file" else f"{scheme}://{path.strip('/').replace('/', '-')}"

    def play(self, play: Play, tasks: Iterable[Task]) -> list[Facts | None]:
        raise NotImplementedError

    def close(self) -> None:
        self._folder.cleanup()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ThreadFleet(Fleet):
    """Ranks that are threads. One that never ends is left behind."""

    def play(self, play: Play, tasks: Iterable[Task]) -> list[Facts | None]:
        facts: list[Facts | None] = [None] * self.world_size

        def run(task: Task) -> None:
            facts[task.rank] = run_seat(task, play)

        threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
        deadline = time.monotonic() + self.limit_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return list(facts)


class ProcessFleet(Fleet):
    """Ranks that are processes, forked from one that has imported torch; those that die or hang are replaced."""

    def __init__(self, world_size: int, limit_s: float) -> None:
        super().__init__(world_size, limit_s)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._ranks: list[tuple[BaseProcess, Connection] | None] = [None] * world_size

    def play(self, play: Play, tasks: Iterable[Task]) -> list[Facts | None]:
        tasks = list(tasks)
        messages = [pickle.dumps((play, task)) for task in tasks]
        ranks = [self._rank(task.rank) for task in tasks]
        for (_, connection), message in zip(ranks, messages, strict=True):
            connection.send_bytes(message)
        facts: list[Facts | None] = [None] * self.world_size
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
        deadline = time.monotonic() + self.limit_s
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    facts[rank] = connection.recv()
                except (EOFError, OSError):
                    self._end(rank)
        for rank in waiting.values():
            self._end(rank)
        return facts

    def close(self) -> None:
        for rank in range(self.world_size):
            self._end(rank)
        super().close()

    def _rank(self, rank: int) -> tuple[BaseProcess, Connection]:
        found = self._ranks[rank]
        if found is None:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), name=f"comm-rank-{rank}", daemon=True)
            process.start()
            there.close()
            found = self._ranks[rank] = (process, here)
        return found

    def _end(self, rank: int) -> None:
        found, self._ranks[rank] = self._ranks[rank], None
        if found is not None:
            process, connection = found
            connection.close()
            process.kill()
            process.join()
            process.close()


def _serve(connection: Connection) -> None:
    """A rank: plays what it is sent until the pipe is closed."""
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv_bytes()
            try:
                play, task = pickle.loads(message)
            except Exception as error:  # the module of the class cannot be imported there
                said = f"a rank of its own process cannot load it: {type(error).__name__}: {error}"
                connection.send(Facts([("builds", said)], set(), {}, 0))
            else:
                connection.send(run_seat(task, play))
