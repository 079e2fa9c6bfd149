"""Which blocks sparse policies would have read in a recorded run, what that saves, and whether the record's own choices are
those that its policy makes again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.sparsity.base import (
    SparsePolicy,
    as_ranges,
    prompt_view,
    step_view,
    wrong_with,
    wrong_with_prompts,
)
from sagellm.accel.sparsity.registry import make_sparsity
from sagellm.core.errors import SparsityError, TraceError
from sagellm.core.hooks import Phase
from sagellm.replay.base import shortened
from sagellm.replay.record_lines import Checked, Difference, record_lines
from sagellm.replay.schedule.follow import Follower
from sagellm.replay.schedule.log import read_log
from sagellm.replay.schedule.step_times import RecordedCosts, fit_step_times
from sagellm.scheduler_ir.simulation.base import StepRun

__all__ = ["Reads", "ReadsReport", "replay_reads"]

TILE = 32  # tokens of a prompt that are computed together, where a record does not say


@dataclass(frozen=True, slots=True)
class Reads:
    """Blocks that a policy would have read in all steps of a record.

    Attributes:
        decode_read, decode_held: blocks, summed over decode steps and requests.
        prompt_read, prompt_held: the same over tiles of prompts.
        saved_bytes: keys and values that decode steps would not have read.
        seconds, dense_seconds: of all steps by the fitted model, with this policy and with dense attention.
    """

    policy: str
    decode_read: int
    decode_held: int
    prompt_read: int
    prompt_held: int
    saved_bytes: int
    seconds: float
    dense_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class ReadsReport(Checked):
    """Attributes:
    policy: the sparse policy of the record; empty if it has none.
    num_choices: forward passes whose blocks were chosen again; of `num_budgets` only how many blocks they read can be known
        without their queries.
    rows: what each policy would have read.
    """

    policy: str = ""
    num_choices: int = 0
    num_budgets: int = 0
    rows: list[Reads] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **Checked.to_dict(self), "policy": self.policy, "choices": self.num_choices, "budgets": self.num_budgets,
            "rows": [row.to_dict() for row in self.rows],
        }  # fmt: skip


class _Lengths(Follower):
    """Keeps what each request had in each step: (request, new tokens, tokens with these)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[np.ndarray] = []  # int64 [requests, 3] of each of `steps`

    def step(self, *given: Any) -> None:
        super().step(*given)
        found = self.steps[-1].computed or ()
        self.rows.append(np.array([(one, new, self.known[one].have) for one, new in found], np.int64).reshape(-1, 3))


def replay_reads(path: Path, policies: Mapping[str, Mapping[str, Any]] | None = None) -> ReadsReport:
    """Ask the policy of a record again, and say what it and others would have read.

    Args:
        policies: options by name; None: the policy of the record.

    Raises:
        TraceError: an unreadable or malformed record, or one without decode steps.
        SparsityError: an unknown policy, or one that fails.
    """
    report, follower = ReadsReport(str(path)), _Lengths()
    run = read_log(path, follower=follower)
    opened: dict[str, Any] = {}
    lines: list[tuple[int, dict[str, Any]]] = []
    for number, line in record_lines(path, report):
        if line["event"] == "open":
            opened = line
        elif line["event"] == "read":
            lines.append((number, line))
    own = opened.get("sparsity")
    if own is not None:
        report.policy = str(own.get("name"))
        _verify(make_sparsity(report.policy, **own.get("options", {})), opened["block_size"], lines, report)
    if policies is None:
        policies = {} if own is None else {report.policy: own.get("options", {})}
    if not policies:
        raise TraceError(f"{path} was recorded without a sparse policy; name some with --sparsity.")
    steps = [_as_read(step, reads, opened["block_size"]) for step, reads in _paired(run.measured.steps, lines)]
    costs = fit_step_times(steps, str(path))
    tile = next((line["tile"] for _, line in lines if "tile" in line), TILE)
    for name, options in policies.items():
        policy = make_sparsity(name, **options)
        report.rows.append(_what_if(name, policy, follower, costs, opened["block_size"], opened["block_bytes"], tile))
    return report


def _paired(steps: tuple[StepRun, ...], lines: list[tuple[int, dict[str, Any]]]) -> list[tuple[StepRun, dict | None]]:
    """Each step with its `read` line. Lines stop where a policy was switched off."""
    reads = {phase: [line for _, line in lines if line["phase"] == phase.value] for phase in Phase}
    next_of = {phase: 0 for phase in Phase}
    pairs = []
    for step in steps:
        at = next_of[step.phase]
        line = reads[step.phase][at] if at < len(reads[step.phase]) else None
        if line is not None and len(line["lengths"]) == step.num_requests:
            next_of[step.phase] += 1
            pairs.append((step, line))
        else:
            pairs.append((step, None))
    return pairs


def _as_read(step: StepRun, line: dict[str, Any] | None, block_size: int) -> StepRun:
    """The step with what its attention read in place of what it could have read."""
    if line is None:
        return step
    share = sum(line["read"]) / max(1, sum(line["held"]))
    return StepRun(
        step.step, step.phase, step.end_s, step.seconds, step.num_requests, step.num_tokens, step.attention * share,
        step.computed,
    )  # fmt: skip


def _verify(policy: SparsePolicy, block_size: int, lines: list[tuple[int, dict[str, Any]]], report: ReadsReport) -> None:
    counts = {"decode": 0, "prefill": 0}
    for number, line in lines:
        phase, lengths = line.get("phase"), line.get("lengths")
        if phase not in counts or type(lengths) is not list:
            told = f"{report.path}, line {number}: read: phase is {shortened(phase)}"
            raise TraceError(f"{told}; prefill or decode was expected, and lengths.")
        step, counts[phase] = counts[phase], counts[phase] + 1
        if phase == "prefill":
            view = prompt_view(policy, step, np.array(line["new"]), np.array(lengths), line["tile"], block_size)
            if policy.prompt_weights:
                continue
            chosen = _asked(policy.select_prompt_blocks, view, wrong_with_prompts, policy)
            own = view.blocks - view.before
            read = np.bincount(view.sequences, [len(one) for one in chosen] + own, len(lengths))
            report.num_choices += 1
            _compare(number, "read", line["read"], read.tolist(), report)
            continue
        seen = step_view(policy, step, np.array(lengths), block_size)
        _compare(number, "read", line["read"], seen.keep.tolist(), report)
        if "chosen" not in line:
            report.num_budgets += 1
            continue
        found = _asked(policy.select_blocks, seen, wrong_with, policy)
        report.num_choices += 1
        _compare(number, "chosen", line["chosen"], [as_ranges(one) for one in found], report)


def _asked(ask: Any, view: Any, wrong: Any, policy: SparsePolicy) -> list[np.ndarray]:
    try:
        chosen = [np.asarray(one) for one in ask(view)]
    except Exception as error:
        raise SparsityError(f"sparse policy {policy.name} raised {type(error).__name__}: {error}") from error
    if fault := wrong(chosen, view):
        raise SparsityError(f"sparse policy {policy.name}: {fault}.")
    return chosen


def _compare(number: int, name: str, recorded: list, replayed: list, report: ReadsReport) -> None:
    if recorded != replayed:
        report.differences.append(Difference(number, "read", name, recorded, replayed))


def _what_if(
    name: str, policy: SparsePolicy, follower: _Lengths, costs: RecordedCosts, block_size: int, block_bytes: int, tile: int
) -> Reads:
    read, held = {phase: 0 for phase in Phase}, {phase: 0 for phase in Phase}
    seconds = dense_seconds = 0.0
    step_of = {phase: 0 for phase in Phase}
    for step, rows in zip(follower.steps, follower.rows, strict=True):
        if not len(rows):
            raise TraceError("the record does not say which requests its steps computed; record it with this version.")
        number, step_of[step.phase] = step_of[step.phase], step_of[step.phase] + 1
        if step.phase is Phase.DECODE:
            of_step = _decode_reads(policy, follower, rows, number, block_size)
            all_blocks = int((-(-rows[:, 2] // block_size)).sum())
        else:
            view = prompt_view(policy, number, rows[:, 1], rows[:, 2], tile, block_size)
            all_blocks = int(view.blocks.sum())
            of_step = all_blocks
            if policy.prompt_weights:  # at most
                of_step = int((view.keep + view.blocks - view.before).sum())
            elif policy.selects_prompts:
                chosen = _asked(policy.select_prompt_blocks, view, wrong_with_prompts, policy)
                of_step = sum(map(len, chosen)) + int((view.blocks - view.before).sum())
        read[step.phase] += of_step
        held[step.phase] += all_blocks
        dense_seconds += _seconds(costs, step, 1.0)
        seconds += _seconds(costs, step, of_step / all_blocks)
    return Reads(
        name, read[Phase.DECODE], held[Phase.DECODE], read[Phase.PREFILL], held[Phase.PREFILL],
        (held[Phase.DECODE] - read[Phase.DECODE]) * block_bytes, seconds, dense_seconds,
    )  # fmt: skip


def _seconds(costs: RecordedCosts, step: StepRun, share: float) -> float:
    """Seconds of a step whose attention reads a share of what it could."""
    return costs.seconds(step.phase, step.num_requests, step.num_tokens, share * step.attention, step.end_s)


def _decode_reads(policy: SparsePolicy, follower: _Lengths, rows: np.ndarray, step: int, block_size: int) -> int:
    """Blocks that a decode step reads: of those that the policy has not given up, those that it chooses."""
    if policy.drops:
        kept = 0
        for request, _, length in rows.tolist():
            blocks, prompt = -(-length // block_size), -(-follower.known[request].prompt_tokens // block_size)
            of_prompt = policy.drops_after == "prompt"
            kept += policy.budget(prompt) + max(0, blocks - prompt) if of_prompt else policy.budget(blocks)
        return kept
    view = step_view(policy, step, rows[:, 2], block_size)
    if not policy.selects:
        return int(view.num_blocks.sum())
    if policy.per == "step":
        return sum(map(len, _asked(policy.select_blocks, view, wrong_with, policy)))
    return int(view.keep.sum())
