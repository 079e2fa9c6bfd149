"""A trace file as numbered lines, and what becomes of those that are malformed."""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sagellm.core.errors import TraceError

BOM = b"\xef\xbb\xbf"
MAX_REASONS = 5


@dataclass
class BadLines:
    """Judge of malformed lines: the first one ends the reading, or with `skip` each is counted."""

    file: str
    skip: bool = False
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, number: int, reason: str) -> None:
        """Raises TraceError, unless lines may be skipped."""
        if not self.skip:
            raise TraceError(
                f"{self.file}, line {number}: {reason} Mend the line, or leave such lines out with --skip-bad."
            )
        self.count += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(f"line {number}: {reason}")

    def nothing_left(self) -> TraceError:
        skipped = f"; {self.count} lines were skipped, the first: {self.reasons[0]}" if self.count else ""
        return TraceError(f"{self.file} holds no requests{skipped}. Give a trace with at least one.")


class Broken(ValueError):
    """A line that cannot be used; the message is a sentence."""


@dataclass(frozen=True)
class TextFile:
    """`lines`: without line ends. `cut`: why the text ends early, or empty. `has_end`: the last line has its line end."""

    name: str
    lines: list[bytes]
    sha256: str
    cut: str
    has_end: bool

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of the lines that are not blank."""
        return ((number, line) for number, line in enumerate(self.lines, 1) if line and not line.isspace())

    def parse(self, function: Callable[[bytes], object], bad: BadLines) -> Iterator[tuple[int, object]]:
        """(number, result) of each line that is not blank and that `function` takes; Broken goes to `bad`."""
        for number, line in self.numbered():
            try:
                yield number, function(line)
            except Broken as error:
                is_cut = number == len(self.lines) and not self.has_end
                bad.add(number, f"the file ends in the middle of the line ({error})." if is_cut else str(error))
        if self.cut:
            bad.add(len(self.lines), self.cut)


def open_text(path: Path) -> TextFile:
    """Read a file, plain or gzip, as bytes.

    Raises:
        TraceError: missing, unreadable, empty, or not UTF-8 by its first bytes.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(
            f"{path}: no such file. Give a trace file, or a generator such as zipf:requests=1000."
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}.") from None
    data, cut = _inflate(raw) if raw[:2] == b"\x1f\x8b" else (raw, "")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise TraceError(f"{path}: is UTF-16 text; save it as UTF-8.")
    data = data.removeprefix(BOM)
    if not data.strip():
        raise TraceError(
            f"{path}: is empty{' (' + cut.rstrip('.') + ')' if cut else ''}; a trace has at least one request."
        )
    return TextFile(str(path), data.splitlines(), hashlib.sha256(raw).hexdigest(), cut, data.endswith((b"\n", b"\r")))


def _inflate(raw: bytes) -> tuple[bytes, str]:
    """(text, why it ends early); a damaged file gives what comes before the damage."""
    try:
        return gzip.decompress(raw), ""
    except (EOFError, zlib.error, gzip.BadGzipFile):
        stream = zlib.decompressobj(wbits=31)
        text = b""
        try:
            for start in range(0, len(raw), 4096):
                text += stream.decompress(raw[start : start + 4096])
        except zlib.error:
            return text, "the gzip stream is damaged here."
        return text, "the gzip stream ends early."
