"""Contract of a sparse policy: `sagellm check sparsity module:Class`."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from sagellm.accel.sparsity.base import (
    DropView,
    PromptView,
    SparsePolicy,
    SparseView,
    wrong_kind,
    wrong_with,
    wrong_with_drops,
    wrong_with_prompts,
)
from sagellm.core.contract import Broke, Played, Report, Scenario, Suite

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "has a name and can be built",
    "kind": "has attributes that engines know, and defines what is asked of a policy",
    "raises_nothing": "raises nothing",
    "budget": "reads between 1 and all blocks of a sequence, and not fewer of a longer one",
    "choice": "reads blocks that are there, rising; in decode steps as many as its budget, the last block included",
    "drops": "gives up blocks that it may, rising",
    "ends": "always reads or keeps its `first` and `last` blocks",
    "deterministic": "answers the same view with the same blocks",
    "changes_nothing": "leaves the arrays of a view as they are",
}
HEADS, KV_HEADS, HEAD_SIZE = 6, 3, 16
LONGEST = 400  # blocks
Make = Callable[..., SparsePolicy]


def budgets(make: Make, seed: int, report: Report) -> Played:
    """Ask for the budget of every length."""
    policy = _built(make, report)
    before = 0
    for blocks in range(1, LONGEST + 1):
        keep = _guarded(lambda count=blocks: policy.budget(count), report)
        if not isinstance(keep, int) or not 1 <= keep <= blocks:
            report("budget", f"of {blocks} blocks it reads {keep!r}; give a whole number from 1 to {blocks}.")
            raise Broke
        if keep < before:
            report("budget", f"of {blocks} blocks it reads {keep}, of {blocks - 1} blocks {before}.")
        before = keep
    return Played(LONGEST, {"builds", "kind", "raises_nothing", "budget"})


def steps(make: Make, seed: int, report: Report) -> Played:
    """Choose in random steps, each one twice: by two objects of the class."""
    chance = np.random.default_rng(seed)
    policy, twin = _built(make, report), _built(make, report)
    for step in range(60):
        if policy.selects:
            view = random_view(policy, chance, step)
            of_heads = partial(wrong_with, kv_heads=KV_HEADS)
            chosen = _ask_both(policy, twin, "select_blocks", view, "choice", of_heads, report)
            _check_ends(policy, chosen, view, report)
        if policy.selects_prompts and not policy.prompt_weights:
            prompts = random_prompts(policy, chance, step)
            _ask_both(policy, twin, "select_prompt_blocks", prompts, "choice", wrong_with_prompts, report)
        if policy.drops:
            after = random_drops(policy, chance)
            lost = _ask_both(policy, twin, "drop_blocks", after, "drops", wrong_with_drops, report)
            for number, (gone, held, positions) in enumerate(zip(lost, after.held.tolist(), after.positions, strict=True)):
                ends = {*range(held, policy.first), *range(max(held, len(positions) - policy.last), len(positions))}
                if after.keep[number] >= policy.first + policy.last and (missing := ends & set(gone.tolist())):
                    report("ends", f"of {len(positions)} blocks it gave up {sorted(missing)}.")
    return Played(60, set(RULES) - {"budget"})


def _ask_both(
    policy: SparsePolicy, twin: SparsePolicy, method: str, view: Any, rule: str, wrong: Callable[[list, Any], str],
    report: Report,
) -> list[np.ndarray]:  # fmt: skip
    """Ask two objects of the class about a view. Returns the answer of the first."""
    kept = deepcopy(view)
    chosen = _guarded(lambda: list(getattr(policy, method)(view)), report)
    for name in (field.name for field in fields(view)):
        before, after = getattr(kept, name), getattr(view, name)
        if any(not np.array_equal(a, b) for a, b in zip(_arrays(before), _arrays(after), strict=True)):
            report("changes_nothing", f"it has changed `{name}` of the view.")
    if fault := _guarded(lambda: wrong(chosen, kept), report):
        report(rule, f"{fault}.")
        raise Broke
    again = _guarded(lambda: list(getattr(twin, method)(kept)), report)
    if len(again) != len(chosen) or any(not np.array_equal(a, b) for a, b in zip(chosen, again, strict=True)):
        report("deterministic", f"{method}: another object of the class chose other blocks.")
    return [np.asarray(one) for one in chosen]


def _arrays(value: Any) -> list[np.ndarray]:
    return [np.asarray(each) for each in value] if isinstance(value, list) else [np.asarray(value)]


def _check_ends(policy: SparsePolicy, chosen: list[np.ndarray], view: SparseView, report: Report) -> None:
    for positions, keep, blocks in zip(chosen, view.keep.tolist(), view.num_blocks.tolist(), strict=True):
        ends = {*range(min(policy.first, blocks)), *range(max(0, blocks - policy.last), blocks)}
        missing = [ends - set(row) for row in np.atleast_2d(positions).tolist()]
        if keep >= len(ends) and any(missing):
            report("ends", f"of {blocks} blocks it left out {sorted(set.union(*missing))}.")


def random_view(policy: SparsePolicy, chance: np.random.Generator, step: int) -> SparseView:
    """Return a view as the policy would get it in an engine."""
    block_size = int(chance.choice([16, 64]))
    lengths = chance.integers(1, LONGEST * block_size // 4, int(chance.integers(1, 9)))
    blocks = -(-lengths // block_size)
    keep = np.array([policy.budget(each) for each in blocks.tolist()], np.int64)
    arrays = {}
    if policy.per != "step":
        arrays["queries"] = chance.standard_normal((len(lengths), HEADS, HEAD_SIZE)).astype(np.float32)
    if policy.weights:
        weights = chance.random((len(lengths), KV_HEADS, blocks.max() + 3)).astype(np.float32)
        for row, count in zip(weights, blocks, strict=True):
            row[:, count:] = 0
        arrays["weights"] = weights
    width = int(blocks.max())
    tables = chance.integers(0, 50, (len(lengths), width))
    summaries = {
        "bounds": ("bounds", np.sort(chance.standard_normal((50, KV_HEADS, 2, HEAD_SIZE)).astype(np.float32), 2)),
        "means": ("key_sums", chance.integers(-(2**14), 2**14, (50, KV_HEADS, HEAD_SIZE), np.int32)),
    }
    arrays |= dict(summaries[name] for name in policy.summaries)
    return SparseView(
        tables=tables, step=step, layer=-1 if policy.per == "step" else 3, block_size=block_size, lengths=lengths, keep=keep,
        first=policy.first, last=policy.last, by_head=policy.per == "head", **arrays,
    )  # fmt: skip


def random_prompts(policy: SparsePolicy, chance: np.random.Generator, step: int) -> PromptView:
    """Return a step of prompts as the policy would get it in an engine."""
    block_size, tile = int(chance.choice([16, 64])), int(chance.choice([16, 32, 96]))
    begins, ends, sequences = [], [], []
    for sequence in range(int(chance.integers(1, 4))):
        past, new = (int(chance.integers(low, 40 * block_size)) for low in (0, 1))
        firsts = np.arange(past, past + new, tile)
        begins.append(firsts)
        ends.append(np.minimum(firsts + tile, past + new))
        sequences.append(np.full(len(firsts), sequence))
    before, blocks = np.concatenate(begins) // block_size, -(-np.concatenate(ends) // block_size)
    keep = np.array([policy.budget(each) for each in blocks.tolist()], np.int64)
    return PromptView(step, block_size, np.concatenate(sequences), before, blocks, np.clip(keep - blocks + before, 0, before))


def random_drops(policy: SparsePolicy, chance: np.random.Generator) -> DropView:
    """Return sequences after a step as the policy would get them in an engine: each has more blocks than its budget."""
    block_size, lengths, positions, weights, held, keep = int(chance.choice([16, 64])), [], [], [], [], []
    for _ in range(int(chance.integers(1, 9))):
        lengths.append(int(chance.integers(1, LONGEST * block_size)))
        whole = -(-lengths[-1] // block_size)
        left = np.unique(np.r_[0, chance.integers(0, whole, int(chance.integers(1, whole + 1))), whole - 1])
        positions.append(left)
        weights.append(chance.random((KV_HEADS, len(left))).astype(np.float32))
        gap = np.argmin(np.r_[left == np.arange(len(left)), False])
        held.append(int(chance.integers(0, min(int(gap), len(left) - 1) + 1)))
        keep.append(max(1, policy.budget(whole)))
    return DropView(
        block_size=block_size, lengths=np.array(lengths), positions=positions, weights=weights if policy.observed else [],
        held=np.array(held), keep=np.array(keep), first=policy.first, last=policy.last,
    )  # fmt: skip


def _built(make: Make, report: Report) -> SparsePolicy:
    policy = make()
    if not (isinstance(getattr(policy, "name", None), str) and policy.name):
        report("builds", "it has no name; give the class a text `name`.")
        raise Broke
    if fault := wrong_kind(policy):
        report("kind", f"it {fault}.")
        raise Broke
    return policy


def _guarded(ask: Callable, report: Report) -> object:
    try:
        return ask()
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"it raised {type(error).__name__}: {error}")
        raise Broke from error


SUITE = Suite(
    "sparse policy", RULES, {"budgets": Scenario(budgets), "steps": Scenario(steps, is_random=True)}, example={"share": 0.5}
)
