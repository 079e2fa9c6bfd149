"""Sweeps lookaheads and batch sizes on a real engine."""

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.speculative.planning.probe import WARM_UP, ProbeStrategy
from sagellm.accel.speculative.planning.table import LatencyTable
from sagellm.core.errors import SpeculationError
from sagellm.core.packages import version_of

__all__ = ["PROBE", "machine_facts", "profile", "tokens_needed"]

PROBE = f"{ProbeStrategy.__module__}:{ProbeStrategy.__qualname__}"
TRIES = 4
SPARE_STEPS = 4  # for those that begin late
PACKAGES = ("sagellm", "lmdeploy", "torch", "numpy")


def profile(
    generate: Callable[[list[list[int]], int], Any], report: Callable[[], dict[str, Any]], *, batches: Sequence[int],
    lookaheads: Sequence[int], vocab_size: int, steps: int = 12, context: int = 256, facts: dict[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LatencyTable:  # fmt: skip
    """Measures a table on an engine whose speculative strategy is `PROBE` with these lookaheads.

    Args:
        generate: lets the engine answer (prompts, tokens for each), all prompts at once and each to its full length.
        report: what the strategy reports.
        batches: sequences in a step. `lookaheads`: guesses of each; 0 is always measured, too.
        steps: of each kind that are to count, at least.
        context: tokens of each prompt.
        progress: called with a text on what is measured next.

    Raises:
        SpeculationError: the engine did not make such steps: no room for so many sequences, or for their guesses.
    """
    axis = tuple(sorted({0, *lookaheads}))
    wanted = tuple(sorted(set(batches)))
    random = np.random.default_rng(0)
    for batch in wanted:
        for _ in range(TRIES):
            if progress is not None:
                progress(f"{batch} sequences")
            prompts = random.integers(0, vocab_size, (batch, context)).tolist()
            generate(prompts, tokens_needed(axis, steps))
            counts = {lookahead: count for size, lookahead, count, _ in report()["steps"] if size == batch}
            if all(counts.get(lookahead, 0) >= steps for lookahead in axis):
                break
    found = {(batch, lookahead): (count, seconds) for batch, lookahead, count, seconds in report()["steps"]}
    for batch in wanted:
        for lookahead in axis:
            if (batch, lookahead) not in found:
                raise SpeculationError(
                    f"no step of {batch} sequences with {lookahead} guesses each was made; give the engine more KV blocks "
                    "or threads, or profile fewer sequences and shorter lookaheads."
                )
    return LatencyTable(
        wanted, axis,
        tuple(tuple(found[batch, lookahead][1] for lookahead in axis) for batch in wanted),
        tuple(tuple(found[batch, lookahead][0] for lookahead in axis) for batch in wanted),
        report()["context"], dict(facts or {}),
    )  # fmt: skip


def tokens_needed(lookaheads: Sequence[int], steps: int) -> int:
    """Tokens that an answer must have for `steps` steps of each kind that count."""
    return len({0, *lookaheads}) * (steps + WARM_UP + SPARE_STEPS) + max(lookaheads)


def machine_facts() -> dict[str, Any]:
    """Processor, cores, versions, and the commit of this checkout."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0] if names else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {name: version_of(name) for name in PACKAGES}
    load = os.getloadavg()[0]
    return {"processor": processor, "cores": cores, "load_at_start": load, "versions": versions, "commit": _commit()}


def _commit() -> str | None:
    """None: this is no checkout, or there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
