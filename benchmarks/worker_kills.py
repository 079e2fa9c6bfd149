"""Tensor-parallel workers that are killed at random moments, from the start of an engine to its end.

    python -m benchmarks.worker_kills [--server] [--kills 200] [--seed 0] [--out FILE]

Each round builds an engine of the demo model with two workers and asks it several times. A thread kills one worker by SIGKILL
at a random moment. Every call must answer as an engine without kills does, or raise `EngineError`; the engine must close, and
leave no process and no shared memory. With `--server` the workers are those of a server, see `served_kills`.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import served_kills
from benchmarks.contestants import summary
from benchmarks.output import Output, spread, table, with_output
from benchmarks.processes import workers_below
from sagellm.core.config import SageConfig
from sagellm.core.errors import EngineError
from sagellm.demo_model import ensure_demo_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.worker_processes import load_early

HANGS_S = 60.0  # a round that takes longer counts as hanging, and ends the run
CALLS, TOKENS = 6, 60
PROMPTS = [[1, 5, 9, 13], [2, 4, 8], [3, 7, 11, 15, 19]]


@click.command()
@click.option("--kills", default=200, show_default=True, help="Rounds, each with a kill.")
@click.option("--seed", default=0, show_default=True, help="Seed of moments and workers.")
@click.option("--server", is_flag=True, help="Kill workers of a server that starts them again.")
@with_output
def main(kills: int, seed: int, server: bool, output: Output) -> None:
    """Kill workers, print what came of it, and write the result."""
    if server:
        return of_server(kills, seed, output)
    load_early(keep=True)  # else most moments would lie in the time that libraries are loaded
    chance = random.Random(seed)
    expected, whole_s = undisturbed()
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    error_s, close_s = [], []
    for number in range(kills):
        with limited():
            found = run_round(expected, chance.uniform(0, whole_s), chance.randrange(2))
        outcomes[found["outcome"]] += 1
        faults += [f"round {number}: {fault}" for fault in found["faults"]]
        close_s.append(found["close_s"])
        if "error_s" in found:
            error_s.append(found["error_s"])
        result = {
            "kills": number + 1, "seed": seed, "outcomes": dict(outcomes), "faults": faults,
            "kill_to_error_s": summary(error_s) if error_s else {}, "longest_to_error_s": max(error_s, default=0.0),
            "close_s": summary(close_s), "longest_close_s": max(close_s),
        }  # fmt: skip
        output.save(result)
    rows = [(name, count) for name, count in sorted(outcomes.items())]
    output.say(table(["what the caller saw", "rounds"], rows))
    if error_s:
        output.say(f"from the kill to the error {spread(result['kill_to_error_s'])} s, at most {max(error_s):.2f} s")
    output.say(f"close {spread(result['close_s'])} s, at most {max(close_s):.2f} s; faults: {faults or 'none'}")
    output.finish(result)
    if faults:
        raise click.ClickException(f"{len(faults)} rounds went wrong.")


def of_server(kills: int, seed: int, output: Output) -> None:
    result = served_kills.sweep(kills, seed, output)
    output.say(table(("", "seen"), [(name, result[name]) for name in served_kills.COUNTS]))
    if result["kill_to_error_s"]:
        longest_s = result["longest_to_error_s"]
        output.say(f"from the kill to the error {spread(result['kill_to_error_s'])} s, at most {longest_s:.2f} s")
    output.say(f"from the kill to the next answer {spread(result['back_s'])} s")
    output.finish(result)
    if any(result[name] for name in served_kills.FAULTS):
        raise click.ClickException("something was lost, wrong or late, or stayed behind.")


def build() -> Any:
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    config = SageConfig(model=ensure_demo_model(), device="cpu", dtype="float32", tensor_parallel=2, threads=1, kv_blocks=64)
    return LMDeployEngine(config)


def ask(engine: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    return [one.token_ids for one in engine.generate(PROMPTS, params)]


def undisturbed() -> tuple[list[tuple[int, ...]], float]:
    """Return the answers without kills, and how long a round takes, in seconds."""
    build().close()  # files are read, and libraries compiled
    start = time.monotonic()
    with build() as engine:
        answers = [ask(engine) for _ in range(CALLS)]
    if any(each != answers[0] for each in answers):
        raise click.ClickException("an engine without kills answers differently each time.")
    return answers[0], time.monotonic() - start


class Killer(threading.Thread):
    """Kills a worker of this process after a time, or as soon as it is there."""

    def __init__(self, after_s: float, number: int) -> None:
        super().__init__(daemon=True)
        self._after_s, self._number = after_s, number
        self.killed_at = float("inf")
        self.is_over = False
        self.start()

    def run(self) -> None:
        time.sleep(self._after_s)
        while not self.is_over:
            workers = sorted(workers_of_this(), key=lambda each: each.pid)
            if len(workers) == 2:
                with contextlib.suppress(psutil.NoSuchProcess):
                    workers[self._number].send_signal(signal.SIGKILL)
                    self.killed_at = time.monotonic()
                return
            time.sleep(0.002)


def run_round(expected: list[tuple[int, ...]], after_s: float, number: int) -> dict[str, Any]:
    shared = shared_memory()
    killer = Killer(after_s, number)
    found: dict[str, Any] = {"outcome": "all answers", "faults": []}
    engine = None
    try:
        engine = build()
        for _ in range(CALLS):
            if ask(engine) != expected:
                found["faults"].append("a wrong answer")
    except EngineError:
        found["outcome"] = "an error while the engine was built" if engine is None else "an error of a request"
        found["error_s"] = time.monotonic() - killer.killed_at
    except Exception as error:
        found["faults"].append(f"{type(error).__name__}: {error}")
    start = time.monotonic()
    if engine is not None:
        engine.close()
    found["close_s"] = time.monotonic() - start
    killer.is_over = True
    killer.join()
    if left := workers_of_this():
        found["faults"].append(f"{len(left)} processes are left")
    del engine
    if left := {name for name in shared_memory() - shared if not is_in_use(name)}:
        found["faults"].append(f"shared memory is left: {sorted(left)}")
    return found


def workers_of_this() -> list[psutil.Process]:
    return workers_below(psutil.Process())


def shared_memory() -> set[str]:
    """Names of blocks of shared memory that Python made; semaphores go with their last process."""
    return {file.name for file in Path("/dev/shm").glob("psm_*")}


def is_in_use(name: str) -> bool:
    """Whether another process has the memory open: it is then one of a program that runs beside this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(name in each.path for each in process.memory_maps()):
                return True
    return False


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """End this process if the block takes too long: what hangs does not answer an exception."""

    def end(*_: Any) -> None:
        click.echo(f"error: a round took more than {HANGS_S:g} s", err=True)
        os._exit(1)

    former = signal.signal(signal.SIGALRM, end)
    signal.alarm(int(HANGS_S))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


if __name__ == "__main__":
    main()
