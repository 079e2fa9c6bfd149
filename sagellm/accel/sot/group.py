"""Answers on several engines: a master that plans, and workers that write some of the points, or whole answers.

Workers connect to the master. The master's engine keeps the keys and values of a plan until each worker's engine has read them
(`Transfer`), so they travel once. Tasks go to the workers as events; each result comes back as a call. The master writes what
a worker owes that is lost, that fails, or that says nothing for `SILENCE_S`. A worker whose engine goes on no more leaves by
itself. While the master writes an answer, others go to workers with fewer answers as a whole: a plan is written token by token,
so it gains nothing from a second engine.

Both sides prove that they have the group's key (`comm_backend.control`).
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from pydantic import Field

from sagellm.accel.sot.results import BranchInfo, Mode, ScheduleResult, SoTAnswer
from sagellm.comm_backend.control import ControlConnection, ControlServer, connect, read_key, register
from sagellm.core.config import Model, PDHooks
from sagellm.core.engines import GroupEngine, TextEngine
from sagellm.core.errors import EngineError, PeerError
from sagellm.core.running import Request, SamplingParams, Transfer
from sagellm.core.tasks import end_tasks, within

__all__ = ["Complete", "Master", "Sent", "Tasks", "Worker", "WorkerResult", "group_hooks"]

logger = logging.getLogger("sagellm")

CALL_S = 10.0
BEAT_S, SILENCE_S = 1.0, 15.0  # how often a worker says that it lives; when it is given up
# When an engine is given up that has work and ends no step: if its processes rest, and if they do not.
STALL_S, LOST_S = 20.0, 80.0
REST = 0.02  # of the time: processes that use less of it rest
LOOK_S = 0.5  # how often a caller that waits for workers looks whether it still should
WHOLE = -1  # in place of a branch: the whole answer


class Join(Model):
    """The first message of a worker. Reply: `Joined`."""

    engine_id: str = Field(min_length=1)


class Joined(Model):
    """The master's engine: its id, and the address of its control connections."""

    engine_id: str
    address: str


class Tasks(Model):
    """To a worker: write these points behind `prefix`; without points, the whole answer.

    Attributes:
        options: of `SpecSoT.generate`, or of its stages.
        prefix: question and plan, whose keys and values the master's engine `source` keeps as `transfer_id`.
    """

    answer: int
    params: SamplingParams
    options: dict[str, Any]
    question: str = ""
    history: tuple[dict[str, str], ...] = ()
    may_be_direct: bool = True
    source: str = ""
    transfer_id: int = 0
    prefix: tuple[int, ...] = ()
    branches: tuple[BranchInfo, ...] = ()
    max_parallel: int = 1


class WorkerResult(Model):
    """From a worker: a point, with its guesses that were computed and right; or the whole answer. `error`: why it writes no
    more of it. Reply: `Taken`."""

    answer: int
    branch_id: int = WHOLE
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    guesses: tuple[int, int] = (0, 0)
    whole: SoTAnswer | None = None
    error: str = ""


class Beat(Model):
    """From a worker: it lives. Reply: `Taken`."""


class Taken(Model):
    """The master has it."""


class Complete(Model):
    """To a worker: the answer is over, in this mode. The worker ends what it still writes of it."""

    answer: int
    mode: Mode


register(Joined, Taken, Tasks, Complete)


def group_hooks(engine_id: str, key_file: Path, **values: Any) -> PDHooks:
    """Settings of the engine of a master or a worker, for `open_engine`."""
    return PDHooks(**{"role": "hybrid", "engine_id": engine_id, "key_file": key_file, "channel": "shm"} | values)


@dataclass
class Sent:
    """Tasks of one answer that are with workers. `due`: points that each one owes; `lost`: those left to the master."""

    answer: int
    due: dict[ControlConnection, set[int]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    arrived: "queue.SimpleQueue[WorkerResult | None]" = field(default_factory=queue.SimpleQueue)


class Master:
    """The side that plans. Serves several answers at once, each from its own thread.

    Args:
        group_address: of the engine that plans; it was opened with `group_hooks(engine_id, key_file)`.
        host, port: where workers connect; port 0 is any free one.

    Attributes:
        address: host:port.
    """

    def __init__(self, group_address: str, engine_id: str, key_file: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self._joined = Joined(engine_id=engine_id, address=group_address)
        self._names: dict[ControlConnection, str] = {}  # of the workers' engines
        self._beats: Counter[ControlConnection] = Counter()  # that each has missed
        self._at_work: Counter[ControlConnection | None] = Counter()  # whole answers of each; None: the master's
        self._answers: dict[int, Sent] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._loop = _Loop("sagellm-sot-master")
        self._server, self.address = self._loop.run(self._serve(read_key(key_file), host, port))

    @property
    def num_workers(self) -> int:
        return len(self._names)

    @property
    def engine_ids(self) -> list[str]:
        """Ids of the engines of all workers."""
        with self._changed:
            return list(self._names.values())

    def idle(self) -> list[tuple[ControlConnection, str]]:
        """Return workers that write no whole answer, and the ids of their engines."""
        with self._changed:
            return [each for each in self._names.items() if not self._at_work[each[0]]]

    @contextlib.contextmanager
    def placed(self, may_be_worker: bool = True) -> Iterator[ControlConnection | None]:
        """Choose who writes an answer, as long as the context lasts: a worker, or None for the master, which comes first."""
        with self._changed:
            where = min((None, *(self._names if may_be_worker else ())), key=lambda each: self._at_work[each])
            self._at_work[where] += 1
        try:
            yield where
        finally:
            with self._changed:
                self._at_work[where] -= 1
                if not self._at_work[where]:
                    del self._at_work[where]  # that worker may have gone

    def wait_for_workers(self, count: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            check: as in `collect_worker_results`.

        Raises:
            PeerError: fewer have joined after `timeout_s`.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(lambda: self.num_workers >= count, LOOK_S):
                check()
                if time.monotonic() > end_s:
                    has = f"{self.num_workers} of {count} workers have joined"
                    raise PeerError(f"{has} at {self.address} after {timeout_s:g} s.")

    def close(self) -> None:
        """End all connections."""
        self._loop.run(self._server.close())
        self._loop.close()

    # ---- exchange

    def delegate(self, worker: ControlConnection, params: SamplingParams, **task: Any) -> Sent:
        """Let a worker write a whole answer. `task`: fields of `Tasks`."""
        sent = Sent(next(self._numbers))
        return self._send(sent, {worker: Tasks(answer=sent.answer, params=params, **task)})

    def distribute_tasks_to_workers(
        self, engine: TextEngine, plan: Request, prefix: Sequence[int], schedule: ScheduleResult, params: SamplingParams,
        **options: Any,
    ) -> Sent:  # fmt: skip
        """Send each worker the points of its device in the schedule, the first of which is the master's.

        Args:
            engine: the master's.
            plan: the request whose keys and values workers read; it is kept.
            prefix: its tokens.
            options: of `SpecSoT.parallel_decode`.
        """
        sent, tasks = Sent(next(self._numbers)), {}
        infos = {info.branch_id: info for info in schedule.branch_infos}
        devices = [ids for ids in schedule.schedule_plan.devices[1:] if ids]
        workers = self.idle()[: len(devices)]
        for (worker, engine_id), ids in zip(workers, devices, strict=False):
            transfer = Transfer(engine_id, secrets.randbits(62) | 1 << 40, gives=True)
            engine.fork(plan, [[]], replace(SamplingParams(1), transfer=transfer))
            tasks[worker] = Tasks(
                answer=sent.answer, params=params, options=options, source=self._joined.engine_id,
                transfer_id=transfer.transfer_id, prefix=tuple(prefix), branches=tuple(infos[each] for each in ids),
                max_parallel=schedule.schedule_plan.max_parallel,
            )  # fmt: skip
        sent.lost = {each for ids in devices[len(workers) :] for each in ids}
        return self._send(sent, tasks)

    def collect_worker_results(
        self, sent: Sent, on_result: Callable[[WorkerResult], None], check: Callable[[], None] = lambda: None
    ) -> set[int]:
        """Wait until no worker owes anything. Return what is left: its workers were lost, or failed.

        Args:
            on_result: called with each result, on this thread.
            check: called again and again; ends the wait with what it raises.
        """
        while True:
            with self._changed:
                is_over = not any(sent.due.values())
            try:
                result = sent.arrived.get(not is_over, LOOK_S)
            except queue.Empty:
                if is_over:
                    return sent.lost
                check()
            else:
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

    def _send(self, sent: Sent, tasks: dict[ControlConnection, Tasks]) -> Sent:
        with self._changed:
            self._answers[sent.answer] = sent
            for worker, task in tasks.items():
                owed = {each.branch_id for each in task.branches} or {WHOLE}
                if worker in self._names:
                    sent.due[worker] = owed
                else:
                    sent.lost |= owed
        for worker in list(sent.due):
            self._tell(worker, tasks[worker])
        return sent

    def _tell(self, connection: ControlConnection, message: Model) -> None:
        try:
            self._loop.run(connection.tell(message))
        except PeerError:
            self._lost(connection)

    # ---- on the loop

    async def _serve(self, key: bytes, host: str, port: int) -> tuple[ControlServer, str]:
        server = ControlServer(key, {Join: self._join, WorkerResult: self._take, Beat: self._beat}, self._lost)
        address = await server.start(host, port)
        self._loop.start(self._listen())
        return server, address

    async def _join(self, connection: ControlConnection, message: Join) -> Joined:
        with self._changed:
            self._names[connection] = message.engine_id
            self._changed.notify_all()
        return self._joined

    async def _beat(self, connection: ControlConnection, _: Beat) -> Taken:
        if connection in self._names:
            self._beats[connection] = 0
        return Taken()

    async def _listen(self) -> None:
        """Give workers up that say nothing. Counts own turns, so that workers outlast a master that was stopped."""
        while True:
            await asyncio.sleep(BEAT_S)
            for connection, name in list(self._names.items()):
                self._beats[connection] += 1
                if self._beats[connection] > SILENCE_S / BEAT_S:
                    logger.warning("worker %s has said nothing for %g s, and is given up", name, SILENCE_S)
                    self._lost(connection)
                    await connection.close()

    async def _take(self, connection: ControlConnection, message: WorkerResult) -> Taken:
        with self._changed:
            sent = self._answers.get(message.answer)
            due = sent.due.get(connection) if sent is not None else None
            if sent is None or due is None:
                return Taken()
            if message.error:
                logger.warning("a worker gives points %s up: %s", sorted(due), message.error)
                self._give_back(sent, due)
            elif message.branch_id in due:
                due.discard(message.branch_id)
                sent.arrived.put(message)
        return Taken()

    def _lost(self, connection: ControlConnection) -> None:
        with self._changed:
            name, _ = self._names.pop(connection, None), self._beats.pop(connection, None)
            for sent in self._answers.values():
                if due := sent.due.pop(connection, None):
                    logger.warning("worker %s is lost; its points %s are written again", name, sorted(due))
                    self._give_back(sent, due)
            self._changed.notify_all()

    def _give_back(self, sent: Sent, due: set[int]) -> None:
        sent.lost |= due
        due.clear()
        sent.arrived.put(None)


class Stalls:
    """Notices an engine that has work and goes on no more. Counts own turns, so that a process that was stopped is not blamed.

    A step of a large model may take long, but it uses the processor. So an engine whose processes rest is given up after
    `STALL_S`. Another one is given up after `LOST_S` and four times the longest time without the end of a step so far.
    """

    def __init__(self) -> None:
        self._progress, self._turns, self._longest = 0.0, 0, 0
        self._spent_s = 0.0

    def look(self, has_work: bool, progress: float, spent: Callable[[], float]) -> int:
        """Take a turn, every `BEAT_S` seconds. Return turns without progress once they are too many, else 0.

        Args:
            progress: of the engine; it grows with each step.
            spent: returns processor seconds of the engine's processes.
        """
        if not has_work or progress != self._progress:
            self._longest = max(self._longest, self._turns)
            self._progress, self._turns, self._spent_s = progress, 0, spent()
            return 0
        self._turns += 1
        quiet_s = self._turns * BEAT_S
        rests = quiet_s > STALL_S and spent() - self._spent_s < REST * quiet_s
        return self._turns if rests or quiet_s > LOST_S + 4 * self._longest * BEAT_S else 0


def processor_s() -> float:
    """Return processor seconds of this process and those below it."""
    own = psutil.Process()
    found = 0.0
    for each in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            found += times.user + times.system
    return found


class Worker:
    """The side that writes points. It leaves the group if its engine has work and goes on no more.

    Args:
        engine: opened with `group_hooks(engine_id, key_file)`.
        address: of the master.

    Raises:
        PeerError: the master cannot be reached, or its engine does not fit.
    """

    def __init__(self, engine: GroupEngine, engine_id: str, key_file: Path, address: str) -> None:
        self.engine, self._engine_id = engine, engine_id
        self._owed: dict[int, set[int]] = {}  # by answer: points that are not sent
        self._stalls = Stalls()
        self._messages: queue.SimpleQueue[Tasks | Complete | None] = queue.SimpleQueue()
        self._loop = _Loop("sagellm-sot-worker")
        try:
            self._connection = self._loop.run(connect(address, read_key(key_file), on_event=self._heard))
            joined = self._loop.run(self._connection.call(Join(engine_id=engine_id), CALL_S, Joined))
            self._loop.start(self._beat())
            engine.connect_peer(joined.engine_id, joined.address)
        except BaseException:
            self.close()
            raise

    def receive_tasks_from_master(self) -> Tasks | Complete | None:
        """Wait for the next message; None once the master has gone."""
        return self._messages.get()

    def send_results_to_master(self, result: WorkerResult) -> None:
        """
        Raises:
            PeerError: the master has gone.
        """
        if result.error or result.branch_id == WHOLE:
            self._owed.pop(result.answer, None)
        elif (owed := self._owed.get(result.answer)) is not None:
            owed.discard(result.branch_id)
        self._loop.run(self._connection.call(result, CALL_S, Taken))

    def close(self) -> None:
        """Leave the group. The engine stays open."""
        if (connection := getattr(self, "_connection", None)) is not None:
            self._loop.run(connection.close())
        self._loop.close()

    def _heard(self, _: ControlConnection, event: Any) -> None:
        if isinstance(event, Tasks):
            self._owed[event.answer] = {each.branch_id for each in event.branches} or {WHOLE}
        else:
            self._owed.pop(event.answer, None)
        self._messages.put(event)

    def _trouble(self) -> str:
        """Return why the engine writes nothing any more; empty if it goes on."""
        try:
            turns = self._stalls.look(any(self._owed.values()), self.engine.progress(), processor_s)
        except EngineError as error:
            return str(error)
        return f"its engine has points to write, and has ended no step for {turns * BEAT_S:g} s" if turns else ""

    async def _beat(self) -> None:
        while not self._connection.is_closed:
            if trouble := self._trouble():
                logger.error("worker %s leaves: %s", self._engine_id, trouble)
                await self._connection.close()
                break
            with contextlib.suppress(PeerError, asyncio.TimeoutError):
                await self._connection.call(Beat(), CALL_S, Taken)
                await within(self._connection.wait_closed(), BEAT_S)
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
        self.run(end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
