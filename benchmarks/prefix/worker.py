"""The process of one contestant: builds it and does what it is told.

    PYTHON -m benchmarks.prefix.worker '{"contestant": NAME, "seed": 0, "block_size": 16, ...}'

Runs in the environment of the peer, so it needs NumPy, the peer and nothing else. Only the methods that `Contestant` calls
timed are timed.
"""

import hashlib
import sys
from typing import Any

import numpy as np

from benchmarks.peers.worker import answer_requests
from benchmarks.prefix.contestants import build
from benchmarks.prefix.contestants.base import CHUNK
from benchmarks.prefix.workload import PrefixWorkload
from benchmarks.process_cost import Spent, resident_bytes, spent


class Worker:
    """A contestant and its workload. The public methods are the requests, to be made in this order."""

    def __init__(self, contestant: str, **workload: int) -> None:
        self._workload = PrefixWorkload(**workload)
        self._contestant = build(contestant, self._workload.block_size, self._workload.num_blocks)
        self._queries: list[Any] = []
        self._num_inserted = 0
        # The allocators have grown by what preparing takes before the memory at rest is taken.
        self._contestant.reset(self._prepared(0, min(CHUNK, self._workload.num_sequences))[0])
        self._resident_bytes = resident_bytes()

    def about(self) -> dict[str, Any]:
        """`workload` is a digest of the lookups: all contestants must have the same."""
        contestant, workload = self._contestant, self._workload
        lookups = b"".join(workload.lookup(number).tobytes() for number in range(workload.num_lookups))
        return {
            "version": contestant.version,
            "python": sys.version.split()[0],
            "parts": contestant.parts,
            "note": contestant.note,
            "workload": hashlib.sha256(lookups).hexdigest(),
        }

    def insert(self, rounds: int) -> dict[str, int]:
        """The next of `rounds` equal shares of the sequences; tokens are those of full blocks."""
        stop = min(self._num_inserted + -(-self._workload.num_sequences // rounds), self._workload.num_sequences)
        cpu_ns = wall_ns = num_tokens = 0
        for start in range(self._num_inserted, stop, CHUNK):
            prepared, tokens = self._prepared(start, min(start + CHUNK, stop))
            taken = spent(lambda prepared=prepared: self._contestant.insert(prepared))
            self._contestant.reset(prepared)
            cpu_ns, wall_ns, num_tokens = cpu_ns + taken.cpu_ns, wall_ns + taken.wall_ns, num_tokens + tokens
        self._num_inserted = stop
        return {"cpu_ns": cpu_ns, "wall_ns": wall_ns, "num_tokens": num_tokens}

    def memory(self) -> dict[str, Any]:
        """By how much the process has grown since it held nothing, and the contestant's own account."""
        return {
            "resident_bytes": resident_bytes() - self._resident_bytes,
            "own_bytes": self._contestant.memory_bytes(),
            "num_cached_tokens": self._workload.num_cached_tokens,
        }

    def check(self) -> dict[str, Any]:
        """Prepare the queries and compare every answer with what the workload knows."""
        self._queries = [self._contestant.query(self._workload.lookup(i)) for i in range(self._workload.num_lookups)]
        wrong = [why for number, query in enumerate(self._queries) if (why := self._wrong(number, query))]
        return {"num_wrong": len(wrong), "first": wrong[0] if wrong else ""}

    def _wrong(self, number: int, query: Any) -> str:
        found, want = self._contestant.found(query), self._workload.matched_tokens(number)
        if found.num_tokens != want:
            return f"lookup {number} found {found.num_tokens} tokens, {want} are cached"
        if found.block_ids is not None and not np.array_equal(found.block_ids, self._workload.matched_blocks(number)):
            return f"lookup {number} found other blocks than those that hold its {want} tokens"
        return ""

    def lookup(self) -> dict[str, dict[str, int]]:
        """All queries twice for each part. The first pass finds the processor's caches as another contestant left them and
        counts as `first_cpu_ns` alone."""
        matched = sum(self._workload.matched_tokens(number) for number in range(len(self._queries)))
        answers = {}
        for part in self._contestant.parts:
            first, taken = self._pass(part), self._pass(part)
            answers[part] = {
                **taken._asdict(), "first_cpu_ns": first.cpu_ns, "num_lookups": len(self._queries), "matched_tokens": matched
            }  # fmt: skip
        return answers

    def _pass(self, part: str) -> Spent:
        taken = spent(lambda: self._contestant.run(part, self._queries))
        self._contestant.reset(self._queries)
        return taken

    def touch(self, seed: int) -> None:
        """Look up every inserted sequence once, in random order, so that recency follows nothing else."""
        order = np.random.default_rng(seed).permutation(self._workload.num_sequences)
        for first in range(0, len(order), CHUNK):
            texts = [self._workload.sequence(int(number)).tokens for number in order[first : first + CHUNK]]
            queries = [self._contestant.query(tokens) for tokens in texts]
            self._contestant.run(self._contestant.parts[0], queries)
            self._contestant.reset(queries)

    def evict(self, num_blocks: int, calls: int) -> dict[str, int] | None:
        """None from a contestant that evicts nothing itself."""
        counts: list[int] = []
        taken = spent(lambda: counts.extend(self._contestant.evict(num_blocks) for _ in range(calls)))
        return None if min(counts) < 0 else {**taken._asdict(), "num_blocks": sum(counts)}

    def _prepared(self, start: int, stop: int) -> tuple[list[Any], int]:
        """Sequences start to stop in the contestant's form, and how many tokens their full blocks hold."""
        sequences = list(self._workload.sequences(start, stop))
        num_tokens = sum(len(sequence.block_ids) for sequence in sequences) * self._workload.block_size
        return [self._contestant.sequence(sequence) for sequence in sequences], num_tokens


if __name__ == "__main__":
    answer_requests(Worker)
