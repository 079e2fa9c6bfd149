"""The comparison with memcmp, which only C++ can make: `sagellm/csrc/bench/prefix_index_bench.cpp` on this workload."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.prefix.workload import DOCUMENTS_EACH, PrefixWorkload


def run_native(program: Path, workload: PrefixWorkload, rounds: int) -> dict[str, Any]:
    """Return the program's output, lists with one value a round. Raises BenchmarkError with its last words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload"
        with path.open("wb") as file:
            write_workload(workload, file)
        try:
            done = subprocess.run([str(program), str(path), str(rounds)], capture_output=True, text=True)
        except OSError as error:
            raise BenchmarkError(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BenchmarkError(f"{program} ended with code {done.returncode}: {words[0]}")
    return json.loads(done.stdout)


def write_workload(workload: PrefixWorkload, file: BinaryIO) -> None:
    """As `prefix_index_bench.cpp` reads it: the parts once, so that 100,000 sequences are no gigabytes."""

    def write(*values: int) -> None:
        file.write(np.array(values, np.int32).tobytes())

    def write_text(text: np.ndarray) -> None:
        write(len(text))
        file.write(text.tobytes())

    write(workload.block_size, len(workload.systems))
    for text in workload.systems:
        write_text(text)
    write(len(workload.documents))
    for pair, text in enumerate(workload.documents):
        write(pair // DOCUMENTS_EACH)
        write_text(text)
    write(workload.num_sequences)
    for number in range(workload.num_sequences):
        write(workload.pair(number))
        write_text(workload.tail(number))
    write(workload.num_lookups)
    for number in range(workload.num_lookups):
        write(workload.lookup_pair(number))
        write_text(workload.lookup_tail(number))
