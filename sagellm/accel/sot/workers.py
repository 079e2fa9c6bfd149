"""A master and its workers on one machine, each worker a process of its own.

`python -m sagellm.accel.sot.workers ADDRESS KEY_FILE CONFIG NAME PIPELINE` is such a process. It ends with its connection.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import psutil

from sagellm.accel.sot.group import Master, Worker, group_hooks
from sagellm.accel.sot.skeleton import plan_patterns
from sagellm.comm_backend.control import new_key
from sagellm.core.config import SageConfig
from sagellm.core.engines import GroupEngine, open_engine
from sagellm.core.errors import ConfigError, EngineError, PeerError

__all__ = ["KEY", "MASTER", "Workers", "open_group", "share_cores", "start_workers", "write_key"]

logger = logging.getLogger("sagellm")

START_S = 300.0  # on a busy machine
END_S = 10.0
LOOK_S = 0.5  # how often lost workers are looked for
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a lost worker is started again; doubled each time
STEADY_S = 300.0  # a worker that has lived so long is started again after the first pause
MAX_WORKERS = 64
MASTER = "sot://master"  # id of the engine that plans
KEY = "sot-key"  # file
SHARED_MEMORY = "/dev/shm/psm_"  # blocks that Python makes; keys and values travel through memory without a name
Processes = list["subprocess.Popen[bytes]"]
Group = tuple[GroupEngine, Master, Processes]
PIPELINE = "sagellm.accel.sot.pipeline:SpecSoT"


@contextlib.contextmanager
def open_group(config: SageConfig, num_workers: int, pipeline: str = PIPELINE) -> Iterator[Group]:
    """Open an engine in this process and one in each worker's: the master's engine, the master, and the processes.

    Args:
        config: of every engine. Without `threads` they share the cores.
        pipeline: `module:Class` of the workers' `SpecSoT`, called with an engine and a tokenizer.

    Raises:
        ConfigError: the number of workers is out of range.
        PeerError: a worker did not start.
    """
    if not 1 <= num_workers <= MAX_WORKERS:
        raise ConfigError(f"workers is {num_workers}; allowed are 1 to {MAX_WORKERS}.")
    config = share_cores(config, num_workers)
    with tempfile.TemporaryDirectory(prefix="sagellm-sot-") as folder:
        key_file = write_key(Path(folder))
        engine = open_engine(config, group_hooks(MASTER, key_file))
        try:
            with start_workers(engine.group_address, key_file, config, num_workers, pipeline) as workers:
                yield engine, workers.master, workers.processes
        finally:
            engine.close()


def share_cores(config: SageConfig, num_workers: int) -> SageConfig:
    """Return settings of one of so many engines and one more: without `threads` each gets as many cores."""
    share = max(1, len(os.sched_getaffinity(0)) // ((1 + num_workers) * config.tensor_parallel))
    return config.model_copy(update={"threads": config.threads or share})


def write_key(folder: Path) -> Path:
    """Write a new key of a group, and return its file."""
    key_file = folder / KEY
    key_file.touch(0o600)
    key_file.write_bytes(new_key())
    return key_file


class _Slot:
    """Place of a worker: its process, or the pause before its next one."""

    def __init__(self, number: int) -> None:
        self.number, self.num_starts = number, 0
        self.process: subprocess.Popen[bytes] | None = None
        self.family: list[psutil.Process] = []  # below its process
        self.memory: list[Path] = []  # shared among them, by name: it outlives a process that is killed
        self.has_joined = False
        self.since_s = self.due_s = 0.0  # start of its process; end of the pause
        self.pause_s = FIRST_PAUSE_S

    @property
    def engine_id(self) -> str:
        """A new one with each start: the engines of the group may not know yet that the last one has gone."""
        return f"sot://worker-{self.number}" + (f".{self.num_starts}" if self.num_starts > 1 else "")


class Workers:
    """Processes of workers on this machine, and their master.

    Args:
        group_address: of the master's engine, which was opened with `group_hooks(MASTER, key_file)`.
        config, pipeline: of each worker.

    Attributes:
        num_lost: workers that had joined and are gone.
        num_restarted: processes that were started in place of others.
    """

    def __init__(self, group_address: str, key_file: Path, config: SageConfig, count: int, pipeline: str) -> None:
        self.master = Master(group_address, MASTER, key_file)
        self._key_file, self._config, self._pipeline = key_file, config, pipeline
        self._slots = [_Slot(number) for number in range(count)]
        self.num_lost = self.num_restarted = 0
        self._over, self._keeper = threading.Event(), threading.Thread(target=self._keep, name="sagellm-sot-workers")

    @property
    def processes(self) -> Processes:
        return [slot.process for slot in self._slots if slot.process is not None]

    def start(self) -> None:
        """Start all workers, and wait until they have joined.

        Raises:
            PeerError: one did not start.
        """
        for slot in self._slots:
            self._start(slot)
        self.master.wait_for_workers(len(self._slots), START_S, lambda: _check(self.processes))
        for slot in self._slots:
            self._joined(slot)

    def keep(self) -> None:
        """From now on start each worker again that is lost, on a thread. The pause before a start grows."""
        self._keeper.start()

    def close(self) -> None:
        """End the connections, then the processes."""
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.master.close()
        end_s = time.monotonic() + END_S
        for slot in self._slots:
            if slot.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # they end by themselves, once the master has gone
                    slot.process.wait(max(0.1, end_s - time.monotonic()))
                self._kill(slot)

    def _start(self, slot: _Slot) -> None:
        slot.num_starts += 1
        slot.since_s, slot.has_joined, slot.family = time.monotonic(), False, []
        slot.memory = []
        folder = self._folder(slot)  # of its temporary files, which would stay where it is killed
        folder.mkdir(exist_ok=True)
        words = (self.master.address, str(self._key_file), self._config.model_dump_json(), slot.engine_id, self._pipeline)
        # Standard output is the caller's.
        command = [sys.executable, "-m", __name__, *words]
        slot.process = subprocess.Popen(command, stdout=2, env=os.environ | {"TMPDIR": str(folder)})

    def _folder(self, slot: _Slot) -> Path:
        return self._key_file.parent / f"w{slot.number}"

    def _joined(self, slot: _Slot) -> None:
        slot.has_joined = True
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(slot.process.pid)
            slot.family = process.children(recursive=True)
            slot.memory = [Path(each.path) for each in process.memory_maps() if each.path.startswith(SHARED_MEMORY)]

    def _keep(self) -> None:
        # Processes inherit it: Ctrl-C of a terminal is for the server alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while not self._over.wait(LOOK_S):
            living = self.master.engine_ids
            for slot in self._slots:
                self._look_at(slot, slot.engine_id in living)

    def _look_at(self, slot: _Slot, is_there: bool) -> None:
        now_s = time.monotonic()
        if slot.process is None:
            if now_s >= slot.due_s:
                self._start_again(slot, now_s)
        elif is_there and not slot.has_joined:
            self._joined(slot)
            logger.warning("worker %s has joined in place of a lost one", slot.engine_id)
        elif slot.has_joined and not is_there:
            self._lost(slot, now_s, "is lost")
        elif not slot.has_joined and (slot.process.poll() is not None or now_s - slot.since_s > START_S):
            self._lost(slot, now_s, "did not start")

    def _start_again(self, slot: _Slot, now_s: float) -> None:
        try:
            self._start(slot)
            self.num_restarted += 1
        except OSError as error:  # no memory, or too many processes
            self._pause(slot, now_s, f"cannot be started: {error}")

    def _lost(self, slot: _Slot, now_s: float, what: str) -> None:
        self.num_lost += slot.has_joined
        if slot.has_joined and now_s - slot.since_s > STEADY_S:
            slot.pause_s = FIRST_PAUSE_S
        self._kill(slot)
        self._pause(slot, now_s, what)

    def _kill(self, slot: _Slot) -> None:
        """End what is left of a worker. Python's resource tracker ends by itself, once it has removed what the others leave."""
        slot.process.kill()
        for each in slot.family:
            with contextlib.suppress(psutil.Error):
                if not any("multiprocessing.resource_tracker" in word for word in each.cmdline()):
                    each.kill()
        slot.process.wait()
        psutil.wait_procs(slot.family, timeout=END_S)
        for file in slot.memory:
            file.unlink(missing_ok=True)
        shutil.rmtree(self._folder(slot), ignore_errors=True)

    def _pause(self, slot: _Slot, now_s: float, what: str) -> None:
        logger.warning("worker %s %s, and is started again in %g s", slot.engine_id, what, slot.pause_s)
        slot.process, slot.has_joined, slot.due_s = None, False, now_s + slot.pause_s
        slot.pause_s = min(2 * slot.pause_s, LONGEST_PAUSE_S)


@contextlib.contextmanager
def start_workers(
    group_address: str, key_file: Path, config: SageConfig, num_workers: int, pipeline: str = PIPELINE
) -> Iterator[Workers]:
    """Start workers for an engine that was opened with `group_hooks(MASTER, key_file)`, and end them after the context.

    Args:
        group_address: of that engine.

    Raises:
        PeerError: a worker did not start.
    """
    workers = Workers(group_address, key_file, config, num_workers, pipeline)
    try:
        workers.start()
        yield workers
    finally:
        workers.close()


def work(address: str, key_file: Path, config: SageConfig, engine_id: str, pipeline: str = PIPELINE) -> None:
    """Be a worker until the master has gone."""
    from transformers import AutoTokenizer

    from sagellm.models import find_model, prepare_model

    module, _, name = pipeline.partition(":")
    make = getattr(import_module(module), name)
    engine = open_engine(config, group_hooks(engine_id, key_file))
    try:
        worker = Worker(engine, engine_id, key_file, address)
        with contextlib.suppress(EngineError):  # its first whole answer begins with a plan
            engine.hooks.grammars.compile_ahead(plan_patterns())
        tokenizer = AutoTokenizer.from_pretrained(prepare_model(find_model(config.model)))
        try:
            make(engine, tokenizer).worker_pipeline(worker)
        finally:
            worker.close()
    finally:
        engine.close()


def _check(processes: Processes) -> None:
    ended = [process.returncode for process in processes if process.poll() is not None]
    if ended:
        raise PeerError(f"a worker ended at its start with exit code {ended[0]}; its log is above.")


if __name__ == "__main__":
    _address, _key, _config, _name, _pipeline = sys.argv[1:]
    work(_address, Path(_key), SageConfig.model_validate_json(_config), _name, _pipeline)
