"""Sparse attention in LMDeploy's steps: where a policy is asked, and how its choice reaches the attention.

A policy that chooses once a decode step works on every device: the step gets a shorter block table. The tokens of the other
blocks count as `num_ignored_history`, which LMDeploy subtracts from the keys that attention reads, and not from positions. The
last block stays the last, so the new token goes where it would go. Choices for each layer, and those of prompts, are made in
the CPU device's native step. It also adds up what queries look at, for policies that give up blocks (`block_drops.py`).

Each tensor-parallel worker asks a policy of its own. Weights and queries of other workers' heads are gathered before, so all
workers choose the same. Worker 0 tells the engine's process the results.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sagellm.accel.sparsity.base import (
    PromptView,
    SparsePolicy,
    SparseView,
    TopBlocks,
    as_ranges,
    prompt_view,
    step_view,
    wrong_with,
    wrong_with_prompts,
)
from sagellm.core.config import HookConfig
from sagellm.core.errors import SparsityError

__all__ = [
    "News", "Observation", "Reading", "SparseSteps", "check_policy", "native_needs", "reading", "steps_of", "tell_engine",
]  # fmt: skip

logger = logging.getLogger(__name__)


def steps_of(cache_config: Any) -> "SparseSteps | None":
    """Return what chooses the blocks of an engine's steps, made by the first call; None where no policy is wanted.

    Args:
        cache_config: LMDeploy's `CacheConfig` of a model agent.
    """
    if not hasattr(cache_config, "sage_sparsity"):
        spec = getattr(cache_config, "sage", None)
        wanted = HookConfig.model_validate_json(spec).sparsity if spec else None
        cache_config.sage_sparsity = None
        if wanted is not None:
            from sagellm.accel.sparsity.registry import make_sparsity

            policy = make_sparsity(wanted.name, **wanted.options)
            cache_config.sage_sparsity = SparseSteps(policy, cache_config.block_size)
    return cache_config.sage_sparsity


def reading(cache_config: Any, inputs: Any) -> Any:
    """Return the `ModelInputs` of a step, with the blocks that a policy chose once for all layers."""
    steps = steps_of(cache_config)
    return inputs if steps is None else steps.inputs(inputs)


def tell_engine(cache_config: Any, output: Any) -> None:
    """Let the output of a worker's step carry to the engine's process what its policy did. `output`: `BatchedOutputs`."""
    steps = steps_of(cache_config)
    if steps is not None and steps.is_worker:
        from sagellm.engines.lmdeploy.sparse_workers import carry

        carry(output, steps.take_news())


@dataclass(frozen=True, slots=True)
class Reading:
    """Blocks that the attention of a forward pass read.

    Attributes:
        new: int64 [sequences], new tokens of each sequence of a step of prompts; None for a decode step.
        lengths: int64 [sequences], tokens with keys and values.
        read, held: [sequences], blocks. Those of a prompt are summed over tiles, in the mean of layers and heads.
        chosen: int64 positions of each sequence's blocks, where a policy chose once for all layers of a decode step.
    """

    new: np.ndarray | None
    lengths: np.ndarray
    read: np.ndarray
    held: np.ndarray
    chosen: list[np.ndarray] | None = None


class Observation:
    """Weights that the last queries of a forward pass give to blocks.

    Args:
        queries, lengths: int64 [sequences], new tokens, and those with keys and values.
        tables: int64 [sequences, width], blocks of the cache.
        counted: int64 [sequences], queries that are observed.
    """

    def __init__(
        self, queries: np.ndarray, lengths: np.ndarray, tables: np.ndarray, counted: np.ndarray, kv_heads: int
    ) -> None:
        self.queries, self.lengths, self.tables, self.counted = queries, lengths, tables, counted
        self.weights = np.zeros((len(lengths), kv_heads, tables.shape[1]), np.float32)

    def native(self) -> dict[str, Any]:
        self.weights[:] = 0
        return {"queries": self.counted.tolist(), "weights": self.weights.ctypes.data}


@dataclass(frozen=True, slots=True)
class News:
    """Results of a worker's step.

    Attributes:
        observations: of its forward passes, oldest first.
        lines: fields of `read` lines of the record.
        report: numbers of `/metrics`.
    """

    observations: list[Observation]
    lines: list[dict[str, Any]]
    report: dict[str, Any]


def check_policy(policy: SparsePolicy, head_size: int | None) -> None:
    """Check what a policy needs of a model.

    Args:
        head_size: numbers of a key of a head; None for a model that does not run in a native step.

    Raises:
        SparsityError: the policy needs a native step, or whole groups of numbers.
    """
    if head_size is not None:
        if policy.weights == "codes" and head_size % 16:
            raise SparsityError(
                f"sparse policy {policy.name} takes keys in groups of 16 numbers, and heads of this model have {head_size}; "
                "use quest."
            )
        return
    for what, is_needed in native_needs(policy).items():
        if is_needed:
            raise SparsityError(
                f"sparse policy {policy.name} {what}, which only the CPU device's native step can do, and this model "
                "does not run in it; use a policy that chooses once a step, such as streaming."
            )


def native_needs(policy: SparsePolicy) -> dict[str, bool]:
    """Return whether a policy does each thing that a native step alone can do."""
    return {
        f"chooses for each {policy.per}": policy.selects and policy.per != "step",
        "looks at summaries of keys": bool(policy.summaries),
        "chooses blocks of prompts": policy.selects_prompts,
        "observes queries": policy.observed > 0,
    }


@dataclass(slots=True)
class Seen:
    """Weights of a sequence that it collected so far. It is known by its last block, which no other sequence has."""

    length: int
    first_block: int
    weights: np.ndarray  # float32 [kv_heads, blocks]


class SparseSteps:
    """Asks a policy in a model's steps, counts, and stops asking when it fails: the steps then read everything."""

    def __init__(self, policy: SparsePolicy, block_size: int) -> None:
        self.policy = policy
        self._block_size = block_size
        self._num_steps = self._blocks_read = self._blocks_held = self._sequences = 0
        self._num_prompts = self._prompt_read = self._prompt_held = 0
        self._fault = ""
        self._shape: tuple[int, int, int] | None = None
        self._tile = 0
        self._seen: dict[int, Seen] = {}  # by the block of the last token
        self._summaries: dict[str, np.ndarray] = {}  # fields of a view, [layers, ...] of each
        self.readings: deque[Reading] | None = None  # of forward passes, oldest first, once somebody takes them
        self._workers, self._replicas = 1, 1  # that split the heads; adjacent ones that have the same key head
        self._agree: Callable[[str], str] | None = None  # a fault of this worker, or of another one
        self._unsent: deque[Observation] | None = None  # of a worker
        self._heard: dict[str, Any] = {}  # latest report of worker 0
        self._lines: list[dict[str, Any]] = []  # of its record

    def bind(self, heads: int, kv_heads: int, head_size: int, prompt_tile: int) -> None:
        """Take the shape of a model whose native step can ask for each layer, and for tiles of so many tokens of prompts."""
        self._shape = heads, kv_heads, head_size
        self._tile = prompt_tile

    def bind_summaries(self, bounds: np.ndarray | None, key_sums: np.ndarray | None) -> None:
        """Take the summaries of keys that a native step keeps: a row of what `SparseView` has for each layer."""
        found = {"bounds": bounds, "key_sums": key_sums}
        self._summaries = {name: each for name, each in found.items() if each is not None}

    def split(self, workers: int, replicas: int, agree: Callable[[str], str]) -> None:
        """Take how workers split the heads of the model.

        Args:
            replicas: adjacent workers that have the same key head.
            agree: returns a worker's fault, or that of another one. All workers call it at the same time.
        """
        self._workers, self._replicas, self._agree = workers, replicas, agree

    def serve_engine(self, is_first: bool, is_recorded: bool) -> None:
        """The engine is in another process. `take_news` is called after each step of worker 0; others keep no news."""
        self._unsent = deque(maxlen=None if is_first else 0)
        self.readings = deque() if is_first and is_recorded else None

    @property
    def is_worker(self) -> bool:
        return self._unsent is not None

    @property
    def is_on(self) -> bool:
        return not self._fault

    @property
    def is_of_layers(self) -> bool:
        return self.policy.selects and self.policy.per != "step"

    def check(self) -> None:
        """Raise SparsityError if the policy needs a native step and the model has none."""
        check_policy(self.policy, None if self._shape is None else self._shape[2])

    def exchange(self, policy: SparsePolicy) -> None:
        """Ask another policy from the next step on. Blocks written before have bounds if the former one asked for them."""
        self.policy, self._fault = policy, ""

    def switch_off(self, fault: str) -> None:
        self._fault = fault
        logger.warning("sparse policy %s is switched off, steps read all blocks: %s", self.policy.name, fault)

    def inputs(self, inputs: Any) -> Any:
        """Return the inputs of a step for a policy that chooses once; those given if it reads everything."""
        policy = self.policy
        if self._fault or not policy.selects or policy.per != "step" or inputs.is_dummy or inputs.max_q_seqlen != 1:
            return inputs
        lengths = inputs.history_lengths + inputs.seq_length - inputs.num_ignored_history
        view = self._view(lengths.cpu().numpy(), inputs.block_offsets)
        if (view.keep == view.num_blocks).all():
            self._count(view)
            return inputs
        kv_heads = self._shape[1] if self._shape else 1
        chosen = self._ask(lambda: policy.select_blocks(view), lambda found: wrong_with(found, view, kv_heads))
        if chosen is None:
            return inputs
        self._count(view, chosen)
        positions = np.zeros((len(chosen), view.keep.max()), np.int64)
        for row, one in zip(positions, chosen, strict=True):
            row[: len(one)] = one
        tables = inputs.block_offsets
        seen = (view.keep - 1) * self._block_size + (view.lengths - 1) % self._block_size + 1
        ignored = torch.from_numpy(view.lengths - seen).to(inputs.num_ignored_history)
        return replace(
            inputs, block_offsets=tables.gather(1, torch.from_numpy(positions).to(tables.device)).contiguous(),
            num_ignored_history=inputs.num_ignored_history + ignored,
            max_kv_seqlen=int(seen.max()), sum_kv_seqlen=int(seen.sum()),
        )  # fmt: skip

    def of_layers(self, lengths: torch.Tensor, tables: torch.Tensor) -> dict[str, Any] | None:
        """Return how a native step chooses blocks, as `CpuDecoder.run` takes it; None to read everything.

        Args:
            lengths: [sequences], tokens with the new one, each of one new token.
            tables: [sequences, width], blocks of the cache.
        """
        if self._fault or not self.is_of_layers:
            return None
        if not int(lengths.max()):  # a warm-up step, which has no cache
            return None
        view = self._view(lengths.numpy(), tables)
        self._count(view)
        if (view.keep == view.num_blocks).all():
            return None
        policy = self.policy
        is_native = type(policy).select_blocks is TopBlocks.select_blocks
        return {
            "keep": view.keep.tolist(), "weights": policy.weights, "by_head": view.by_head,
            "whole_layers": policy.whole_layers, "reach": policy.reach,
            "first": policy.first,
            "last": policy.last, "choose": None if is_native else self._chooser(view),
        }  # fmt: skip

    def of_prompts(self, queries: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any] | None:
        """Return how a native step of prompts chooses blocks, as `CpuDecoder.run` takes it; None to read everything.

        Args:
            queries, lengths: [sequences], new tokens, and tokens with these.
        """
        policy = self.policy
        if self._fault or not policy.selects_prompts or not int(lengths.max()):
            return None
        view = self._prompt_view(queries, lengths)
        if policy.prompt_weights:
            return {
                "stride": policy.stride, "share": policy.share, "threshold": policy.threshold,
                "min_blocks": policy.min_blocks, "first": policy.first, "last": policy.last,
                "whole_layers": policy.whole_layers,
            }  # fmt: skip
        chosen = self._ask(lambda: policy.select_prompt_blocks(view), lambda found: wrong_with_prompts(found, view))
        if chosen is None:
            return None
        return {"counts": [len(one) for one in chosen], "positions": np.concatenate(chosen).tolist()}

    def count_prompts(
        self, queries: torch.Tensor, lengths: torch.Tensor, choice: dict[str, Any] | None, estimated: float
    ) -> None:
        """Count a step of prompts.

        Args:
            choice: what `of_prompts` returned.
            estimated: blocks that its tiles read where they chose by estimates, in the mean of layers and heads.
        """
        if not int(lengths.max()):
            return
        view = self._prompt_view(queries, lengths)
        held = np.bincount(view.sequences, view.blocks, len(lengths))
        if choice is None:
            read = held
        elif "counts" in choice:
            read = np.bincount(view.sequences, choice["counts"] + view.blocks - view.before, len(lengths))
        else:
            read = held * estimated / held.sum()
        self._num_prompts += 1
        self._prompt_held += int(held.sum())
        self._prompt_read += round(read.sum())
        if self.readings is not None:
            self.readings.append(Reading(queries.numpy(), lengths.numpy(), read, held))

    def observe(
        self, is_decoding: bool, queries: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor
    ) -> Observation | None:
        """Return what a native step is to observe; None if the policy wants no weights."""
        policy = self.policy
        if self._fault or not policy.observed or (is_decoding and policy.drops_after == "prompt") or not int(lengths.max()):
            return None
        new = queries.numpy().astype(np.int64)
        counted = new if is_decoding else np.minimum(new, policy.observed)
        return Observation(new, lengths.numpy().astype(np.int64), tables.numpy(), counted, self._shape[1])

    def note(self, observation: Observation) -> None:
        """Keep what a step has observed, or tell the engine's process of it."""
        if self._unsent is not None:
            self._unsent.append(observation)
            return
        size, adds_up = self._block_size, self.policy.drops_after == "step"
        sizes = zip(observation.queries.tolist(), observation.lengths.tolist(), strict=True)
        for (queries, length), table, weights in zip(sizes, observation.tables, observation.weights, strict=True):
            seen = weights[:, : -(-length // size)].copy()
            before = length - queries
            known = self._seen.pop(int(table[(before - 1) // size]), None) if before and adds_up else None
            if known is not None and (known.length, known.first_block) == (before, int(table[0])):
                seen[:, : known.weights.shape[1]] += known.weights
            self._seen[int(table[(length - 1) // size])] = Seen(length, int(table[0]), seen)

    def seen(self, last_block: int, length: int) -> np.ndarray | None:
        """Return float32 [kv_heads, blocks] of a sequence of `length` tokens, the last one in that block of the cache."""
        known = self._seen.get(last_block)
        return known.weights if known is not None and known.length == length else None

    def keep_seen(self, last_block: int, kept: np.ndarray) -> None:
        """A sequence has given up all blocks but these, numbers in its table; or forget it, where no more is observed."""
        if self.policy.drops_after == "prompt":
            self._seen.pop(last_block, None)
        elif (known := self._seen.get(last_block)) is not None:
            num_lost = known.weights.shape[1] - len(kept)
            known.weights = known.weights[:, kept]
            known.length -= num_lost * self._block_size

    def take_readings(self) -> list[dict[str, Any]]:
        """Return the fields of `read` lines of a record, of forward passes since the last call."""
        lines, self._lines = self._lines, []
        while self.readings:
            one = self.readings.popleft()
            more: dict[str, Any] = {}
            if one.new is not None:
                more = {"new": one.new, "tile": self._tile}
            elif one.chosen is not None:
                more = {"chosen": [as_ranges(positions) for positions in one.chosen]}
            lines.append({
                "policy": self.policy.name, "phase": "decode" if one.new is None else "prefill", "lengths": one.lengths,
                "read": np.round(one.read, 3), "held": one.held, **more,
            })  # fmt: skip
        return lines

    def take_news(self) -> News:
        """Return the results of this worker's steps since the last call."""
        observations = list(self._unsent)
        self._unsent.clear()
        return News(observations, self.take_readings(), self.report())

    def hear(self, news: News | None) -> None:
        """Take the news of worker 0; None where the model is in this process."""
        if news is None:
            return
        for observation in news.observations:
            self.note(observation)
        if self.readings is not None:
            self._lines += news.lines
        self._heard = news.report
        self._fault = self._fault or news.report["fault"]

    def report(self) -> dict[str, Any]:
        """Return the numbers of `/metrics`."""
        if self._heard:
            return self._heard | {"fault": self._fault}
        return {
            "policy": self.policy.name, "steps": self._num_steps, "sequences": self._sequences,
            "read": self._blocks_read, "held": self._blocks_held, "fault": self._fault,
            "prompts": self._num_prompts, "prompt_read": self._prompt_read, "prompt_held": self._prompt_held,
        }  # fmt: skip

    def _view(self, lengths: np.ndarray, tables: torch.Tensor) -> SparseView:
        blocks = tables.cpu().numpy().astype(np.int64, copy=False)
        return step_view(self.policy, self._num_steps, lengths, self._block_size, blocks)

    def _prompt_view(self, queries: torch.Tensor, lengths: torch.Tensor) -> PromptView:
        return prompt_view(
            self.policy, self._num_prompts, queries.numpy(), lengths.numpy(), self._tile, self._block_size
        )

    def _count(self, view: SparseView, chosen: list[np.ndarray] | None = None) -> None:
        self._num_steps += 1
        self._sequences += len(view.lengths)
        self._blocks_read += int(view.keep.sum())
        self._blocks_held += int(view.num_blocks.sum())
        if self.readings is not None:
            self.readings.append(Reading(None, view.lengths, view.keep, view.num_blocks, chosen))

    def _ask(self, ask: Any, wrong_with: Any) -> list[np.ndarray] | None:
        try:
            chosen = list(ask())
            fault = wrong_with(chosen)
        except Exception as error:
            fault = f"it raised {type(error).__name__}: {error}"
        if self._agree is not None and (self.is_of_layers or self.policy.observed):  # workers gather numbers in a step
            fault = self._agree(fault)
        if fault:
            self.switch_off(fault)
            return None
        return chosen

    def _chooser(self, view: SparseView) -> Any:
        """Return a function that a native step calls for each layer."""
        assert self._shape is not None
        heads, kv_heads, head_size = self._shape
        sequences, choices, most = len(view.lengths), kv_heads if view.by_head else 1, int(view.keep.max())
        table_width, has_weights = view.tables.shape[1], bool(self.policy.weights)
        parts = self._replicas if view.by_head else self._workers  # workers whose queries a choice depends on
        seen_heads = kv_heads * parts // self._replicas
        is_whole = view.by_head or self._workers == 1  # summaries are those of this worker's key heads

        def choose(layer: int, queries: int, weights: int, result: int) -> str:
            found = replace(
                view, layer=layer, queries=_floats(queries, sequences, heads * parts, head_size),
                weights=_floats(weights, sequences, seen_heads, table_width) if has_weights else view.weights,
                **{name: each[layer] for name, each in self._summaries.items() if is_whole},
            )  # fmt: skip
            chosen = self._ask(
                lambda: self.policy.select_blocks(found), lambda positions: wrong_with(positions, found, kv_heads)
            )
            if chosen is None:
                return self._fault
            rows = np.ctypeslib.as_array((ctypes.c_int64 * (sequences * choices * most)).from_address(result))
            for row, one in zip(rows.reshape(sequences, choices, most), chosen, strict=True):
                row[:, : np.shape(one)[-1]] = one
            return ""

        return choose


def _floats(address: int, *shape: int) -> np.ndarray:
    """A read-only array over memory of the native step."""
    array = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address)).reshape(shape)
    array.flags.writeable = False
    return array
