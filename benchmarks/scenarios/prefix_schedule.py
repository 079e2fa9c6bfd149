"""The scheduler with the prefix index against LMDeploy's own with its trie: what a request costs, and what it finds.

Both are LMDeploy's `Scheduler`, whole, and get the same requests. There is no model; a step's output is there at once.
Documents are those of `benchmarks.prefix.workload`: 64 system prompts with 8 documents each, and short tails. Chats
begin with one of the same system prompts and go on with 160 to 480 tokens of their own.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.prefix.workload import MAX_TOKENS, NUM_SYSTEMS, VOCABULARY, PrefixWorkload
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {
    "num_blocks": 20_000, "block_size": 64, "num_requests": 200, "num_requests_found": 2_000, "num_blocks_found": 10_000,
    "concurrency": 8,
}  # fmt: skip
SIDES = ("upstream", "ours")
OWN_TOKENS = (160, 480)
IN_TURN = 20  # enough that a side does not pay for what the other left in the processor's caches
NUM_SPARE = 3  # blocks that a request may leave free in a full pool: it had room for its answer, which is not cached
COST_TEXT = (
    "Time of the scheduler in the life of a request of two tokens, from the first scheduling to the end of its session, with "
    "a pool of `num_blocks` blocks full of cached prefixes, so that it must evict; median of `num_requests`."
)
FOUND_TEXT = (
    "Share of the prompts' tokens that lookups found, `concurrency` documents at a time, with `num_blocks_found` blocks; "
    "`num_requests_found` requests after as many that only fill the pool."
)


def _definitions() -> dict[str, Definition]:
    definitions = {}
    for kind in ("chats", "documents"):
        name, text = f"prefix_schedule_{kind}", f"{kind.capitalize()}. {COST_TEXT}"
        definitions[f"{name}_us"] = Definition(unit="us", better="lower", text=text)
        definitions[f"{name}_upstream_us"] = Definition(unit="us", better=None, text=f"LMDeploy as it comes. {text}")
        definitions[f"{name}_speedup"] = Definition(unit="1", better="higher", text="The second over the first.")
    return definitions


DEFINITIONS = _definitions() | {
    "prefix_schedule_found": Definition(unit="1", better="higher", text=FOUND_TEXT),
    "prefix_schedule_upstream_found": Definition(
        unit="1", better=None,
        text="LMDeploy as it comes, but for its clock: it orders accesses by the second, here every step has a second of its "
        f"own. {FOUND_TEXT}",
    ),
}  # fmt: skip


def run(
    seed: int, num_blocks: int, block_size: int, num_requests: int, num_requests_found: int, num_blocks_found: int,
    concurrency: int,
) -> dict[str, float]:  # fmt: skip
    longest = MAX_TOKENS // block_size + 2
    if num_blocks < longest or num_blocks_found < longest * concurrency:
        raise ValueError(
            f"num_blocks is {num_blocks} and num_blocks_found {num_blocks_found}; the longest request takes {longest}, and "
            f"{concurrency} of them run at a time"
        )
    metrics = {}
    for kind, prompts in (("chats", chats), ("documents", documents)):
        ours_us, upstream_us = cost_us(prompts(seed, block_size), num_blocks, block_size, num_requests)
        metrics[f"prefix_schedule_{kind}_us"] = ours_us
        metrics[f"prefix_schedule_{kind}_upstream_us"] = upstream_us
        metrics[f"prefix_schedule_{kind}_speedup"] = upstream_us / ours_us
    for side, name in (("ours", "prefix_schedule_found"), ("upstream", "prefix_schedule_upstream_found")):
        prompts = documents(seed, block_size)
        metrics[name] = share_found(side, prompts, num_blocks_found, block_size, num_requests_found, concurrency)
    return metrics


def documents(seed: int, block_size: int) -> Iterator[np.ndarray]:
    workload = PrefixWorkload(seed, block_size, num_sequences=50_000, num_lookups=1)
    return (workload.sequence(number).tokens for number in range(workload.num_sequences))


def chats(seed: int, block_size: int) -> Iterator[np.ndarray]:
    systems = PrefixWorkload(seed, block_size, num_sequences=1, num_lookups=1).systems
    random = np.random.default_rng([seed, 2])
    while True:
        own = random.integers(0, VOCABULARY, random.integers(*OWN_TOKENS))
        yield np.concatenate([systems[random.integers(NUM_SYSTEMS)], own])


def cost_us(prompts: Iterator[np.ndarray], num_blocks: int, block_size: int, num_requests: int) -> tuple[float, float]:
    """(ours, upstream): medians over the same requests, `IN_TURN` of which one side gets and then the other."""
    sides = {side: Side(side, num_blocks, block_size, max_batches=1) for side in SIDES}
    while any(side.num_free > NUM_SPARE for side in sides.values()):
        prompt = next(prompts)
        for side in sides.values():
            side.request(prompt)
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    for start in range(0, num_requests, IN_TURN):
        some = list(itertools.islice(prompts, min(IN_TURN, num_requests - start)))
        for side in SIDES if start // IN_TURN % 2 else SIDES[::-1]:
            spent[side].extend(sides[side].request(prompt) for prompt in some)
    ours, upstream = (float(np.median(spent[side])) for side in ("ours", "upstream"))
    return ours, upstream


def share_found(
    side: str, prompts: Iterator[np.ndarray], num_blocks: int, block_size: int, num_requests: int, concurrency: int
) -> float:
    scheduler = Side(side, num_blocks, block_size, max_batches=concurrency)
    with _a_second_each(scheduler):
        scheduler.crowd(itertools.islice(prompts, num_requests), concurrency)
        scheduler.num_found = scheduler.num_asked = 0
        scheduler.crowd(itertools.islice(prompts, num_requests), concurrency)
    return scheduler.num_found / scheduler.num_asked


@contextlib.contextmanager
def _a_second_each(side: "Side") -> Iterator[None]:
    """LMDeploy's clock of accesses goes on by a second with each step."""
    from lmdeploy.pytorch.paging.block_manager import base_block_manager

    original = base_block_manager.time
    base_block_manager.time = SimpleNamespace(perf_counter=lambda: side.num_steps)
    try:
        yield
    finally:
        base_block_manager.time = original


class Side:
    """A scheduler with prefix caching: "ours" with hooks and no plug-in, "upstream" as LMDeploy comes."""

    def __init__(self, side: str, num_blocks: int, block_size: int, max_batches: int) -> None:
        from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
        from lmdeploy.pytorch.messages import SequenceMeta
        from lmdeploy.pytorch.paging.scheduler import Scheduler
        from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

        from sagellm.core.config import HookConfig

        self._strategy = ARSequenceStrategy()
        cache = CacheConfig(
            max_batches=max_batches, block_size=block_size, num_cpu_blocks=0, num_gpu_blocks=num_blocks,
            max_prefill_token_num=4096, enable_prefix_caching=True,
            sage=HookConfig().model_dump_json() if side == "ours" else None,
        )  # fmt: skip
        config = SchedulerConfig(max_batches, 1 << 30, prefill_interval=1)
        self._scheduler = Scheduler(config, cache, SequenceMeta(block_size, self._strategy))
        self._sessions = itertools.count()
        self.num_found = self.num_asked = self.num_steps = 0
        self._spent_ns = 0

    @property
    def num_free(self) -> int:
        return self._scheduler.block_manager.get_num_free_gpu_blocks()

    def request(self, prompt: np.ndarray) -> float:
        """One request of two tokens, alone; time of the scheduler in us."""
        self._spent_ns = 0
        seq = self._add(prompt)
        self._step(is_prefill=True)
        self._step(is_prefill=False)
        self._timed(self._scheduler.end_session, seq.session_id)
        return self._spent_ns / 1e3

    def crowd(self, prompts: Iterator[np.ndarray], concurrency: int, num_new: int = 8) -> None:
        """Requests of `num_new` tokens, a new one as soon as one has ended."""
        scheduler, running = self._scheduler, []
        while True:
            running += [self._add(prompt) for prompt in itertools.islice(prompts, concurrency - len(running))]
            if not running:
                return
            self._step(is_prefill=scheduler.has_waiting())
            for seq in [seq for seq in running if seq.num_new_tokens == num_new]:
                scheduler.end_session(seq.session_id)
                running.remove(seq)

    def _add(self, prompt: np.ndarray) -> Any:
        session = self._scheduler.add_session(next(self._sessions))
        seq = session.add_sequence(prompt)
        self._scheduler.add_sequence(seq)
        return seq

    def _step(self, is_prefill: bool) -> None:
        scheduler = self._scheduler
        self.num_steps += 1
        running = self._timed(scheduler.schedule, is_prefill, 0 if is_prefill else 1).running
        if is_prefill and not running:
            return self._step(False)
        if is_prefill:
            self.num_asked += sum(seq.num_valid_ids for seq in running)
            self.num_found += sum(seq.num_history_ids for seq in running)
        if scheduler.sage is not None:
            self._timed(scheduler.sage.dispatch, running, 1)
        scheduler.lock_running(running)
        zeros = torch.zeros(len(running), dtype=torch.int64)
        outputs = SimpleNamespace(next_token_ids=zeros, stopped=zeros, model_metas=None, all_routed_experts=None)
        self._strategy.update_running(running, outputs, not is_prefill)
        if scheduler.sage is not None:
            self._timed(scheduler.sage.step_end, running, not is_prefill)
        scheduler.unlock_running(running)

    def _timed(self, function: Callable[..., Any], *args: Any) -> Any:
        start_ns = time.perf_counter_ns()
        try:
            return function(*args)
        finally:
            self._spent_ns += time.perf_counter_ns() - start_ns
