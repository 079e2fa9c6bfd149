"""Opening the folder of a disk tier: which files hold blocks, and which are to go."""

import errno
import os
import re
from collections import Counter
from typing import NamedTuple

from sagellm.core.errors import TierError
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.disk_store_folder import LockedFolder, tier_errors
from sagellm.kv_runtime.disk_store_format import HEADER_BYTES, Header, RecordError, open_header, record_bytes

__all__ = ["FoundBlock", "ScanResult", "scan"]

NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})\.(kv|tmp)")


class FoundBlock(NamedTuple):
    """A file with a block. `name`: without its suffix; `serial`: the number in it, larger is newer."""

    header: Header
    name: str
    serial: int
    last_use_ns: int
    record_bytes: int


class ScanResult(NamedTuple):
    """`blocks`: least recently used first; `dropped`: files that were deleted, by reason."""

    blocks: list[FoundBlock]
    dropped: Counter[str]
    last_serial: int


def scan(folder: LockedFolder, layout: bytes, drop_other: bool) -> ScanResult:
    """Read the header of every block in the folder, and delete files that are no blocks. O(files), one page each.

    Raises:
        TierError: the folder or a file cannot be read for a reason that says nothing about the block, such as too many open
            files; or blocks of another layout, unless `drop_other`. Nothing was deleted then.
    """
    found: dict[BlockKey, FoundBlock] = {}
    bad: list[tuple[str, str]] = []
    last_serial = 0
    with tier_errors(f"disk tier {folder.path}"):
        names = [match for name in folder.names() if (match := NAME.fullmatch(name))]
        for match in names:
            serial = int(match[2], 16)
            last_serial = max(last_serial, serial)
            if match[3] == "tmp":
                bad.append((match[0], "unfinished"))
                continue
            try:
                block = _read_header(folder, match, serial, layout)
            except RecordError as error:
                bad.append((match[0], str(error)))
                continue
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                bad.append((match[0], "unreadable"))
                continue
            # A block that was removed and written again by a process that was killed in between is there twice.
            other = found.get(block.header.stored.block.key)
            if other is not None:
                bad.append((f"{min(block, other, key=lambda one: one.serial).name}.kv", "superseded"))
            if other is None or other.serial < serial:
                found[block.header.stored.block.key] = block
        dropped = Counter(reason for _, reason in bad)
        if dropped["other layout"] and not drop_other:
            raise TierError(
                f"disk tier {folder.path} holds {dropped['other layout']} blocks of another model or layout; name another "
                "folder, or empty this one."
            )
        for name, _ in bad:
            folder.unlink(name)
    blocks = sorted(found.values(), key=lambda block: (block.last_use_ns, block.serial))
    return ScanResult(blocks, dropped, last_serial)


def _read_header(folder: LockedFolder, match: re.Match[str], serial: int, layout: bytes) -> FoundBlock:
    """Raises OSError; RecordError: no block."""
    file = folder.open(match[0])
    try:
        header = open_header(os.read(file, HEADER_BYTES), layout)
        status = os.fstat(file)
    finally:
        os.close(file)
    block = header.stored.block
    if status.st_size != HEADER_BYTES + block.size_bytes:
        raise RecordError("torn")
    if int(match[1], 16) != block.key:
        raise RecordError("corrupt")
    return FoundBlock(header, match[0][:-3], serial, status.st_mtime_ns, record_bytes(block.size_bytes))
