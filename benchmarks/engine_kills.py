"""Engines behind a gateway, and now and then their manager, that are killed at random moments under load.

    python -m benchmarks.engine_kills [--kills 500] [--seed 0] [--out FILE]

`sagellm up` runs a manager with engines on the demo model, and clients ask it without pause, half of them for streams. At a
random moment one or two engines get SIGKILL, or, once in ten kills, the manager. While the manager lives, each answer must be
the one of an engine without kills; a stream that has begun may end with an error, after a beginning of that answer. Clients
pause for the death of a manager. Its engines must end with it, and the next one must serve. At the end no process may be left.
"""

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from benchmarks.contestants import summary
from benchmarks.output import Output, spread, table, with_output
from benchmarks.processes import ServerProcess, manager_process, wait_until
from sagellm.demo_model import ensure_demo_model

ENGINES, CLIENTS, TOKENS = 3, 3, 24
PROMPTS = [f"def function_{number}(" for number in range(6)]
CALM_S = 1.5  # at most, from a whole fleet to the next kill
READY_S = 180.0


@click.command()
@click.option("--kills", default=500, show_default=True, help="Processes to kill.")
@click.option("--seed", default=0, show_default=True, help="Seed of moments and processes.")
@with_output
def main(kills: int, seed: int, output: Output) -> None:
    """Kill engines and managers, print what came of it, and write the result."""
    result = sweep(kills, seed, output)
    output.say(table(("", "seen"), [(name, result[name]) for name in COUNTS]))
    if result["back_s"]:
        output.say(f"seconds from a kill to a whole fleet {spread(result['back_s'])}")
    output.finish(result)
    if any(result[name] for name in FAULTS):
        raise click.ClickException("something was lost or wrong, or stayed behind.")


FAULTS = ("wrong", "lost", "left_processes")
COUNTS = ("kills", "managers", "answers", "broken_streams", *FAULTS)


def sweep(kills: int, seed: int, output: Output | None = None, manager_every: int = 10) -> dict[str, Any]:
    """Kill so many processes, every `manager_every`-th time the manager, and return counts."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    back_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as place, contextlib.closing(managed(Path(place))) as manager:
        whole(manager)
        clients = Clients(manager.url, counts)
        with clients.asking():
            next_manager = manager_every
            while counts["kills"] < kills:
                time.sleep(chance.uniform(0.0, CALM_S))
                begun = time.monotonic()
                if counts["kills"] + 1 >= next_manager:
                    next_manager += manager_every
                    clients.pause()
                    counts["left_processes"] += kill_manager(manager)
                    manager.start()
                    whole(manager)
                    clients.go_on()
                    counts["managers"] += 1
                    counts["kills"] += 1
                else:
                    victims = chance.sample(engines_of(manager.url), chance.randint(1, ENGINES - 1))
                    for victim in victims:
                        os.kill(victim["pid"], signal.SIGKILL)
                    whole(manager, victims)
                    counts["kills"] += len(victims)
                back_s.append(time.monotonic() - begun)
                result = {**counts, "seed": seed, "engines": ENGINES, "clients": CLIENTS, "back_s": summary(back_s)}
                if output is not None:
                    output.save(result)
        family = manager.family()
        manager.close()
        counts["left_processes"] += sum(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family)
    return result | counts


class Clients:
    """Threads that ask one question after the other, and compare."""

    def __init__(self, url: str, counts: Counter[str]) -> None:
        self._url, self._counts, self._lock = url, counts, threading.Lock()
        self._runs, self._ends = threading.Event(), threading.Event()
        self._idle = [threading.Event() for _ in range(CLIENTS)]
        self._expected = {prompt: self._ask(prompt, False)[0] for prompt in PROMPTS}

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]
        self.go_on()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            self.go_on()
            for thread in threads:
                thread.join()

    def pause(self) -> None:
        """Let requests end: those of a manager that dies end with it."""
        self._runs.clear()
        for idle in self._idle:
            idle.wait()

    def go_on(self) -> None:
        self._runs.set()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        while not self._ends.is_set():
            if not self._runs.is_set():
                self._idle[number].set()
                self._runs.wait()
                self._idle[number].clear()
                continue
            prompt, stream = chance.choice(PROMPTS), chance.random() < 0.5
            got, error = self._ask(prompt, stream)
            expected = self._expected[prompt]
            with self._lock:
                self._counts["answers"] += 1
                self._counts["broken_streams"] += bool(error and got)
                self._counts["lost"] += bool(error and not got)
                self._counts["wrong"] += not (expected.startswith(got) if error else got == expected)

    def _ask(self, prompt: str, stream: bool) -> tuple[str, str]:
        """Return the text that came, and the error that ended it."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
        got = ""
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=READY_S) as answer:
            if not stream or answer.status_code != 200:
                found = json.loads(answer.read())
                return ("", str(found["error"])) if "error" in found else (found["choices"][0]["text"], "")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return got, str(event["error"])
                    got += "".join(choice["text"] for choice in event["choices"])
        return got, ""


def managed(folder: Path) -> ServerProcess:
    """`sagellm up` with engines on the demo model."""
    engine = {"kind": "sagellm", "model": str(ensure_demo_model()), "model_name": "demo", "device": "cpu", "threads": 1,
              "kv_blocks": 128, "dtype": "float32"}  # fmt: skip
    engines = {f"e{number}": engine for number in range(ENGINES)}
    return manager_process(folder, engines, check_interval_s=0.2, router="round-robin")


def engines_of(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/control/engines", timeout=30).json()["engines"]


def whole(manager: ServerProcess, killed: Sequence[dict[str, Any]] = ()) -> None:
    """Wait until all engines serve, those that were killed as new processes."""

    def is_whole() -> bool:
        manager.check()
        if "\n" not in manager.stdout:
            return False
        manager.family()
        found = {one["name"]: one for one in engines_of(manager.url)}
        if any(found[one["name"]]["pid"] == one["pid"] for one in killed):
            return False
        return len(found) == ENGINES and all(one["state"] == "ready" for one in found.values())

    wait_until("a whole fleet", is_whole, READY_S)


def kill_manager(manager: ServerProcess) -> int:
    """Return how many processes below it did not end with it."""
    family = [each for each in manager.family() if each.pid != manager.process.pid]
    manager.process.kill()
    manager.process.wait()
    return len(psutil.wait_procs(family, timeout=20)[1])


if __name__ == "__main__":
    main()
