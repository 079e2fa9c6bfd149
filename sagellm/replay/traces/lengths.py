"""CSV files that tell lengths only. The shared tokens of such requests are unknown, so each has blocks of its own, unless
a column
names a conversation (`session`) or a common beginning (`prefix_id`, `prefix_length`).

Columns are found by name, whatever the case and the separators: BurstGPT's and Azure's among them. `timestamp` is in seconds
or a date, `timestamp_ms` in milliseconds.
"""

import csv
import math
from collections.abc import Iterator
from datetime import datetime, timezone

from sagellm.core.errors import TraceError
from sagellm.replay.base import DEFAULT_BLOCK_SIZE, MAX_TOKENS, Trace, shortened
from sagellm.replay.generate.text import KeyCounter, Text
from sagellm.replay.traces.lines import BadLines, Broken, TextFile
from sagellm.replay.traces.rows import Rows

COLUMNS = {
    "time": ("timestamp", "time", "times", "arrivedat", "arrivaltime", "timestamps"),
    "time_ms": ("timestampms", "timems"),
    "input": ("inputlength", "inputtokens", "contexttokens", "requesttokens", "prompttokens", "numprefilltokens"),
    "output": (
        "outputlength",
        "outputtokens",
        "generatedtokens",
        "responsetokens",
        "completiontokens",
        "numdecodetokens",
    ),
    "session": ("session", "sessionid", "conversationid"),
    "prefix": ("prefixid",),
    "prefix_length": ("prefixlength", "prefixtokens"),
    "tenant": ("tenant", "tenantid"),
}


def read_lengths(file: TextFile, bad: BadLines, *, block_size: int | None) -> Trace:
    """Raises TraceError: a header without time or input length, a malformed line unless `bad` skips it, nothing left."""
    reader = _records(file, bad)
    number, header = next(reader, (1, []))
    columns = _columns(file.name, number, header)
    rows, size = Rows(bad), block_size or DEFAULT_BLOCK_SIZE
    blocks = _Blocks(size)
    origin_s: float | None = None
    for number, cells in reader:
        try:
            if len(cells) != len(header):
                raise Broken(f"has {len(cells)} columns; the header has {len(header)}.")
            row = {name: cells[place].strip() for name, place in columns.items()}
            time_s = _time(row)
            num_input, num_output = _count(row, "input"), _count(row, "output", 0)
            rows.check_size(number, -(-num_input // size))
            keys = blocks.keys_of(row, num_input)
        except Broken as error:
            bad.add(number, str(error))
            continue
        if origin_s is None:
            origin_s = time_s if time_s > 1e8 else 0.0  # a date: counted from the first one
        rows.add(number, time_s - origin_s, num_input, num_output, keys, row.get("tenant", ""))
    return rows.trace(file, size)


def _records(file: TextFile, bad: BadLines) -> Iterator[tuple[int, list[str]]]:
    """(number of the last line, cells) of each record. A quoted cell may not go on in the next line: lengths, times and names
    have no line ends in them, and one stray quote would take the rest of the file along."""
    for number, line in file.numbered():
        try:
            yield number, next(csv.reader([line.decode()], strict=True))
        except UnicodeDecodeError:
            bad.add(number, "is not UTF-8 text.")
        except csv.Error as error:
            bad.add(number, f"is not CSV: {error}.")


def _columns(name: str, line: int, header: list[str]) -> dict[str, int]:
    plain = ["".join(letter for letter in cell.lower() if letter.isalnum()) for cell in header]
    found = {}
    for role, names in COLUMNS.items():
        places = [plain.index(candidate) for candidate in names if candidate in plain]
        if places:
            found[role] = places[0]
    for role in ("time", "input"):
        if role not in found and not (role == "time" and "time_ms" in found):
            known = ", ".join(COLUMNS[role])
            got = ", ".join(shortened(cell.strip()) for cell in header[:8]) or "nothing"
            raise TraceError(f"{name}, line {line}: no column for {role}; found {got}. Name one of: {known}.")
    return found


class _Blocks:
    """Block keys of requests of which only lengths are known."""

    def __init__(self, block_size: int) -> None:
        self._counter = KeyCounter(block_size)
        self._sessions: dict[str, tuple[Text, str]] = {}
        self._prefixes: dict[str, Text] = {}

    def keys_of(self, row: dict[str, str], num_input: int) -> list[int]:
        session, prefix = row.get("session", ""), row.get("prefix", "")
        prefix_length = _count(row, "prefix_length", 0) if prefix else 0
        if prefix_length > num_input:
            raise Broken(f"prefix_length {prefix_length} is above the input length {num_input}.")
        begin = self._beginning(prefix, prefix_length)
        if not session:
            return begin.grown(num_input - begin.num_tokens).prompt_keys()
        text, started_as = self._sessions.setdefault(session, (begin, prefix))
        if started_as != prefix:
            raise Broken(
                f"session {shortened(session)} has prefix {shortened(prefix)} here and {shortened(started_as)} before."
            )
        if num_input > text.num_tokens:  # the conversation has gone on
            text = text.grown(num_input - text.num_tokens)
            self._sessions[session] = (text, prefix)
        return text.prompt_keys(num_input)

    def _beginning(self, prefix: str, num_tokens: int) -> Text:
        if not prefix:
            return Text(self._counter)
        text = self._prefixes.get(prefix, Text(self._counter))
        if num_tokens > text.num_tokens:
            text = text.grown(num_tokens - text.num_tokens)
            self._prefixes[prefix] = text
        return text.cut(num_tokens)


def _time(row: dict[str, str]) -> float:
    if "time" not in row:
        return _number(row["time_ms"], "the timestamp") / 1e3
    try:
        return _number(row["time"], "the timestamp")
    except Broken:
        if not any(letter in row["time"] for letter in "-/:"):
            raise
        return _date(row["time"])


def _date(text: str) -> float:
    """Seconds of an ISO date, of which fractions may have any number of digits."""
    head, _, tail = text.partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    try:
        date = datetime.fromisoformat(head + tail[len(digits) :].replace("Z", "+00:00"))
    except ValueError:
        raise Broken(
            f"the timestamp is {shortened(text)}; seconds or a date such as 2024-05-10 00:00:00.5 were expected."
        ) from None
    date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
    return date.timestamp() + float(f"0.{digits or 0}")


def _number(text: str, name: str) -> float:
    try:
        value = float("" if "_" in text else text)  # 1_000 is Python's spelling, not that of a table
    except ValueError:
        raise Broken(f"{name} is {shortened(text)}; a number was expected.") from None
    if not 0 <= value < math.inf:
        raise Broken(f"{name} is {text[:40]}; a finite number, 0 or more, was expected.")
    return value


def _count(row: dict[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text and default is not None:
        return default
    value = _number(text, f"the {name} length" if "length" not in name else name)
    if value != int(value) or value > MAX_TOKENS:
        raise Broken(f"the {name} length is {text[:40]}; an integer from 0 to {MAX_TOKENS} was expected.")
    return int(value)
