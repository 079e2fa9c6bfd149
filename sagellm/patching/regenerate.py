"""Making the patch files from an edited tree (`--refresh`).

The markers say which patch each inserted line belongs to, and dropping them gives the upstream text, so an edited tree
is all that is needed: no pristine copy, no diff heuristics. A tree that holds only some of the patches is merged into
the series; what the tree cannot show (C++ files, seen from a wheel) stays as it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sagellm.core.errors import PatchError
from sagellm.patching.diff import format_patch
from sagellm.patching.manifest import FILE_NAME, FileChange, Manifest, PatchEntry, load_manifest, sha256
from sagellm.patching.markers import owner_of, split
from sagellm.patching.patchset import default_directory, read_patch, read_series
from sagellm.patching.recipe import Recipe, build_recipes, conflicts, to_patch
from sagellm.patching.tree import Target, default_targets, locate, marked_files, tree_of, wheel_hashes

STUB_HEADER = "{title}\n\nOpens: (the place that this patch opens)\nWhy: (why it has to be in the engine's own text)"


@dataclass(frozen=True)
class RefreshReport:
    """Files that `--refresh` wrote (names in the patch directory), and notes about them."""

    target: Path
    written: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class _Work:
    """The series while it is being remade."""

    directory: Path
    names: tuple[str, ...]
    manifest: Manifest | None
    chosen: frozenset[str]
    headers: dict[str, str] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    upstream: dict[str, bytes | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def numbers(self) -> list[str]:
        return [name[:4] for name in self.names]


def refresh(
    target: Path | str | None = None, numbers: tuple[str, ...] = (), *, patches: Path | None = None
) -> RefreshReport:
    """Regenerate patch files and manifest from the marked lines of a tree.

    Args:
        target: The edited tree; may be left out when only one LMDeploy is at hand.
        numbers: Take only these patches from the tree and leave the others as the series has them; empty takes all.
        patches: The directory of the series.

    Raises:
        PatchError: an upstream line was changed or lost its marker, two patches meet, a number is not in the series.
    """
    tree = locate(_only_target() if target is None else target)
    work = _start(default_directory() if patches is None else patches, frozenset(numbers))
    _read_tree(work, tree)
    problems = conflicts(work.recipes)
    if problems:
        raise PatchError("nothing was written:\n  " + "\n  ".join(problems))
    written = _write(work, tree)
    return RefreshReport(tree.package, written, tuple(work.notes))


def _only_target() -> Path:
    targets = default_targets()
    if len(targets) > 1:
        raise PatchError(f"refresh from which tree? Name one with --target: {', '.join(map(str, targets))}")
    return targets[0]


def _start(directory: Path, chosen: frozenset[str]) -> _Work:
    names = read_series(directory)
    known = {name[:4] for name in names}
    if chosen - known:
        raise PatchError(f"not in the series: {', '.join(sorted(chosen - known))}; it has {', '.join(sorted(known))}")
    manifest = load_manifest(directory / FILE_NAME) if (directory / FILE_NAME).exists() else None
    work = _Work(directory, names, manifest, chosen or frozenset(known))
    present = [read_patch(directory, name) for name in names if (directory / name).exists()]
    work.headers = {patch.name: patch.header for patch in present}
    # Conflicts among the old patches may be what this refresh mends; only the new ones count.
    work.recipes = build_recipes(present)[0]
    return work


def _read_tree(work: _Work, tree: Target) -> None:
    version = tree.version()
    wanted = work.manifest.version if work.manifest else _pinned_version(work.directory)[0]
    if version != wanted:
        raise PatchError(
            f"{tree.package} is LMDeploy {version}; the series is for {wanted}: edit a tree of that version"
        )
    wheel = wheel_hashes(tree, wanted)
    in_tree = dict(marked_files(tree))
    for path in sorted({*work.recipes, *in_tree}):
        if tree.holds(tree_of(path)):
            _read_file(work, tree, path, in_tree.get(path), wheel)


def _read_file(work: _Work, tree: Target, path: str, marked: bytes | None, wheel: dict[str, str]) -> None:
    text = tree.read(path) if marked is None else marked
    old = work.recipes.pop(path, Recipe(path))
    if text is None and old.owner is None:
        raise PatchError(f"{path} is not in {tree.package}; upstream files cannot be removed: restore it")
    owner = owner_of(text, path) if text is not None else None
    base, insertions = ([], []) if text is None else split(text, path, owner)
    unknown = {*(item.patch for item in insertions), *([owner] if owner else [])} - set(work.numbers)
    if unknown:
        raise PatchError(f"{path} is marked for {', '.join(sorted(unknown))}, which the series does not list: add it")
    if owner is None and text is not None and old.owner is None:
        work.upstream[path] = b"".join(base)
        _verify_upstream(work, path, sha256(b"".join(base)), wheel)
    elif owner is None and text is not None:
        raise PatchError(
            f"{path} is added by {old.owner}, but its first line is no longer that patch's marker: restore it"
        )
    new = Recipe(path, owner, tuple(base) if owner else None, insertions)
    merged = _merge(work, old, new)
    if merged.patches:
        work.recipes[path] = merged


def _verify_upstream(work: _Work, path: str, got: str | None, wheel: dict[str, str]) -> None:
    chain = work.manifest.chains().get(path) if work.manifest else None
    wanted = chain.pristine if chain else wheel.get(path)
    if tree_of(path) == "python" and wheel and path not in wheel:
        raise PatchError(
            f"{path} is not LMDeploy's; a file of ours starts with a marker, as in '# sage:{work.numbers[0]} what for'"
        )
    if wanted is None:
        work.notes.append(f"{path}: no wheel at hand has it; its unmarked lines were taken for upstream's")
    elif got != wanted:
        raise PatchError(
            f"{path}: its unmarked lines hash to {got}, LMDeploy's file to {wanted}. An upstream line was changed, or "
            "an inserted one has no marker: every inserted line ends with its patch's, and no other line may change"
        )


def _merge(work: _Work, old: Recipe, new: Recipe) -> Recipe:
    """The file with the chosen patches as `new` has them and the others as `old` has them."""
    for number in sorted(set(work.numbers) - work.chosen):
        if [i.lines for i in old.insertions if i.patch == number] != [
            i.lines for i in new.insertions if i.patch == number
        ]:
            work.notes.append(f"{new.path}: {number} in this tree is not what the series has; it was not asked for")
    owner, base = new.owner, new.base
    if (new.owner or old.owner) not in work.chosen and (new.owner or old.owner):
        owner, base = old.owner, old.base
    insertions = [item for item in new.insertions if item.patch in work.chosen]
    insertions += [item for item in old.insertions if item.patch not in work.chosen]
    if owner is None and base is None and (new.owner or old.owner):
        insertions = []  # our file is gone, and what later patches inserted into it with it
    return Recipe(new.path, owner, base, sorted(insertions, key=lambda item: (item.line, item.patch)))


def _write(work: _Work, tree: Target) -> tuple[str, ...]:
    touched = {number for recipe in work.recipes.values() for number in recipe.patches}
    written = []
    for name in work.names:
        if name[:4] not in touched and not (work.directory / name).exists():
            work.notes.append(f"{name} is in the series, but no line is marked for it: not written")
            continue
        header = work.headers.get(name) or STUB_HEADER.format(title=name.removesuffix(".patch"))
        if _replace(work.directory / name, format_patch(to_patch(name, header, work.recipes))):
            written.append(name)
    if _replace(work.directory / FILE_NAME, _manifest(work).dumps()):
        written.append(FILE_NAME)
    return tuple(written)


def _manifest(work: _Work) -> Manifest:
    version, commit = (
        (work.manifest.version, work.manifest.commit) if work.manifest else _pinned_version(work.directory)
    )
    old = {(p.name, f.path): f for p in work.manifest.patches for f in p.files} if work.manifest else {}
    entries = []
    for at, name in enumerate(work.names):
        if not (work.directory / name).exists():
            continue
        files = []
        for path, recipe in sorted(work.recipes.items()):
            if name[:4] not in recipe.patches:
                continue
            if recipe.owner is None and path not in work.upstream:
                if (name, path) not in old:
                    raise PatchError(f"{FILE_NAME} lacks {path} of {name}: refresh from a tree that holds it first")
                files.append(old[name, path])  # this tree does not hold the file, so nothing about it has changed
                continue
            before, after = (sha256(recipe.text(work.upstream.get(path), work.numbers[:end])) for end in (at, at + 1))
            files.append(FileChange(path, tree_of(path), before is None, before, after or ""))
        entries.append(PatchEntry(name, tuple(files)))
    return Manifest(version, commit, tuple(entries))


def _pinned_version(directory: Path) -> tuple[str, str]:
    """Version and commit from third_party/VERSION, for a series that has no manifest yet."""
    pin = directory.absolute().parent / "third_party" / "VERSION"
    if not pin.is_file():
        pin = default_directory().parent / "third_party" / "VERSION"
    try:
        fields = dict(line.split(maxsplit=1) for line in pin.read_text().splitlines() if line.strip())
        return fields["tag"].strip().removeprefix("v"), fields["commit"].strip()
    except (OSError, ValueError, KeyError) as error:
        raise PatchError(f"cannot tell which LMDeploy the series is for: {pin}: {error!r}") from error


def _replace(path: Path, text: bytes) -> bool:
    """Write `text` in one step; False, and no new timestamp, when it is there already."""
    if path.exists() and path.read_bytes() == text:
        return False
    temporary = path.with_name(f".{path.name}.sage-tmp")
    temporary.write_bytes(text)
    os.replace(temporary, path)
    return True
