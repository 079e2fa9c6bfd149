"""Marked text: which lines of a file are upstream's and which patch inserted each of the others.

Every line that a patch inserts into a file of LMDeploy ends with a comment that names the patch (`# sage:0003`, in C++
`// sage:0003`). So a patched file carries its own past: without its marked lines it *is* the upstream file, byte for
byte, and a hash can prove it. A file that is ours as a whole says so at the start of its first line instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sagellm.core.errors import PatchError

C_SUFFIXES = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"})
TEXT_SUFFIXES = C_SUFFIXES | {".py", ".pyi", ".txt", ".cmake"}

_INSERTED = {mark: re.compile(rb"(?:^|\s)" + mark + rb" ?sage:(\d{4})\s*$") for mark in (b"#", b"//")}
_OWNED = {mark: re.compile(rb"^" + mark + rb" ?sage:(\d{4})(?!\d)") for mark in (b"#", b"//")}


@dataclass(frozen=True)
class Insertion:
    """Lines that one patch puts behind the first `line` base lines of a file (0: on top).

    The base lines are upstream's lines, or our own in a file that a patch adds. Counting in them, and not in the lines
    of a half-patched file, makes places comparable between patches. Every element of `lines` ends with a newline.
    """

    patch: str
    line: int
    lines: tuple[bytes, ...]


def comment_mark(path: str) -> bytes:
    """How a comment starts in the language of `path`."""
    return b"//" if PurePosixPath(path).suffix in C_SUFFIXES else b"#"


def marker_of(line: bytes, path: str) -> str | None:
    """The number of the patch that inserted `line`, or None for a line without a marker."""
    if b"sage:" not in line:
        return None
    match = _INSERTED[comment_mark(path)].search(line)
    return match[1].decode() if match else None


def owner_of(text: bytes, path: str) -> str | None:
    """The number of the patch that adds this file as a whole, or None for a file of upstream's."""
    match = _OWNED[comment_mark(path)].match(text[:64])
    return match[1].decode() if match else None


def lines_of(text: bytes, path: str) -> list[bytes]:
    """`text` cut after every newline and nowhere else (`bytes.splitlines` would also cut at a lone carriage return)."""
    if text and not text.endswith(b"\n"):
        raise PatchError(f"{path} does not end with a newline; a patch can only be made for whole lines: add one")
    return [line + b"\n" for line in text.split(b"\n")[:-1]]


def split(text: bytes, path: str, owner: str | None = None) -> tuple[list[bytes], list[Insertion]]:
    """Part `text` into its base lines and what the patches inserted, in file order.

    `owner` is the patch that adds the file: in such a file its own marker is just text.
    """
    base: list[bytes] = []
    insertions: list[Insertion] = []
    run: list[bytes] = []
    run_patch: str | None = None
    for line in lines_of(text, path):
        patch = marker_of(line, path)
        patch = None if patch == owner else patch
        if run_patch is not None and patch != run_patch:
            insertions.append(Insertion(run_patch, len(base), tuple(run)))
            run = []
        if patch is None:
            base.append(line)
        else:
            run.append(line)
        run_patch = patch
    if run_patch is not None:
        insertions.append(Insertion(run_patch, len(base), tuple(run)))
    return base, insertions


def strip(text: bytes, path: str, owner: str | None = None) -> bytes:
    """`text` without its marked lines."""
    return b"".join(split(text, path, owner)[0])


def render(base: Sequence[bytes], insertions: Iterable[Insertion], patches: Collection[str]) -> bytes:
    """The base lines with the insertions of `patches` in their places."""
    parts: list[bytes] = []
    done = 0
    for insertion in sorted(insertions, key=lambda item: (item.line, item.patch)):
        if insertion.patch in patches:
            parts.extend(base[done : insertion.line])
            parts.extend(insertion.lines)
            done = insertion.line
    parts.extend(base[done:])
    return b"".join(parts)
