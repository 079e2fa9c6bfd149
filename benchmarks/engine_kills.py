"""Engines behind a gateway, nodes that they run on, and their manager, which are killed at random moments under load.

    python -m benchmarks.engine_kills [--kills 500] [--nodes 0] [--seed 0] [--out FILE]

`sagellm up` runs a manager with engines on the demo model, and clients ask it without pause, half of them for streams. At a
random moment ready engines get SIGKILL, all but one at most; others may be starting. Once in ten kills it is the manager. With
`--nodes` the engines run on so many nodes of a Ray cluster, and once in five kills a node is lost, with all of its processes.

While the manager lives, each answer must be the one of an engine without kills; a stream that has begun may end with an error,
after a beginning of that answer. Clients pause for the death of a manager. Its engines must end with it, and the next one must
serve. At the end no process may be left.
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
from benchmarks.processes import manager_process, wait_until
from benchmarks.ray_nodes import HEAD, nodes, number_of
from sagellm.demo_model import ensure_demo_model

ENGINES, CLIENTS, TOKENS = 3, 3, 24
PROMPTS = [f"def function_{number}(" for number in range(6)]
CALM_S = 1.5  # at most, from the time that two engines are ready to the next kill
READY_S, END_S, POLL_S = 180.0, 20.0, 0.1


@click.command()
@click.option("--kills", default=500, show_default=True, help="Engines, nodes and managers to kill.")
@click.option("--nodes", "num_nodes", default=0, show_default=True, help="Nodes of a Ray cluster; 0: engines are processes.")
@click.option("--seed", default=0, show_default=True, help="Seed of moments and victims.")
@with_output
def main(kills: int, num_nodes: int, seed: int, output: Output) -> None:
    """Kill engines, nodes and managers, print what came of it, and write the result."""
    result = sweep(kills, seed, output, num_nodes=num_nodes)
    output.say(table(("", "seen"), [(name, result[name]) for name in COUNTS]))
    if result["back_s"]:
        output.say(f"seconds from a kill to the engine's return {spread(result['back_s'])}")
    output.finish(result)
    if any(result[name] for name in FAULTS):
        raise click.ClickException("something was lost or wrong, or stayed behind.")


FAULTS = ("wrong", "lost", "left_processes")
COUNTS = ("kills", "managers", "nodes", "answers", "broken_streams", *FAULTS)


def sweep(
    kills: int, seed: int, output: Output | None = None, manager_every: int = 10, num_nodes: int = 0, node_every: int = 5
) -> dict[str, Any]:
    """Kill so many processes, every `manager_every`-th time the manager, and return counts."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    about = {"seed": seed, "engines": ENGINES, "clients": CLIENTS, "cluster_nodes": num_nodes}
    next_manager, next_node = manager_every, node_every if num_nodes else kills + 1
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(nodes(1 + num_nodes)) if num_nodes else None
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        fleet = stack.enter_context(contextlib.closing(Fleet(place, None if cluster is None else cluster.address)))
        fleet.ready(ENGINES)
        clients = Clients(fleet.manager.url, counts)
        with clients.asking():
            while counts["kills"] < kills:
                ready = fleet.ready(2)
                time.sleep(chance.uniform(0.0, CALM_S))
                placed = [one for one in ready if one["node"] not in (None, HEAD)]
                if counts["kills"] + 1 >= next_manager:
                    next_manager += manager_every
                    clients.pause()
                    counts["left_processes"] += fleet.restart()
                    clients.go_on()
                    counts["managers"] += 1
                    counts["kills"] += 1
                elif cluster is not None and placed and counts["kills"] + 1 >= next_node:
                    next_node += node_every
                    victim = chance.choice(placed)
                    fleet.note_killed([victim])
                    cluster.kill(number_of(victim["node"]))
                    cluster.add()
                    counts["nodes"] += 1
                    counts["kills"] += 1
                else:
                    victims = chance.sample(ready, chance.randint(1, len(ready) - 1))
                    fleet.note_killed(victims)
                    for victim in victims:
                        os.kill(victim["pid"], signal.SIGKILL)
                    counts["kills"] += len(victims)
                if output is not None:
                    output.save({**counts, **about} | fleet.report())
        fleet.ready(ENGINES)
        counts["left_processes"] += fleet.end()
    return {**counts, **about} | fleet.report()


class Fleet:
    """A manager with its engines, on a Ray cluster if it has an address."""

    def __init__(self, folder: Path, ray_address: str | None) -> None:
        engine = {"kind": "sagellm", "model": str(ensure_demo_model()), "model_name": "demo", "device": "cpu", "threads": 1,
                  "kv_blocks": 128, "dtype": "float32"}  # fmt: skip
        settings: dict[str, Any] = {"check_interval_s": 0.2, "router": "round-robin"}
        if ray_address is not None:
            settings["ray_address"] = ray_address
            engine["resources"] = {"CPU": 1}
        self._back_s: list[float] = []  # seconds from each kill of an engine to its return
        self._http = httpx.Client(timeout=30)
        self._killed: dict[str, tuple[int, float]] = {}
        self._seen: dict[int, psutil.Process] = {}
        self.manager = manager_process(folder, {f"e{number}": engine for number in range(ENGINES)}, **settings)

    def ready(self, least: int) -> list[dict[str, Any]]:
        """Wait until so many engines are ready, and return their states."""
        return wait_until(f"{least} engines", lambda: self._ready(least), READY_S, POLL_S)

    def note_killed(self, engines: Sequence[dict[str, Any]]) -> None:
        self._killed |= {one["name"]: (one["pid"], time.monotonic()) for one in engines}

    def restart(self) -> int:
        """Kill the manager and start another one. Return how many processes did not end with the first."""
        family = self._processes()
        self.manager.process.kill()
        self.manager.process.wait()
        num_left = _left(family)
        self._killed.clear()
        self.manager.start()
        self.ready(ENGINES)
        return num_left

    def end(self) -> int:
        """End the manager in order. Return how many processes did not end with it."""
        family = self._processes()
        self.close()
        return _left(family)

    def close(self) -> None:
        self._http.close()
        self.manager.close()

    def report(self) -> dict[str, Any]:
        return {"back_s": summary(self._back_s) if self._back_s else None}

    def _ready(self, least: int) -> list[dict[str, Any]]:
        self.manager.check()
        if "\n" not in self.manager.stdout:
            return []
        found = self._http.get(f"{self.manager.url}/control/engines").json()["engines"]
        ready = [one for one in found if one["state"] == "ready" and one["pid"] != self._killed.get(one["name"], (0,))[0]]
        for one in ready:
            if one["name"] in self._killed:
                self._back_s.append(time.monotonic() - self._killed.pop(one["name"])[1])
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.setdefault(one["pid"], psutil.Process(one["pid"]))
        return ready if len(ready) >= least else []

    def _processes(self) -> list[psutil.Process]:
        """Processes of the engines, wherever they run, and those below the manager."""
        top = self.manager.process.pid
        family = [each for each in self.manager.family() if each.pid != top]
        return [*{each.pid: each for each in (*self._seen.values(), *family) if each.is_running()}.values()]


def _left(processes: list[psutil.Process]) -> int:
    """Wait for the end of processes, and return how many go on."""
    num_left = 0
    for each in psutil.wait_procs(processes, timeout=END_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            num_left += each.status() != psutil.STATUS_ZOMBIE  # its parent has been killed, too
    return num_left


class Clients:
    """Threads that ask one question after the other, and compare."""

    def __init__(self, url: str, counts: Counter[str]) -> None:
        self._url, self._counts, self._lock = url, counts, threading.Lock()
        self._http = httpx.Client(timeout=READY_S)  # a new one takes 30 ms of a processor
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
            self._http.close()

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
        with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
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


if __name__ == "__main__":
    main()
