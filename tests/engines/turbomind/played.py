"""An engine that plays TurboMind's part, for tests of what answers it: blocks without bytes, requests of one step, ranks.

A block remembers the tokens it stands for, so that a wrong hit is seen. The ranks of a group are threads.
"""

import ctypes as c
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.engines.turbomind import abi

BLOCK = 4


class PlayedRank:
    """One rank: its blocks, and the hooks that it calls on its caller's thread."""

    def __init__(self, table: Any, num_blocks: int = 12, rank: int = 0, num_ranks: int = 1) -> None:
        self.hooks = abi.hooks_of(table)
        self.num_blocks = num_blocks
        self.state = [abi.FREE] * num_blocks
        self.unique_id = [0] * num_blocks
        self.timestamp = [0] * num_blocks
        self.content: list[tuple[int, ...]] = [()] * num_blocks
        self.clock = 0
        self.last_unique_id = 2**31 - 3  # grows beyond what an int holds
        self.num_matched: list[int] = []  # blocks, by request
        self.victims: list[list[int]] = []
        self.slowest_s = 0.0
        self.steps = 0
        self._keep = (abi.BlockInfoFunction(self._block_info), abi.CountsFunction(self._counts))
        self._api = abi.KvApi(abi=1, struct_size=c.sizeof(abi.KvApi), block_info=self._keep[0], counts=self._keep[1])
        self.manager = abi.Manager(
            struct_size=c.sizeof(abi.Manager), api=c.pointer(self._api), engine=7, rank=rank, n_ranks=num_ranks,
            block_len=BLOCK, generation=1, epoch=0,
        )  # fmt: skip

    # ---- what hooks may ask

    def _block_info(self, manager: Any, ids: Any, n: int, out: Any) -> int:
        for place in range(n):
            block = ids[place]
            out[place] = abi.BlockInfo(
                id=block, state=self.state[block], unique_id=self.unique_id[block], timestamp=self.timestamp[block]
            )
        return n

    def _counts(self, manager: Any, out: Any) -> None:
        out[0].total = out[0].max_blocks = self.num_blocks
        out[0].free, out[0].cached, out[0].active = (self.state.count(state) for state in range(3))
        out[0].block_len, out[0].block_bytes = BLOCK, 4096

    # ---- what the engine does

    def request(self, seq_id: int, prompt: Sequence[int]) -> int:
        """One request from its first step to its end; returns how many blocks of it were found."""
        self.manager.epoch += 1
        found = self._lookup(seq_id, prompt)
        for block in found:
            self.state[block] = abi.ACTIVE
        own = self._allocate(len(prompt) // BLOCK - len(found))
        blocks = [*found, *own]
        self.clock += len(blocks)
        for place, block in enumerate(blocks):
            self.content[block] = tuple(prompt[: (place + 1) * BLOCK])
            self.timestamp[block] = self.clock - place  # the end of a prefix is older, as in the engine
        unique_ids = abi.longs([self.unique_id[block] for block in blocks])
        ids = abi.ints(blocks)
        for kind in (abi.PROMPT, abi.GENERATION):
            self._call("prefix_store", self._here, seq_id, kind, abi.ints(prompt), ids, unique_ids, len(blocks))
        self._call("released", self._here, seq_id, ids, unique_ids, len(blocks))
        for block in blocks:
            self.state[block] = abi.CACHED
        self.num_matched.append(len(found))
        self._step_end(len(prompt))
        return len(found)

    @property
    def _here(self) -> Any:
        return c.byref(self.manager)

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self.hooks, name)
        if not function:
            return None
        start_s = time.monotonic()
        result = function(self.hooks.ctx, *arguments)
        self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)
        return result

    def _lookup(self, seq_id: int, prompt: Sequence[int]) -> list[int]:
        most = (len(prompt) - 1) // BLOCK
        ids, unique_ids = abi.ints([0] * most), abi.longs([0] * most)
        tokens = abi.ints(prompt)
        sequence = abi.Sequence(seq_id=seq_id, prompt=c.cast(tokens, abi.i32s), n_prompt=len(prompt))
        count = self._call("prefix_lookup", self._here, c.byref(sequence), most, ids, unique_ids) or 0
        found = []
        for place in range(count):
            block = ids[place]
            if self.state[block] == abi.FREE or self.unique_id[block] != unique_ids[place]:
                break
            assert self.content[block] == tuple(prompt[: (place + 1) * BLOCK]), f"block {block} holds something else"
            found.append(block)
        return found

    def _allocate(self, count: int) -> list[int]:
        missing = count - self.state.count(abi.FREE)
        if missing > 0:
            self._evict(missing)
        blocks = [block for block, state in enumerate(self.state) if state == abi.FREE][:count]
        assert len(blocks) == count, "there are not enough blocks"
        for block in blocks:
            self.last_unique_id += 1
            self.state[block], self.unique_id[block] = abi.ACTIVE, self.last_unique_id
        return blocks

    def _evict(self, count: int) -> None:
        cached = [block for block, state in enumerate(self.state) if state == abi.CACHED]
        out = abi.ints([-1] * count)
        num_chosen = self._call("evict", self._here, abi.ints(cached), len(cached), count, out) or 0
        chosen = [out[place] for place in range(num_chosen)]
        assert num_chosen <= count and len(set(chosen)) == num_chosen and set(chosen) <= set(cached)
        self.victims.append(chosen)
        others = sorted((block for block in cached if block not in chosen), key=lambda block: self.timestamp[block])
        gone = [*chosen, *others[: count - num_chosen]]
        unique_ids = abi.longs([self.unique_id[block] for block in gone])
        self._call("evicted", self._here, abi.ints(gone), unique_ids, len(gone))
        for block in gone:
            self.state[block], self.unique_id[block], self.content[block] = abi.FREE, 0, ()

    def _step_end(self, num_tokens: int) -> None:
        if self.manager.rank == 0:
            self.steps += 1
            result = abi.StepResult(
                struct_size=c.sizeof(abi.StepResult), engine=7, step=self.steps, n_sequences=1, n_tokens=num_tokens,
                n_finished=1,
            )  # fmt: skip
            self._call("step_end", c.byref(result))

    # ---- scheduling

    def schedule(self, sequences: Sequence[dict[str, int]], budget: int = 64, step: int = 1) -> tuple[list[int], int] | None:
        """(priorities, budget) of a step of these sequences; None where it is left to the engine."""
        rows = (abi.Sequence * len(sequences))(*(abi.Sequence(**row) for row in sequences))
        priorities = abi.longs([row["priority"] for row in sequences])
        view = abi.Step(
            struct_size=c.sizeof(abi.Step), engine=7, step=step, max_batch=8, default_budget=budget, max_budget=512,
            free_blocks=3, cached_blocks=4, active_blocks=5,
        )  # fmt: skip
        out = c.c_int32(budget)
        code = self._call("schedule", c.byref(view), rows, len(sequences), priorities, c.byref(out))
        return None if code != 0 else ([priorities[i] for i in range(len(sequences))], out.value)

    def admit(self, requests: Sequence[tuple[int, int]], max_admitted: int = 8) -> list[int] | None:
        """Places of those that may join; requests are (id, tokens)."""
        rows = (abi.Request * len(requests))(*(abi.Request(seq_id, tokens, 16) for seq_id, tokens in requests))
        out = abi.ints([0] * max_admitted)
        count = self._call("admit", 7, 0, rows, len(requests), max_admitted, out)
        return None if count is None or count < 0 else [out[place] for place in range(count)]

    def collective(self, op: int, num_bytes: int, milliseconds: float) -> None:
        comm = abi.Comm(struct_size=c.sizeof(abi.Comm), op=op, rank=self.manager.rank, n_ranks=2, bytes=num_bytes)
        self._call("comm_end", c.byref(comm), None, milliseconds)


def play(table: Any, prompts: Sequence[Sequence[int]], num_ranks: int = 4, num_blocks: int = 12) -> list[PlayedRank]:
    """Every rank, on a thread of its own, serves all requests; a failure in one of them is raised here."""
    ranks = [PlayedRank(table, num_blocks, rank, num_ranks) for rank in range(num_ranks)]

    def serve_all(rank: PlayedRank) -> None:
        for seq_id, prompt in enumerate(prompts):
            rank.request(seq_id, prompt)

    with ThreadPoolExecutor(num_ranks) as threads:
        list(threads.map(serve_all, ranks))
    return ranks
