"""Answers on several engines: a master that plans, and workers that write some of the points, or whole answers.

Workers connect to the master. The master's engine keeps the keys and values of a plan until each worker's engine has read them
(`Transfer`), so they travel once. Tasks go to the workers as events; each point comes back as a call. The master writes the
points of a worker that is lost, or that fails. While it writes an answer, others go to workers with fewer answers as a whole:
a plan is written token by token, so it gains nothing from a second engine.

Both sides prove that they have the group's key (`comm_backend.control`).
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sagellm.accel.sot.results import BranchInfo, ScheduleResult
from sagellm.comm_backend.control import ControlConnection, ControlServer, connect, read_key, register
from sagellm.core.config import Model, PDHooks
from sagellm.core.engines import GroupEngine
from sagellm.core.errors import PeerError
from sagellm.core.running import Request, SamplingParams, Transfer

__all__ = ["Answered", "Complete", "Master", "Question", "Sent", "Tasks", "Worker", "WorkerResult", "group_hooks"]

logger = logging.getLogger("sagellm")

CALL_S = 10.0
SAMPLING = ("temperature", "top_k", "top_p", "seed", "ignore_eos", "stop_token_ids")  # of `SamplingParams`, which travel
Mode = Literal["plan", "direct", "error"]


class Join(Model):
    """The first message of a worker. Reply: `Joined`."""

    engine_id: str = Field(min_length=1)


class Joined(Model):
    """The master's engine: its id, and the address of its control connections."""

    engine_id: str
    address: str


class Branch(Model):
    """As `BranchInfo`."""

    branch_id: int
    title: str
    prompt: tuple[int, ...]
    num_tokens: int


class Tasks(Model):
    """To a worker: write these points behind `prefix`, whose keys and values the master's engine `source` keeps."""

    answer: int
    source: str
    transfer_id: int
    prefix: tuple[int, ...]
    branches: tuple[Branch, ...]
    max_new_tokens: int
    max_parallel: int
    max_kv_len: int | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)


class Question(Model):
    """To a worker: write this answer as a whole. `options`: of `SpecSoT.generate`."""

    answer: int
    question: str
    history: tuple[dict[str, str], ...]
    may_be_direct: bool
    options: dict[str, Any]
    sampling: dict[str, Any] = Field(default_factory=dict)


class WorkerResult(Model):
    """From a worker: a point is written. `error`: why it writes no more of the answer. Reply: `Taken`."""

    answer: int
    branch_id: int = -1
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    drafted: int = 0
    accepted: int = 0
    error: str = ""


class Answered(Model):
    """From a worker: an answer is written, after all of its points. Reply: `Taken`.

    Attributes:
        tasks: the points, as `TaskData`; none of an answer as one text, which is point 0.
        stats: as in `SoTAnswer`.
    """

    answer: int
    mode: Mode
    error_msg: str
    tasks: tuple[tuple[int, str, int], ...]
    stats: dict[str, float]


class Taken(Model):
    """The master has it."""


class Complete(Model):
    """To a worker: the answer is over, in this mode. The worker ends the points that it still writes."""

    answer: int
    mode: Mode


register(Joined, Taken, Tasks, Question, Complete)


def group_hooks(engine_id: str, key_file: Path, **values: Any) -> PDHooks:
    """Settings of the engine of a master or a worker, for `open_engine`."""
    return PDHooks(**{"role": "hybrid", "engine_id": engine_id, "key_file": key_file, "channel": "shm"} | values)


@dataclass
class Sent:
    """Tasks of one answer that are with workers. `due`: points that each one owes; `lost`: those left to the master."""

    answer: int
    due: dict[ControlConnection, set[int]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    arrived: "queue.SimpleQueue[WorkerResult | Answered | None]" = field(default_factory=queue.SimpleQueue)


class Master:
    """The side that plans. Serves several answers at once, each from its own thread.

    Args:
        engine: opened with `group_hooks(engine_id, key_file)`.
        host, port: where workers connect; port 0 is any free one.

    Attributes:
        address: host:port.
    """

    def __init__(self, engine: GroupEngine, engine_id: str, key_file: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine, self._engine_id = engine, engine_id
        self._names: dict[ControlConnection, str] = {}  # of the workers' engines
        self._at_work: Counter[ControlConnection | None] = Counter()  # whole answers of each; None: the master's
        self._answers: dict[int, Sent] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._loop = _Loop("sagellm-sot-master")
        handlers = {Join: self._join, WorkerResult: self._take, Answered: self._take}
        self._server = self._loop.run(_served(read_key(key_file), handlers, self._lost))
        self.address = self._loop.run(self._server.start(host, port))

    @property
    def num_workers(self) -> int:
        return len(self._names)

    @property
    def num_idle(self) -> int:
        """Workers that write no whole answer."""
        with self._changed:
            return len(self._idle())

    def _idle(self) -> list[ControlConnection]:
        return [each for each in self._names if not self._at_work[each]]

    @contextlib.contextmanager
    def placed(self) -> Iterator[ControlConnection | None]:
        """Choose who writes an answer, as long as the context lasts: a worker, or None for the master, which comes first."""
        with self._changed:
            where = min((None, *self._names), key=lambda each: self._at_work[each])
            self._at_work[where] += 1
        try:
            yield where
        finally:
            with self._changed:
                self._at_work[where] -= 1

    def wait_for_workers(self, count: int, timeout_s: float) -> None:
        """
        Raises:
            PeerError: fewer have joined after `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_workers >= count, timeout_s):
                raise PeerError(f"{self.num_workers} of {count} workers have joined at {self.address} after {timeout_s:g} s.")

    def close(self) -> None:
        """End all connections. The engine stays open."""
        self._loop.run(self._server.close())
        self._loop.close()

    # ---- exchange

    def delegate(
        self, worker: ControlConnection, question: str, history: Sequence[dict[str, str]], may_be_direct: bool,
        options: dict[str, Any], params: SamplingParams,
    ) -> tuple[Answered, list[WorkerResult]] | None:  # fmt: skip
        """Let a worker write an answer, and wait for it. None: the worker was lost, or failed."""
        sent, points = Sent(next(self._numbers)), list[WorkerResult]()
        with self._changed:
            if worker not in self._names:
                return None
            sent.due = {worker: {-1}}
            self._answers[sent.answer] = sent
        try:
            self._tell(
                worker,
                Question(
                    answer=sent.answer, question=question, history=tuple(history), may_be_direct=may_be_direct, options=options,
                    sampling=_sampling(params),
                ),
            )  # fmt: skip
            while isinstance(found := sent.arrived.get(), WorkerResult):
                points.append(found)
            return None if found is None else (found, points)
        finally:
            with self._changed:
                self._answers.pop(sent.answer, None)
            if worker in self._names:
                self._tell(worker, Complete(answer=sent.answer, mode="plan"))

    def distribute_tasks_to_workers(
        self, plan: Request, prefix: Sequence[int], schedule: ScheduleResult, max_new_tokens: int, max_kv_len: int | None,
        params: SamplingParams,
    ) -> Sent:  # fmt: skip
        """Send each worker the points of its device in the schedule, the first of which is the master's.

        Args:
            plan: the request whose keys and values workers read; it is kept.
            prefix: its tokens.
        """
        sent = Sent(next(self._numbers))
        infos = {info.branch_id: info for info in schedule.branch_infos}
        devices = [ids for ids in schedule.schedule_plan.devices[1:] if ids]
        with self._changed:
            self._answers[sent.answer] = sent
            workers = [(each, self._names[each]) for each in self._idle()][: len(devices)]
            sent.due = {connection: set(ids) for (connection, _), ids in zip(workers, devices, strict=False)}
            sent.lost = {each for ids in devices[len(workers) :] for each in ids}
        for (connection, engine_id), ids in zip(workers, devices, strict=False):
            transfer = Transfer(engine_id, secrets.randbits(62) | 1 << 40, gives=True)
            self.engine.fork(plan, [[]], replace(SamplingParams(1), transfer=transfer))
            tasks = Tasks(
                answer=sent.answer, source=self._engine_id, transfer_id=transfer.transfer_id, prefix=tuple(prefix),
                branches=tuple(Branch(**asdict(infos[each])) for each in ids), max_new_tokens=max_new_tokens,
                max_parallel=schedule.schedule_plan.max_parallel, max_kv_len=max_kv_len,
                sampling=_sampling(params),
            )  # fmt: skip
            self._tell(connection, tasks)
        return sent

    def collect_worker_results(self, sent: Sent, on_result: Callable[[WorkerResult], None]) -> set[int]:
        """Wait until no worker owes a point. Return those that are left: their workers were lost, or failed.

        Args:
            on_result: called with each point, on this thread.
        """
        while True:
            with self._changed:
                is_over = not any(sent.due.values())
            try:
                result = sent.arrived.get(block=not is_over)
            except queue.Empty:
                return sent.lost
            if result is not None:
                on_result(result)

    def notify_workers_complete(self, sent: Sent | None, mode: Mode) -> None:
        """Tell all workers that an answer is over. `sent`: None for an answer that they had no part in."""
        number = next(self._numbers) if sent is None else sent.answer
        with self._changed:
            self._answers.pop(number, None)
            workers = list(self._names)
        for connection in workers:
            self._tell(connection, Complete(answer=number, mode=mode))

    # ---- on the loop

    async def _join(self, connection: ControlConnection, message: Join) -> Joined:
        with self._changed:
            self._names[connection] = message.engine_id
            self._changed.notify_all()
        return Joined(engine_id=self._engine_id, address=self.engine.group_address)

    async def _take(self, connection: ControlConnection, message: WorkerResult | Answered) -> Taken:
        with self._changed:
            sent = self._answers.get(message.answer)
            due = sent.due.get(connection) if sent is not None else None
            if sent is None or due is None:
                return Taken()
            if isinstance(message, Answered):
                due.clear()
                sent.arrived.put(message)
            elif message.error:
                logger.warning("a worker gives points %s up: %s", sorted(due), message.error)
                sent.lost |= due
                due.clear()
                sent.arrived.put(None)
            elif message.branch_id in due or -1 in due:  # of a whole answer
                due.discard(message.branch_id)
                sent.arrived.put(message)
        return Taken()

    def _lost(self, connection: ControlConnection) -> None:
        with self._changed:
            name = self._names.pop(connection, None)
            for sent in self._answers.values():
                if due := sent.due.pop(connection, None):
                    logger.warning("worker %s is lost; its points %s are written again", name, sorted(due))
                    sent.lost |= due
                    sent.arrived.put(None)
            self._changed.notify_all()

    def _tell(self, connection: ControlConnection, message: Model) -> None:
        try:
            self._loop.run(connection.tell(message))
        except PeerError:
            self._lost(connection)


class Worker:
    """The side that writes points.

    Args:
        engine: opened with `group_hooks(engine_id, key_file)`.
        address: of the master.

    Raises:
        PeerError: the master cannot be reached, or its engine does not fit.
    """

    def __init__(self, engine: GroupEngine, engine_id: str, key_file: Path, address: str) -> None:
        self.engine = engine
        self._messages: queue.SimpleQueue[Tasks | Question | Complete | None] = queue.SimpleQueue()
        self._loop = _Loop("sagellm-sot-worker")
        try:
            self._connection = self._loop.run(connect(address, read_key(key_file), on_event=self._heard))
            joined = self._loop.run(self._connection.call(Join(engine_id=engine_id), CALL_S, Joined))
            engine.connect_peer(joined.engine_id, joined.address)
        except BaseException:
            self.close()
            raise
        self._loop.start(self._watch())

    def receive_tasks_from_master(self) -> Tasks | Question | Complete | None:
        """Wait for the next message; None once the master has gone."""
        return self._messages.get()

    def send_results_to_master(self, result: WorkerResult | Answered) -> None:
        """
        Raises:
            PeerError: the master has gone.
        """
        self._loop.run(self._connection.call(result, CALL_S, Taken))

    def close(self) -> None:
        """Leave the group. The engine stays open."""
        if (connection := getattr(self, "_connection", None)) is not None:
            self._loop.run(connection.close())
        self._loop.close()

    def _heard(self, _: ControlConnection, event: Any) -> None:
        self._messages.put(event)

    async def _watch(self) -> None:
        await self._connection.wait_closed()
        self._messages.put(None)


class _Loop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _served(key: bytes, handlers: Any, on_closed: Any) -> ControlServer:
    return ControlServer(key, handlers, on_closed)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SAMPLING}


def info_of(branch: Branch) -> BranchInfo:
    return BranchInfo(branch.branch_id, branch.title, branch.prompt, branch.num_tokens)
