"""Runs a trace through one policy at one capacity and makes a row of it. README.md defines every column."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sagellm import _core
from sagellm.core.config import Model
from sagellm.core.hooks import Tier
from sagellm.replay.base import ObjectCounts, PrefixCounts, Semantics, Trace
from sagellm.replay.belady import Belady
from sagellm.replay.objects import object_counts, replay_objects_reference, single_blocks
from sagellm.replay.policies import Contestant
from sagellm.replay.prefix import replay_prefix_reference
from sagellm.replay.tiered import DEFAULT_TOKEN_BYTES, TieredReplay, build_manager

Progress = Callable[[int], None]  # how many requests are done
DEFAULT_PREFILL = 10_000.0


class ReplayOptions(Model):
    """How a trace is replayed, whatever the policy.

    `running`: requests at a time; `outputs`: answers take room too; `soon`: see `PrefixReplay`, None for the capacity;
    `reference`: plain Python throughout; `prefill_tokens_per_s`: for the estimate of TTFT. For tiers: `migration`, the policy
    that says what is worth a move; `token_bytes`, keys and values of one token; `load_bytes_per_s`, by the tier that is read.
    """

    semantics: Semantics = Semantics.PREFIX
    running: int = Field(1, ge=1)
    outputs: bool = False
    soon: int | None = Field(None, ge=0)
    reference: bool = False
    prefill_tokens_per_s: float = Field(DEFAULT_PREFILL, gt=0)
    migration: str = "always"
    token_bytes: int = Field(DEFAULT_TOKEN_BYTES, ge=1)
    load_bytes_per_s: dict[Literal["cpu", "nvme"], float] = Field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One policy at one capacity. Rates are shares of 1; what was not measured is None. `error`: why there are no figures.
    `seconds`: CPU time of the run."""

    policy: str
    capacity: int
    semantics: str
    hit_rate_block: float | None
    hit_rate_token: float | None
    accesses: int
    seconds: float
    hit_rate_block_with_retries: float | None
    hit_blocks: int | None
    retries: int | None
    preempted: int | None
    oversized: int | None
    evictions: int | None
    evictions_soon: int | None
    evictions_soon_share: float | None
    migration_bytes: int | None
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    belady_hit_rate_block: float | None
    regret_block: float | None
    skipped_lines: int
    implementation: str
    options: dict[str, Any]
    tiers: dict[str, int] | None = None
    loaded_blocks: dict[str, int] | None = None
    moved_bytes: dict[str, int] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Counts of a run as rows need them. `hit_tokens`: int64 [r], at first admission."""

    hit_blocks: int
    hit_tokens: NDArray[np.int64]
    all_tokens: int
    counts: PrefixCounts | ObjectCounts
    seconds: float


def run(
    trace: Trace, contestant: Contestant, capacity: int, options: ReplayOptions, on_progress: Progress | None = None
) -> Outcome:  # fmt: skip
    """One replay.

    Raises:
        PolicyError, TraceError, CapacityError: as the replays.
    """
    start_s = time.thread_time()
    if options.semantics is Semantics.OBJECT:
        return _objects_outcome(trace, _objects(trace, contestant, capacity, options, on_progress), start_s)
    return _prefix_outcome(trace, _prefix(trace, contestant, capacity, options, on_progress), start_s)


def run_tiers(
    trace: Trace, contestant: Contestant, tiers: Mapping[Tier, int], options: ReplayOptions, on_progress: Progress | None = None
) -> Row:  # fmt: skip
    """The row of one policy on each of several tiers; its capacity is that of gpu. There is no bound for tiers.

    Raises:
        PolicyError, TraceError, ConfigError: as `build_manager` and `TieredReplay`.
    """
    start_s = time.thread_time()
    manager, backend = build_manager(
        trace, contestant, tiers, migration=options.migration, reference=options.reference, token_bytes=options.token_bytes
    )  # fmt: skip
    capacity = tiers[Tier.GPU]
    replay = TieredReplay(trace, manager, backend, capacity=capacity, running=options.running, soon=options.soon)
    found = replay.run(on_progress)
    outcome = _prefix_outcome(trace, found.counts, start_s)
    block_bytes = options.token_bytes * trace.block_size
    load_s = sum(
        found.loaded_blocks[tier] * block_bytes / rate for tier, rate in options.load_bytes_per_s.items()
    )  # fmt: skip
    return replace(
        make_row(trace, contestant._replace(is_native=False), capacity, options, outcome, None),
        migration_bytes=sum(found.moved_bytes.values()), moved_bytes=found.moved_bytes,
        tiers={tier.value: blocks for tier, blocks in tiers.items()},
        loaded_blocks={tier: int(blocks.sum()) for tier, blocks in found.loaded_blocks.items()},
        **ttft(trace, outcome.hit_tokens, options.prefill_tokens_per_s, load_s),
    )  # fmt: skip


def make_row(
    trace: Trace, contestant: Contestant, capacity: int, options: ReplayOptions, outcome: Outcome, bound: Outcome | None
) -> Row:  # fmt: skip
    """`bound`: Belady's outcome at the same capacity."""
    counts, accesses = outcome.counts, trace.num_accesses
    is_prefix = isinstance(counts, PrefixCounts)
    rate = share(outcome.hit_blocks, accesses)
    with_retries = rate
    if is_prefix:
        with_retries = share(outcome.hit_blocks + counts.retry_hit_blocks, accesses + counts.retry_blocks)
    best = None if bound is None else share(bound.hit_blocks, accesses)
    soon = counts.num_evicted_soon
    return Row(
        policy=contestant.name, capacity=capacity, semantics=options.semantics.value, hit_rate_block=rate,
        hit_rate_token=share(int(outcome.hit_tokens.sum()), outcome.all_tokens), accesses=accesses, seconds=outcome.seconds,
        hit_rate_block_with_retries=with_retries, hit_blocks=outcome.hit_blocks, retries=counts.retries if is_prefix else 0,
        preempted=counts.num_preempted if is_prefix else 0, oversized=counts.num_oversized if is_prefix else 0,
        evictions=counts.num_evicted, evictions_soon=soon,
        evictions_soon_share=None if soon is None else share(soon, counts.num_evicted), migration_bytes=0,
        **ttft(trace, outcome.hit_tokens, options.prefill_tokens_per_s), belady_hit_rate_block=best,
        regret_block=None if best is None else best - rate, skipped_lines=trace.num_skipped,
        implementation="native" if contestant.is_native else "python", options=contestant.options,
    )  # fmt: skip


def failed_row(trace: Trace, contestant: Contestant, capacity: int, options: ReplayOptions, error: str) -> Row:
    """The row of a run that could not go on: what is known beforehand, and the reason."""
    known = {
        "policy": contestant.name, "capacity": capacity, "semantics": options.semantics.value, "accesses": trace.num_accesses,
        "seconds": 0.0, "skipped_lines": trace.num_skipped, "options": contestant.options, "error": error,
        "implementation": "native" if contestant.is_native else "python",
    }  # fmt: skip
    return Row(**{name: known.get(name) for name in Row.__dataclass_fields__})


def ttft(
    trace: Trace, hit_tokens: NDArray[np.int64], prefill_tokens_per_s: float, load_s: NDArray[np.float64] | float = 0.0
) -> dict[str, float]:  # fmt: skip
    """Seconds until the first token if a request waits for nothing but its own prefill: the tokens that were not found, at
    least one, since the first output token comes out of a computed one. `load_s`: what moving found blocks took before.
    Mean and percentiles over requests."""
    seconds = np.maximum(trace.input_tokens - hit_tokens, 1) / prefill_tokens_per_s + load_s
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    return {"ttft_mean_s": float(seconds.mean()), "ttft_p50_s": p50, "ttft_p90_s": p90, "ttft_p99_s": p99}


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _prefix(
    trace: Trace, contestant: Contestant, capacity: int, options: ReplayOptions, on_progress: Progress | None
) -> PrefixCounts:  # fmt: skip
    outputs = trace.output_blocks() if options.outputs else None
    block_bytes = options.token_bytes * trace.block_size
    if contestant.is_native:
        return _native(
            contestant, capacity, trace.keys, trace.offsets, options, running=options.running, output_blocks=outputs,
            times_s=trace.times_s, block_bytes=block_bytes,
        )  # fmt: skip
    policy = (
        contestant.build(capacity) if contestant.build else Belady(capacity, keys=trace.keys, offsets=trace.offsets)
    )
    return replay_prefix_reference(
        policy, trace.keys, trace.offsets, capacity=capacity, running=options.running, output_blocks=outputs,
        times_s=trace.times_s, soon=options.soon, block_tokens=trace.block_size, block_bytes=block_bytes, tenants=trace.tenants,
        on_progress=on_progress,
    )  # fmt: skip


def _objects(
    trace: Trace, contestant: Contestant, capacity: int, options: ReplayOptions, on_progress: Progress | None
) -> ObjectCounts:  # fmt: skip
    rows = single_blocks(trace.keys)
    if contestant.is_native:
        return object_counts(_native(contestant, capacity, trace.keys, rows, options))
    policy = contestant.build(capacity) if contestant.build else Belady(capacity, keys=trace.keys, offsets=rows)
    report = None
    if on_progress is not None:
        starts = trace.offsets

        def report(num_accesses: int) -> None:
            on_progress(int(np.searchsorted(starts, num_accesses, side="right")) - 1)

    return replay_objects_reference(policy, trace.keys, capacity=capacity, soon=options.soon, on_progress=report)


def _native(
    contestant: Contestant, capacity: int, keys: NDArray[np.uint64], offsets: NDArray[np.int64], options: ReplayOptions,
    **more: Any,
) -> PrefixCounts:  # fmt: skip
    found = _core.replay_prefix(
        contestant.name, capacity, keys, offsets, soon=options.soon, options=contestant.options, **more
    )
    names = set(PrefixCounts.__dataclass_fields__) - {"hit_blocks"}
    totals = {name: int(np.sum(getattr(found, name))) for name in names}
    return PrefixCounts(hit_blocks=np.asarray(found.hit_blocks, np.int32), **totals)


def _prefix_outcome(trace: Trace, counts: PrefixCounts, start_s: float) -> Outcome:
    seconds = time.thread_time() - start_s
    hit_tokens = np.minimum(counts.hit_blocks.astype(np.int64) * trace.block_size, trace.input_tokens)
    return Outcome(
        int(counts.hit_blocks.sum()), hit_tokens, int(trace.input_tokens.sum(dtype=np.int64)), counts, seconds
    )


def _objects_outcome(trace: Trace, counts: ObjectCounts, start_s: float) -> Outcome:
    seconds = time.thread_time() - start_s
    tokens = trace.key_tokens()
    cumulated = np.concatenate(([0], np.cumsum(np.where(counts.hits, tokens, 0))))
    return Outcome(int(counts.hits.sum()), np.diff(cumulated[trace.offsets]), int(tokens.sum()), counts, seconds)
