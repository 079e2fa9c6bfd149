"""The patch files: unified diffs with no context, of which only insertions are allowed.

A patch quotes no upstream line, so the project redistributes nothing of LMDeploy. The hashes of the
manifest guard better than context lines would: a patch fits exactly one text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sagellm.core.errors import PatchError

_HUNK = re.compile(rb"^@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@$")


@dataclass(frozen=True)
class Hunk:
    """Lines to insert behind line `after` of the file as the earlier patches of the series leave it (0: on top)."""

    after: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """Changes of one patch to one file; `path` counts from the root of the LMDeploy repository."""

    path: str
    new: bool
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One patch file. `header` is free text in front of the first file: what it opens, and why."""

    name: str
    header: str
    files: tuple[FileDiff, ...]

    @property
    def number(self) -> str:
        """The four digits in front of the name, which the markers quote."""
        return self.name[:4]


def format_patch(patch: Patch) -> bytes:
    """The text of a patch file; `parse_patch` reads it back to an equal object."""
    parts = [patch.header.rstrip("\n").encode(), b"\n\n"]
    for file in patch.files:
        parts.append(f"--- {'/dev/null' if file.new else 'a/' + file.path}\n+++ b/{file.path}\n".encode())
        shift = 0
        for hunk in file.hunks:
            parts.append(f"@@ -{hunk.after},0 +{hunk.after + shift + 1},{len(hunk.lines)} @@\n".encode())
            parts.extend(b"+" + line for line in hunk.lines)
            shift += len(hunk.lines)
    return b"".join(parts)


def parse_patch(name: str, data: bytes) -> Patch:
    """Read a patch file.

    Raises:
        PatchError: for anything that is not an insertion, with the line of the patch file where it stands.
    """
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    at = next((i for i in range(len(lines)) if _starts_file(lines, i)), len(lines))
    header = b"\n".join(lines[:at]).decode().rstrip("\n")
    files: list[FileDiff] = []
    while at < len(lines):
        if not _starts_file(lines, at):
            raise _unreadable(name, lines, at, "'--- a/PATH' with '+++ b/PATH' below it, or a '@@ -A,0 +B,N @@' line")
        file, at = _parse_file(name, lines, at)
        if any(file.path == other.path for other in files):
            raise PatchError(f"{name} has two sections for {file.path}; one is allowed: run --refresh")
        files.append(file)
    return Patch(name, header, tuple(files))


def _starts_file(lines: list[bytes], at: int) -> bool:
    old_ok = lines[at] == b"--- /dev/null" or lines[at].startswith(b"--- a/")
    return old_ok and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ b/")


def _parse_file(name: str, lines: list[bytes], at: int) -> tuple[FileDiff, int]:
    new = lines[at] == b"--- /dev/null"
    path = lines[at + 1][len(b"+++ b/") :].decode()
    if (not new and lines[at] != b"--- a/" + path.encode()) or ".." in path.split("/") or path.startswith("/"):
        raise _unreadable(name, lines, at, "one path, inside the tree, on both of these lines")
    at += 2
    hunks: list[Hunk] = []
    shift = 0
    while at < len(lines) and (match := _HUNK.match(lines[at])):
        after, start, count = int(match[1]), int(match[2]), int(match[3] or 1)
        if start != after + shift + 1 or count < 1 or (hunks and after <= hunks[-1].after):
            raise _unreadable(name, lines, at, "line numbers that follow from the hunks above")
        body = lines[at + 1 : at + 1 + count]
        bad = next((i for i, line in enumerate(body) if not line.startswith(b"+")), None)
        if bad is not None or len(body) != count:
            raise _unreadable(name, lines, at + 1 + (len(body) if bad is None else bad), f"{count} inserted lines")
        hunks.append(Hunk(after, tuple(line[1:] + b"\n" for line in body)))
        shift += count
        at += 1 + count
    if not hunks or (new and (len(hunks) != 1 or hunks[0].after != 0)):
        raise _unreadable(name, lines, at, f"the hunks of {path} (exactly one, at line 0, for a new file)")
    return FileDiff(path, new, tuple(hunks)), at


def _unreadable(name: str, lines: list[bytes], at: int, wanted: str) -> PatchError:
    got = lines[at].decode(errors="replace")[:80] if at < len(lines) else "the end of the file"
    return PatchError(
        f"{name}, line {at + 1}: got {got!r}, wanted {wanted}. Patches of this series only insert lines, without "
        "context; edit a patched tree and run --refresh rather than the patch file"
    )
