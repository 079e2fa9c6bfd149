"""Applying the series to a tree and taking it out again.

Everything is computed and every hash compared before the first file is written. There are no steps to resume:
each file goes back to its upstream text (the marked lines are dropped) and on to its final text in one go. So running
again mends a tree that an earlier run left half-done.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sagellm.core.errors import PatchError
from sagellm.patching.manifest import Chain, sha256
from sagellm.patching.markers import owner_of, strip
from sagellm.patching.patchset import PatchSet, load_patchset
from sagellm.patching.state import (
    FOREIGN,
    FileState,
    TreeState,
    file_states,
    intact,
    tree_state,
    wrong_version,
)
from sagellm.patching.tree import Target, default_target, locate, locked, marked_files, wheel_hashes
from sagellm.patching.write import clean, prune, remove, write_atomically


@dataclass(frozen=True)
class Plan:
    """Pending changes of one tree: path to new text, None where a file of ours goes. Nothing is written yet."""

    target: Target
    patchset: PatchSet
    reverse: bool
    force: bool
    changes: dict[str, bytes | None]


@dataclass(frozen=True)
class Outcome:
    """Changes made to one tree, and its state when read back."""

    target: Path
    written: tuple[str, ...]
    removed: tuple[str, ...]
    state: TreeState


@dataclass(frozen=True)
class CheckReport:
    """Whether the series would apply: `problems` is empty when it would, `pending` are the files it would write."""

    target: Path
    problems: tuple[str, ...]
    pending: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No problem found."""
        return not self.problems


def apply(target: Path | str | None = None, *, patches: Path | None = None, force: bool = False) -> Outcome:
    """Bring a tree (default: the installed LMDeploy) to the fully patched state. Safe to repeat.

    `force` also takes files whose upstream lines are intact but whose marked lines are not those of this series. Another
    revision of it leaves such a tree. Edits to marked lines are lost then.

    Raises:
        PatchError: another LMDeploy version, a file of unknown origin, a defect of the series. Nothing is written.
    """
    return _run(target, patches, force, reverse=False)


def reverse(target: Path | str | None = None, *, patches: Path | None = None, force: bool = False) -> Outcome:
    """Bring a tree back to what LMDeploy ships, byte for byte. Arguments and errors as for `apply`."""
    return _run(target, patches, force, reverse=True)


def check(target: Path | str | None = None, *, patches: Path | None = None) -> CheckReport:
    """Try the series on a tree without writing: defects, patches that meet, foreign files, hashes at every step."""
    patchset = load_patchset(patches)
    tree = locate(default_target() if target is None else target)
    problems = list(patchset.problems)
    pending: tuple[str, ...] = ()
    try:
        pending = tuple(make_plan(tree, patchset).changes)
        problems += [] if problems else _steps(tree, patchset)
    except PatchError as error:
        problems.append(str(error))
    return CheckReport(tree.package, tuple(dict.fromkeys(problems)), pending)


def _run(target: Path | str | None, patches: Path | None, force: bool, *, reverse: bool) -> Outcome:
    patchset = load_patchset(patches)
    tree = locate(default_target() if target is None else target)
    return carry_out(make_plan(tree, patchset, reverse=reverse, force=force))


def make_plan(target: Target, patchset: PatchSet, *, reverse: bool = False, force: bool = False) -> Plan:
    """Compute the new text of every file that is not yet as it should be, and check all hashes.

    Raises:
        PatchError: as for `apply`; it names every file that is in the way, not just the first.
    """
    version, wanted = target.version(), patchset.manifest.version
    if version != wanted:
        raise PatchError(wrong_version(target, version, wanted))
    if patchset.problems and not reverse:
        raise PatchError("the series is not sound:\n  " + "\n  ".join(patchset.problems))
    states = file_states(target, patchset) + _strays(target, patchset)
    _refuse_foreign(target, states, force)
    changes: dict[str, bytes | None] = {}
    for state in states:
        stray = not state.chain.patches
        goal = state.chain.pristine if reverse or stray else state.chain.patched
        if state.found != goal:
            text = _new_text(target, patchset, state, reverse or stray)
            if sha256(text) != goal:
                raise PatchError(
                    f"{state.chain.path} would become {sha256(text)}, the manifest wants {goal}: the patch files and "
                    "the manifest differ; restore them, or run --refresh. Nothing was written"
                )
            changes[state.chain.path] = text
    return Plan(target, patchset, reverse, force, changes)


def _new_text(target: Target, patchset: PatchSet, state: FileState, reverse: bool) -> bytes | None:
    path, chain = state.chain.path, state.chain
    text = target.read(path)
    upstream = None if chain.pristine is None or text is None else strip(text, path)
    return upstream if reverse else patchset.recipes[path].text(upstream, chain.patches)


def _strays(target: Target, patchset: PatchSet) -> list[FileState]:
    """Marked files that the series does not know: left by another revision of it, or not refreshed yet."""
    strays: list[FileState] = []
    wheel: dict[str, str] | None = None
    for path, text in marked_files(target):
        if path not in patchset.chains:
            wheel = wheel_hashes(target, patchset.manifest.version) if wheel is None else wheel
            pristine = None if owner_of(text, path) else wheel.get(path, "unknown")
            chain = Chain(path, "stray", (pristine,), ())
            strays.append(FileState(chain, sha256(text), None))
    return strays


def _refuse_foreign(target: Target, states: list[FileState], force: bool) -> None:
    foreign = [state for state in states if state.foreign]
    only_marks = all(intact(target, state) for state in foreign)
    if not foreign or (force and only_marks):
        return
    names = "\n  ".join(state.explain() for state in foreign)
    if only_marks:
        way = (
            "Only marked lines differ, upstream's are intact: an edited tree, or one that another revision of the "
            "series was applied to. --force puts this series in their place, --refresh makes a series of them"
        )
    else:
        way = "Restore the file, or reinstall LMDeploy, and run again"
    raise PatchError(
        f"{target.package} holds files that neither LMDeploy nor this series made:\n  {names}\n"
        f"They were left alone and nothing was written. {way}"
    )


def carry_out(plan: Plan) -> Outcome:
    """Write what `plan` says, file by file, each in one step, and read everything back.

    Files of ours come first on the way in and last on the way out, so that no upstream file ever imports a module that
    is not there.
    """
    target, patchset = plan.target, plan.patchset
    try:
        with locked(target):
            clean(target.path(chain.path).parent for chain in patchset.chains.values() if target.holds(chain.tree))
            changes = make_plan(target, patchset, reverse=plan.reverse, force=plan.force).changes
            ours = {path for path, chain in patchset.chains.items() if chain.pristine is None}
            for path in sorted(changes, key=lambda path: ((path in ours) == plan.reverse, path)):
                text = changes[path]
                if text is None:
                    remove(target.path(path), target.package if path.startswith("lmdeploy/") else target.root)
                else:
                    write_atomically(target.path(path), text, like=target.package / "version.py")
            if plan.reverse:
                for path in ours:
                    prune(target.path(path).parent, target.package if path.startswith("lmdeploy/") else target.root)
    except OSError as error:
        raise PatchError(f"cannot change {error.filename}: {error.strerror}; run again when that is mended") from error
    return _read_back(plan, changes)


def _read_back(plan: Plan, changes: dict[str, bytes | None]) -> Outcome:
    state = tree_state(plan.target, plan.patchset)
    for path, text in changes.items():
        if plan.target.read(path) != text:
            raise PatchError(
                f"{plan.target.path(path)} does not hold what was written to it; is another program at it?"
            )
    if state.state == FOREIGN:
        raise PatchError(f"{plan.target.package}: {state.reason}")
    written = tuple(path for path, text in changes.items() if text is not None)
    removed = tuple(path for path, text in changes.items() if text is None)
    return Outcome(plan.target.package, written, removed, state)


def _steps(target: Target, patchset: PatchSet) -> list[str]:
    """Hash every file after every patch, from its upstream text, against the manifest."""
    problems = []
    for path, chain in patchset.chains.items():
        if not target.holds(chain.tree):
            continue
        text = target.read(path)
        upstream = None if chain.pristine is None or text is None else strip(text, path)
        for step, (number, wanted) in enumerate(zip(chain.patches, chain.states[1:], strict=True), start=1):
            got = sha256(patchset.recipes[path].text(upstream, chain.patches[:step]))
            if got != wanted:
                problems.append(f"{number} turns {path} into {got}, the manifest says {wanted}: run --refresh")
    return problems
