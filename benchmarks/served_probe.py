"""Counters inside the processes of a server, the same whatever patches its LMDeploy has: prefix hits, steps, exchanges.

Python imports a `sitecustomize` that it finds on its path when it starts. `environment` writes one that wraps a method of
LMDeploy's prefix cache and one of the CPU device's steps, as soon as their modules are imported. Each process counts in a
file of its own, which `read` may read at any time.
"""

import functools
import importlib.abc
import importlib.util
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Counts(NamedTuple):
    """Tokens that were looked up in the prefix cache, and found there; seconds in steps, and those of them in exchanges."""

    asked: float = 0.0
    found: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(one - before for one, before in zip(self, other, strict=True)))


def environment(folder: Path, *path: Path) -> dict[str, str]:
    """Return variables for a server whose processes count in `folder`. `path`: folders that its Python searches first."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(f"from benchmarks import served_probe\nserved_probe.install({str(folder)!r})\n")
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, *path, ROOT)))}


def read(folder: Path) -> dict[str, Counts]:
    """Return what each process has counted, by its id."""
    return {file.stem: Counts(*memoryview(file.read_bytes()).cast("d")) for file in folder.glob("*.counts")}


def install(folder: str) -> None:
    """Count in this process and those that it starts."""
    counter = _Counter(Path(folder))
    changes = {"lmdeploy.pytorch.paging.block_trie": _watch_prefixes, "sagellm._core": _watch_steps}
    sys.meta_path.insert(0, _Watch({name: functools.partial(change, counter) for name, change in changes.items()}))


class _Watch(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that is imported."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._changes = dict(changes)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self._changes.pop(name, None)
        spec = None if change is None else importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Counter:
    def __init__(self, folder: Path) -> None:
        self._folder, self._pid, self._numbers = folder, 0, None

    def add(self, **values: float) -> None:
        if self._pid != os.getpid():  # a fork counts for itself
            self._pid = os.getpid()
            file = self._folder / f"{self._pid}.counts"
            file.write_bytes(bytes(8 * len(Counts._fields)))
            with file.open("r+b") as opened:
                self._numbers = memoryview(mmap.mmap(opened.fileno(), 0)).cast("d")
        for name, value in values.items():
            self._numbers[Counts._fields.index(name)] += value


def _watch_prefixes(counter: _Counter, module: Any) -> None:
    match = module.BlockTrie.match

    @functools.wraps(match)
    def counted(self: Any, seq: Any) -> None:
        before = seq.num_history_ids
        match(self, seq)
        counter.add(asked=seq.num_history_ids + seq.num_token_ids - before, found=seq.num_history_ids - before)

    module.BlockTrie.match = counted


def _watch_steps(counter: _Counter, module: Any) -> None:
    run = module.CpuDecoder.run

    @functools.wraps(run)
    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = run(*args)
        counter.add(step_s=time.perf_counter() - start, exchange_s=result[-1])
        return result

    module.CpuDecoder.run = timed
