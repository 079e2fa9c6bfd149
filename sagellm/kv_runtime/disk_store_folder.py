"""The folder of a disk tier: one server at a time, and what an error of the system means to its owner."""

import errno
import fcntl
import multiprocessing
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sagellm.core.errors import TierError
from sagellm.kv_runtime.base import StoreFullError

__all__ = ["LockedFolder", "is_full", "is_shortage", "tier_errors", "write_all"]

LOCK_NAME = "lock"
PROBE_NAME = "probe.tmp"
PROBE_BYTES = 64 << 10
OWNER_BYTES = 256
DEVICE_FULL = (errno.ENOSPC, errno.EDQUOT)
FULL = (*DEVICE_FULL, errno.EFBIG)
NO_FILES = (errno.EMFILE, errno.ENFILE)
ADVICE = {
    errno.ENOSPC: "the device is full; free some room, or name another folder",
    errno.EDQUOT: "the quota of this user is used up; free some room, or name another folder",
    errno.EFBIG: "a file may not be that large; raise the limit (ulimit -f), or name another folder",
    errno.EROFS: "the file system is read-only; mount it writable, or name another folder",
    errno.EACCES: "permission denied; give this user the right to write there, or name another folder",
    errno.EPERM: "permission denied; give this user the right to write there, or name another folder",
    errno.ENOENT: "the folder was removed or emptied while it was in use; start again",
    errno.ENOTDIR: "a part of it is no folder; name another one",
    errno.EEXIST: "it is a file; name a folder",
    errno.EMFILE: "this process has too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many open files; raise the limit (fs.file-max)",
    errno.ELOOP: "a symbolic link is where the store has a file or its folder; remove the link, or name another folder",
    errno.ENXIO: "a pipe or device is where the store has a file; remove it, or name another folder",
    errno.EIO: "the device fails; look at the system's log, or name another folder",
}


def is_full(error: OSError) -> bool:
    """Whether the device has no room, which removing files gives back."""
    return error.errno in DEVICE_FULL


def is_shortage(error: OSError) -> bool:
    """Whether the error says nothing about a file, only that the process is short of something now."""
    return error.errno in (*NO_FILES, errno.ENOMEM, errno.EINTR)


@contextmanager
def tier_errors(what: str) -> Iterator[None]:
    """Turns OSError into TierError, StoreFullError where room is missing. `what` begins the message."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, f"{error.strerror}; name another folder if it stays so")
        kind = StoreFullError if error.errno in FULL else TierError
        raise kind(f"{what}: {advice}.") from error


def write_all(file: int, parts: list[memoryview]) -> None:
    """Write the parts one behind the other. Raises OSError, with less written than that."""
    while parts:
        written = os.writev(file, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]


class LockedFolder:
    """A folder, made if it is missing, locked until `close` or the end of the process.

    Its files are opened beside a file descriptor, not by the folder's path, which may lead elsewhere by now.

    The lock is the kernel's (flock), so it does not outlive a process that was killed; nor a `close`, whatever processes were
    forked meanwhile and have the open file too.

    Args:
        owner: name of the process that has the folder, for the error message of others. Default: "process" and the id of this
            process, or of the one that spawned it: the server of an engine, which a user can stop.

    Raises:
        TierError: in use by another process, or by another store of this one; not a folder; not writable; full.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path = path
        self._pid = os.getpid()
        parent = multiprocessing.parent_process()
        self._owner = owner or f"process {self._pid if parent is None else parent.pid}"
        with tier_errors(f"disk tier {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            if path.is_symlink():  # the system would say that it is no folder
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                self._check_owner()
                self._lock = self.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
                try:
                    self._take()
                    self._look_for_room()
                except BaseException:
                    os.close(self._lock)
                    raise
            except BaseException:
                os.close(self._folder)
                raise

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a file descriptor of a plain file in the folder. Raises OSError for a link, a pipe or a device."""
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return file

    def rename(self, old: str, new: str) -> None:
        """Raises OSError."""
        os.rename(old, new, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def unlink(self, name: str) -> None:
        """Raises OSError."""
        os.unlink(name, dir_fd=self._folder)

    def names(self) -> list[str]:
        """Names of the plain files in the folder. Raises OSError."""
        with os.scandir(self._folder) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def check(self) -> None:
        """That the folder is still this one's: somebody who emptied it has taken the lock with it, and another server may have
        begun here. Raises FileNotFoundError."""
        found, mine = os.stat(LOCK_NAME, dir_fd=self._folder), os.fstat(self._lock)
        if (found.st_ino, found.st_dev) != (mine.st_ino, mine.st_dev):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed")

    def _check_owner(self) -> None:
        """Check that no other user can put files or links into the folder.

        Raises:
            TierError: the folder belongs to another user, or others may write to it.
        """
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid():
            raise TierError(
                f"disk tier {self.path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}; name a folder of "
                "this user."
            )
        if found.st_mode & 0o022:
            raise TierError(
                f"disk tier {self.path} has mode {found.st_mode & 0o777:o}: others can write to it. Run chmod go-w on it, or "
                "name another folder."
            )

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, OWNER_BYTES, 0).decode("utf-8", "replace").strip() or "another process"
            raise TierError(
                f"disk tier {self.path} is in use by {owner}; stop that server, or name another folder."
            ) from None
        # In place, since on a full device an emptied file may get no room again.
        try:
            os.pwrite(self._lock, f"{self._owner}\n".encode().ljust(OWNER_BYTES)[:OWNER_BYTES], 0)
        except OSError as error:
            if not is_full(error):
                raise

    def _look_for_room(self) -> None:
        """Find out now, not at the first block, whether there is any room at all, or could be: a store gives up own files."""
        try:
            self.probe()
        except OSError as error:
            if not is_full(error) or not any(name.endswith(".kv") for name in self.names()):
                raise

    def probe(self) -> None:
        """Raises OSError where there is no room for some `PROBE_BYTES`."""
        file = self.open(PROBE_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(file, [memoryview(bytes(PROBE_BYTES))])
        finally:
            os.close(file)
            self.unlink(PROBE_NAME)

    def sync(self) -> None:
        """Force the names in the folder to the device. Raises OSError."""
        os.fsync(self._folder)

    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked process that closes its copy has no right to the lock
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        for file in (self._lock, self._folder):
            os.close(file)
        self._lock = (
            self._folder
        ) = -1  # a thread that comes out of a stuck device later must not meet somebody else's file
