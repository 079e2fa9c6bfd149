"""SHA-256 of files, remembered by what the system says of a file, so that unchanged ones are read once."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sagellm.core.cached_folder import write_whole

__all__ = ["CACHE_NAME", "hash_files"]

CACHE_NAME = "hashes.json"
MAX_ENTRIES = 4096  # files; the oldest are forgotten


def hash_files(files: Iterable[Path], cache_dir: Path | None) -> list[str]:
    """Return the SHA-256 of each file, 64 hex digits.

    Args:
        cache_dir: folder of the file that remembers hashes by path, device, inode, size and times; None remembers nothing.
            If it cannot be written, the next call reads the files again.

    Raises:
        OSError: a file cannot be read.
    """
    known = _read(cache_dir)
    found: dict[str, str] = {}
    answers = []
    for file in files:
        status = file.stat()
        times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        identity = f"{file.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {times}"
        if identity not in found:
            found[identity] = known.get(identity) or _hash(file)
        answers.append(found[identity])
    if cache_dir is not None and found.keys() - known.keys():
        _write(cache_dir, dict([*(known | found).items()][-MAX_ENTRIES:]))
    return answers


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _read(cache_dir: Path | None) -> dict[str, str]:
    if cache_dir is None:
        return {}
    try:
        content = json.loads((cache_dir / CACHE_NAME).read_text())
        return {str(identity): str(digest) for identity, digest in content.items()}
    except (OSError, ValueError, AttributeError):  # missing, or not ours: everything is hashed again
        return {}


def _write(cache_dir: Path, digests: dict[str, str]) -> None:
    with suppress(OSError):  # the next start takes as long as this one
        cache_dir.mkdir(parents=True, exist_ok=True)
        write_whole(cache_dir / CACHE_NAME, json.dumps(digests))
