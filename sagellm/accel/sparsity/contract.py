"""Contract of a sparse policy: `sagellm check sparsity module:Class`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sagellm.accel.sparsity.base import PER, WEIGHTS, SparsePolicy, SparseView, wrong_with
from sagellm.core.contract import Broke, Played, Report, Scenario, Suite

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "has a name and can be built",
    "kind": "has a `per` and `weights` that engines know, and weights only if it chooses for layers",
    "raises_nothing": "raises nothing",
    "budget": "reads between 1 and all blocks of a sequence, and not fewer of a longer one",
    "choice": "chooses as many blocks as its budget, rising, the last block included",
    "ends": "always reads its `first` and `last` blocks",
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
        view = random_view(policy, chance, step)
        kept = replace(view, queries=view.queries.copy(), weights=view.weights.copy(), lengths=view.lengths.copy())
        chosen = _guarded(lambda given=view: list(policy.select_blocks(given)), report)
        for name in ("queries", "weights", "lengths"):
            if not np.array_equal(getattr(view, name), getattr(kept, name)):
                report("changes_nothing", f"it has changed `{name}` of the view.")
        wrong = _guarded(lambda given=view, found=chosen: wrong_with(found, given, KV_HEADS), report)
        if wrong:
            report("choice", f"{wrong}.")
            raise Broke
        for positions, keep, blocks in zip(chosen, view.keep.tolist(), view.num_blocks.tolist(), strict=True):
            ends = {*range(min(policy.first, blocks)), *range(max(0, blocks - policy.last), blocks)}
            missing = [ends - set(row) for row in np.atleast_2d(positions).tolist()]
            if keep >= len(ends) and any(missing):
                report("ends", f"of {blocks} blocks it left out {sorted(set.union(*missing))}.")
        again = _guarded(lambda given=kept: list(twin.select_blocks(given)), report)
        if len(again) != len(chosen) or any(not np.array_equal(a, b) for a, b in zip(chosen, again, strict=True)):
            report("deterministic", "another object of the class chose other blocks.")
    return Played(60, set(RULES) - {"budget"})


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
    return SparseView(
        step=step, layer=-1 if policy.per == "step" else 3, block_size=block_size, lengths=lengths, keep=keep,
        first=policy.first, last=policy.last, by_head=policy.per == "head", **arrays,
    )  # fmt: skip


def _built(make: Make, report: Report) -> SparsePolicy:
    policy = make()
    if not (isinstance(getattr(policy, "name", None), str) and policy.name):
        report("builds", "it has no name; give the class a text `name`.")
        raise Broke
    if policy.per not in PER or policy.weights not in WEIGHTS or (policy.per == "step" and policy.weights):
        report("kind", f"it has per {policy.per!r} and weights {policy.weights!r}.")
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
