"""Changes of the whole series, file by file, in base-line coordinates; and the patches that follow from it.

Patch files count lines in the text that the earlier patches leave behind, which makes them readable by other tools.
A recipe counts in upstream's lines, so that patches can be compared, merged and applied in one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from sagellm.core.errors import PatchError
from sagellm.patching.diff import FileDiff, Hunk, Patch
from sagellm.patching.markers import Insertion, lines_of, marker_of, owner_of, render


@dataclass
class Recipe:
    """Everything the series does to one file.

    `owner` is the patch that adds the file and `base` are then our lines; both are None for a file of upstream's.
    """

    path: str
    owner: str | None = None
    base: tuple[bytes, ...] | None = None
    insertions: list[Insertion] = field(default_factory=list)

    @property
    def patches(self) -> list[str]:
        """The patches that touch this file, in series order (numbers ascend in the series)."""
        return sorted({item.patch for item in self.insertions} | ({self.owner} if self.owner else set()))

    def text(self, upstream: bytes | None, patches: Collection[str]) -> bytes | None:
        """The file after `patches`; None while the patch that adds it is not among them."""
        if self.owner is None:
            assert upstream is not None
            return render(lines_of(upstream, self.path), self.insertions, patches)
        if self.owner not in patches:
            return None
        assert self.base is not None
        return render(self.base, self.insertions, patches)


def build_recipes(patches: Iterable[Patch]) -> tuple[dict[str, Recipe], list[str]]:
    """Merge a series into recipes, and list what is wrong with it (patches that meet, wrong or missing markers)."""
    recipes: dict[str, Recipe] = {}
    problems: list[str] = []
    for patch in patches:
        for file in patch.files:
            if file.new and file.path in recipes:
                raise PatchError(f"{patch.name} adds {file.path}, which an earlier patch has touched: run --refresh")
            recipe = recipes.setdefault(file.path, Recipe(file.path))
            if file.new:
                recipe.owner, recipe.base = patch.number, file.hunks[0].lines
                if owner_of(recipe.base[0], file.path) != patch.number:
                    problems.append(f"{patch.name}: the first line of {file.path} must be the marker of the patch")
                continue
            problems += _merge(recipe, patch, file)
    return recipes, problems + conflicts(recipes)


def _merge(recipe: Recipe, patch: Patch, file: FileDiff) -> list[str]:
    problems = []
    earlier = sorted(recipe.insertions, key=lambda item: (item.line, item.patch))
    for hunk in file.hunks:
        recipe.insertions.append(Insertion(patch.number, _base_line(hunk.after, earlier), hunk.lines))
        strangers = {marker_of(line, file.path) for line in hunk.lines} - {patch.number}
        if strangers:
            named = ", ".join(sorted(name or "no marker" for name in strangers))
            problems.append(f"{patch.name}: lines inserted into {file.path} behind line {hunk.after} carry {named}")
    return problems


def _base_line(after: int, earlier: list[Insertion]) -> int:
    """Line `after` of the patched text as a base line; a place in or beside an insertion is that insertion's place."""
    shift = 0
    for item in earlier:
        start = item.line + shift
        if after < start:
            break
        if after <= start + len(item.lines):
            return item.line
        shift += len(item.lines)
    return after - shift


def conflicts(recipes: dict[str, Recipe]) -> list[str]:
    """The places that two patches touch, one sentence each."""
    found = []
    for recipe in recipes.values():
        places: dict[int, list[str]] = {}
        for item in recipe.insertions:
            places.setdefault(item.line, []).append(item.patch)
        for line, patches in sorted(places.items()):
            if len(set(patches)) > 1:
                found.append(
                    f"{' and '.join(sorted(set(patches)))} both insert behind line {line} of {recipe.path}: the result "
                    "would depend on their order. Put an upstream line between them, or both into one patch"
                )
    return found


def to_patch(name: str, header: str, recipes: dict[str, Recipe]) -> Patch:
    """The patch `name` of the series that `recipes` describe."""
    number = name[:4]
    files = []
    for path in sorted(recipes):
        recipe = recipes[path]
        if recipe.owner == number:
            assert recipe.base is not None
            files.append(FileDiff(path, True, (Hunk(0, recipe.base),)))
            continue
        own = sorted((item for item in recipe.insertions if item.patch == number), key=lambda item: item.line)
        earlier = [item for item in recipe.insertions if item.patch < number]
        hunks = tuple(
            Hunk(item.line + sum(len(other.lines) for other in earlier if other.line < item.line), item.lines)
            for item in own
        )
        if hunks:
            files.append(FileDiff(path, False, hunks))
    return Patch(name, header, tuple(files))
