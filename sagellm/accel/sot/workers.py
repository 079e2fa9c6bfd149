"""A master and its workers on one machine, each worker a process of its own.

`python -m sagellm.accel.sot.workers ADDRESS KEY_FILE CONFIG NAME PIPELINE` is such a process. It ends with its connection.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from sagellm.accel.sot.group import Master, Worker, group_hooks
from sagellm.comm_backend.control import new_key
from sagellm.core.config import SageConfig
from sagellm.core.engines import GroupEngine, open_engine
from sagellm.core.errors import ConfigError, PeerError

__all__ = ["KEY", "MASTER", "open_group", "share_cores", "start_workers", "write_key"]

START_S = 120.0
END_S = 10.0
MAX_WORKERS = 64
MASTER = "sot://master"  # id of the engine that plans
KEY = "sot-key"  # file
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
            with start_workers(engine.group_address, key_file, config, num_workers, pipeline) as (master, processes):
                yield engine, master, processes
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


@contextlib.contextmanager
def start_workers(
    group_address: str, key_file: Path, config: SageConfig, num_workers: int, pipeline: str = PIPELINE
) -> Iterator[tuple[Master, Processes]]:
    """Start workers for an engine that was opened with `group_hooks(MASTER, key_file)`, and end them after the context.

    Args:
        group_address: of that engine.

    Raises:
        PeerError: a worker did not start.
    """
    processes: Processes = []
    master = Master(group_address, MASTER, key_file)
    try:
        for number in range(num_workers):
            words = (master.address, str(key_file), config.model_dump_json(), f"sot://worker-{number}", pipeline)
            # Standard output is the caller's.
            processes.append(subprocess.Popen([sys.executable, "-m", __name__, *words], stdout=2))
        master.wait_for_workers(num_workers, START_S, lambda: _check(processes))
        yield master, processes
    finally:
        master.close()
        _end(processes)


def work(address: str, key_file: Path, config: SageConfig, engine_id: str, pipeline: str = PIPELINE) -> None:
    """Be a worker until the master has gone."""
    from transformers import AutoTokenizer

    from sagellm.models import find_model, prepare_model

    module, _, name = pipeline.partition(":")
    make = getattr(import_module(module), name)
    engine = open_engine(config, group_hooks(engine_id, key_file))
    try:
        worker = Worker(engine, engine_id, key_file, address)
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


def _end(processes: Processes) -> None:
    """Wait for workers that end by themselves, once the master has gone."""
    end_s = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    _address, _key, _config, _name, _pipeline = sys.argv[1:]
    work(_address, Path(_key), SageConfig.model_validate_json(_config), _name, _pipeline)
