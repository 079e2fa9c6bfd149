"""Lines of an engine's record for checks, and messages about those that are not reproduced."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagellm.core.errors import TraceError
from sagellm.core.events import HEAD
from sagellm.replay.traces.lines import inflated

__all__ = ["HEAD", "Checked", "Difference", "check_number", "record_lines"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the replay parts from the record. `field` is empty where one of the two has no such line."""

    line: int
    event: str
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        place = f"line {self.line}, {self.event}" + (f", {self.field}" if self.field else "")
        return f"{place}: recorded {self.recorded!r}, replayed {self.replayed!r}"


@dataclass(slots=True)
class Checked:
    """Result of a check of a record.

    Attributes:
        differences: in order of the file. A process of which there are `max_differences` is not followed further; those after
            that are not in here, and neither are they counted.
        gaps: (line, number expected, number got) where lines of a process are missing.
        truncated: the last line was cut off, as when a process was killed; it was left out.
        num_open: processes whose record stops without a `close`: what they did after it is unknown.
    """

    path: str
    differences: list[Difference] = field(default_factory=list)
    gaps: list[tuple[int, int, int]] = field(default_factory=list)
    truncated: bool = False
    num_open: int = 0

    @property
    def agrees(self) -> bool:
        """True if every line was there, and each came out as it was recorded."""
        return not self.differences and not self.gaps

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": self.path, "agrees": self.agrees, "truncated": self.truncated, "without_close": self.num_open,
            "gaps": [list(gap) for gap in self.gaps],
            "differences": [{name: getattr(each, name) for name in Difference.__slots__} for each in self.differences],
        }  # fmt: skip


def record_lines(path: Path, report: Checked) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, line) of each line that is whole. Raises TraceError: unreadable, or a line that is not from a record."""
    try:
        data, cut = inflated(path, path.read_bytes())
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}.") from None
    lines = data.split(b"\n")
    report.truncated = bool(lines.pop()) or bool(cut)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: not JSON: {error}.") from None
        if not isinstance(line, dict) or not isinstance(line.get("event"), str):
            raise TraceError(f"{path}, line {number}: no event; each line is an object with `event`.")
        yield number, line


def check_number(expected: int | None, number: int, line: dict[str, Any], report: Checked) -> int | None:
    """`expected`: the counter of the process's next line; returns that of the one after it. A gap goes into the report."""
    count = line.get("n")
    if type(count) is not int:
        return expected
    if expected is not None and count != expected:
        report.gaps.append((number, expected, count))
    return count + 1
