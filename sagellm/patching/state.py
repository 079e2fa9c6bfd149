"""In what state a tree is: the question that is asked at every start, answered from hashes alone."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from sagellm.core.errors import PatchError
from sagellm.patching.manifest import Chain, Manifest, sha256
from sagellm.patching.markers import owner_of, strip
from sagellm.patching.patchset import PatchSet, load_patchset
from sagellm.patching.tree import Target, default_target, installed_package, locate

APPLIED, NOT_APPLIED, PARTIAL, FOREIGN = "applied", "not applied", "partial", "foreign"


@dataclass(frozen=True)
class FileState:
    """One file of the series. `position` is how many of its patches it has seen; None: no text the series knows."""

    chain: Chain
    found: str | None
    position: int | None

    @property
    def foreign(self) -> bool:
        """Neither what LMDeploy ships nor what any patch of the series makes of it."""
        return self.position is None

    def explain(self) -> str:
        """The file with the hash that was found and those that were expected."""
        names = ("nothing there" if digest is None else digest for digest in (self.found, *self.ends))
        found, pristine, patched = names
        expected = f"    expected {pristine} (pristine)\n          or {patched} (patched)"
        return f"{self.chain.path}\n    found    {found}\n{expected}"

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """Pristine and fully patched hash."""
        return self.chain.pristine, self.chain.patched


@dataclass(frozen=True)
class PatchState:
    """One patch in one tree: applied, not applied, partial or foreign; `files` counts its files in this tree."""

    name: str
    state: str
    files: int


@dataclass(frozen=True)
class TreeState:
    """A tree and the series. `command` mends what is wrong (None when nothing is); `reason` says what that is."""

    target: Path
    version: str
    state: str
    patches: tuple[PatchState, ...]
    files: tuple[FileState, ...]
    reason: str | None
    command: str | None

    @property
    def applied(self) -> bool:
        """Whether every patch is there, whole."""
        return self.state == APPLIED


def status(target: Path | str | None = None, *, patches: Path | None = None) -> TreeState:
    """The state of a tree (default: the installed LMDeploy). Reads only the touched files; writes nothing.

    Raises:
        PatchError: when there is no LMDeploy there, or the series itself cannot be read.
    """
    return tree_state(locate(default_target() if target is None else target), load_patchset(patches))


def tree_state(target: Target, patchset: PatchSet) -> TreeState:
    """`status` for a tree and a series that are already at hand."""
    version = target.version()
    wanted = patchset.manifest.version
    files = tuple(file_states(target, patchset)) if version == wanted else ()
    overall = _overall(files) if version == wanted else FOREIGN
    patches = tuple(_patch_state(patchset.manifest, number, files, overall) for number in range(len(patchset.names)))
    reason = _reason(files, overall) if version == wanted else wrong_version(target, version, wanted)
    return TreeState(target.package, version, overall, patches, files, reason, _command(target, overall, files, wanted))


def wrong_version(target: Target, found: str, wanted: str) -> str:
    """The sentence for a tree of another version."""
    return (
        f"{target.package} is LMDeploy {found}; the series was made for {wanted} and for nothing else. "
        f"Install that one: pip install --no-deps lmdeploy=={wanted}"
    )


def file_states(target: Target, patchset: PatchSet) -> list[FileState]:
    """The state of every file of the series that belongs to this tree."""
    states = []
    for chain in patchset.chains.values():
        if target.holds(chain.tree):
            found = sha256(target.read(chain.path))
            position = chain.states.index(found) if found in chain.states else None
            states.append(FileState(chain, found, position))
    return states


def _overall(files: tuple[FileState, ...]) -> str:
    if any(file.foreign for file in files):
        return FOREIGN
    if all(file.position == len(file.chain.patches) for file in files):
        return APPLIED
    return PARTIAL if any(file.position for file in files) else NOT_APPLIED


def _patch_state(manifest: Manifest, index: int, files: tuple[FileState, ...], overall: str) -> PatchState:
    entry = manifest.patches[index]
    mine = [file for file in files if entry.number in file.chain.patches]
    if not mine:  # nothing of it belongs to this tree: it is as far as the others are
        return PatchState(entry.name, overall, 0)
    if any(file.foreign for file in mine):
        return PatchState(entry.name, FOREIGN, len(mine))
    done = sum((file.position or 0) > file.chain.patches.index(entry.number) for file in mine)
    state = APPLIED if done == len(mine) else PARTIAL if done else NOT_APPLIED
    return PatchState(entry.name, state, len(mine))


def _reason(files: tuple[FileState, ...], overall: str) -> str | None:
    if overall == APPLIED:
        return None
    if overall == NOT_APPLIED:
        return "no patch of the series is in this tree"
    if overall == PARTIAL:
        behind = [file.chain.path for file in files if file.position != len(file.chain.patches)]
        return f"half-patched; still to do: {', '.join(behind)}"
    foreign = [file.explain() for file in files if file.foreign]
    return "files that neither LMDeploy nor the series made:\n  " + "\n  ".join(foreign)


def intact(target: Target, state: FileState) -> bool:
    """Whether a foreign file is upstream's text, or none, plus marked lines that this series does not know."""
    text = target.read(state.chain.path)
    if text is None:
        return False
    if state.chain.pristine is None:
        return owner_of(text, state.chain.path) is not None
    try:
        return sha256(strip(text, state.chain.path)) == state.chain.pristine
    except PatchError:
        return False


def _command(target: Target, overall: str, files: tuple[FileState, ...], wanted: str) -> str | None:
    installed = installed_package()
    own = installed is not None and installed.resolve() == target.package.resolve()
    apply = "python -m sagellm.patching" + ("" if own else f" --target {shlex.quote(str(target.package))}")
    if overall != FOREIGN:
        return None if overall == APPLIED else apply
    foreign = [file for file in files if file.foreign]
    if foreign and all(intact(target, file) for file in foreign):
        return f"{apply} --force"
    root = shlex.quote(str(target.root))
    if own:
        restore = f"python -m pip install --force-reinstall --no-deps lmdeploy=={wanted}"
    elif target.has_cpp:
        restore = f"git -C {root} checkout v{wanted} -- ."
    else:
        restore = f"python -m pip install --upgrade --no-deps --target {root} lmdeploy=={wanted}"
    return f"{restore} && {apply}"
