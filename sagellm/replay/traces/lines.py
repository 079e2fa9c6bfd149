"""A trace file as numbered lines, and what becomes of those that are malformed."""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sagellm.core.errors import TraceError

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
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
        return TraceError(f"{self.file} holds no requests{skipped.rstrip('.')}. Give a trace with at least one.")


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


def open_text(path: Path) -> TextFile:
    """Read a file, plain or gzip, as bytes.

    Raises:
        TraceError: missing, unreadable, damaged, empty, or not UTF-8 by its first bytes.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(
            f"{path}: no such file. Give a trace file, or a generator such as zipf:requests=1000."
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}.") from None
    data, cut = inflated(path, raw)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:64]:
        raise TraceError(f"{path}: is UTF-16 text, or no text at all; save it as UTF-8.")
    data = data.removeprefix(BOM)
    if not data.strip():
        why = f"{cut.rstrip('.')}, and no whole line comes before" if cut else "it is empty"
        raise TraceError(f"{path}: {why}; a trace has at least one request.")
    return TextFile(str(path), data.splitlines(), hashlib.sha256(raw).hexdigest(), cut, data.endswith((b"\n", b"\r")))


def inflated(path: Path, raw: bytes) -> tuple[bytes, str]:
    """(text of a file, plain or gzip; why it ends early, or empty). A gzip stream that ends early gives its whole lines.

    Raises:
        TraceError: damaged gzip. Where the damage is cannot be told, and some of what it gives may look right.
    """
    if raw[:2] != GZIP:
        return raw, ""
    try:
        return gzip.decompress(raw), ""
    except EOFError:
        text, _ = _as_far_as_it_goes(raw)
        return text[: text.rfind(b"\n") + 1], "the gzip stream ends early."
    except (gzip.BadGzipFile, zlib.error) as error:
        text, is_whole = _as_far_as_it_goes(raw)
        if is_whole:
            return text, "what follows the end of the gzip stream is no gzip."
        raise TraceError(
            f"{path}: the gzip stream is damaged ({error}), so nothing in it can be relied on; get the file again."
        ) from None


def _as_far_as_it_goes(raw: bytes) -> tuple[bytes, bool]:
    """(text, whether each stream that begins comes to its end, with the right checksum)."""
    parts = []
    while raw[:2] == GZIP:
        stream = zlib.decompressobj(wbits=31)
        try:
            parts.append(stream.decompress(raw))
        except zlib.error:
            return b"".join(parts), False
        if not stream.eof:
            return b"".join(parts), False
        raw = stream.unused_data
    return b"".join(parts), True
