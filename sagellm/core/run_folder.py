"""Temporary folders of running processes: marked while in use, removed by a later start if their process was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["RunFolder", "hold", "remove_abandoned"]

LOCK_NAME = "in-use"
NEW_S = 60.0  # a folder without a mark may have been made just now


class RunFolder:
    """A folder of mode 700 that is made when it is first asked for. Those of killed processes are removed then.

    Args:
        prefix: of its name, and of those that are removed.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._path: Path | None = None
        self._mark = -1  # file descriptor

    @property
    def path(self) -> Path:
        if self._path is None:
            remove_abandoned(f"{self._prefix}*")
            self._path = Path(tempfile.mkdtemp(prefix=self._prefix))
            self._mark = hold(self._path)
        return self._path

    def write_key(self, key: bytes) -> Path:
        """Return a file with a secret, which its owner alone can read."""
        file = self.path / "key"
        file.touch(0o600)
        file.write_bytes(key)
        return file

    def remove(self) -> None:
        """Remove it, if there is one."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._mark)
            self._path = None


def hold(folder: Path) -> int:
    """Mark a folder as in use until this process ends, and return the file descriptor that holds the mark."""
    file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def remove_abandoned(pattern: str) -> None:
    """Remove folders of this user in the system's temporary folder whose process has ended without removing them.

    Args:
        pattern: of the names of the folders, with * and ?.
    """
    for folder in Path(tempfile.gettempdir()).glob(pattern):
        try:
            status = folder.lstat()
            if status.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink() or _is_held(folder, status.st_mtime):
                continue
        except OSError:
            continue
        shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path, changed_s: float) -> bool:
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True if changed_s > time.time() - NEW_S else _has_content(folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _has_content(folder: Path) -> bool:
    """Whether a folder without a mark holds anything: it may be somebody's own."""
    return any(folder.iterdir())
