"""Memory of a process that others of the same user can read, and nothing else: a memfd, found through /proc, without a name.

It cannot shrink (sealed), so that reading it never faults; readers map it read-only. Untouched pages cost nothing, and
nothing is left when the owner has ended and the last reader has forgotten it.
"""

import errno
import fcntl
import mmap
import os
import secrets
import select
import struct
import threading
import weakref

import numpy as np
import torch

from sagellm.comm_backend.kv_transfer.copying import as_bytes
from sagellm.core.errors import TransferError

__all__ = ["HEADER_BYTES", "Owner", "SharedMemory", "memory_of", "open_memory"]

HEADER_BYTES = 4096  # what follows begins with a page
_MAGIC = 0x314B_4C4C_4547_4153  # "SAGELLK1"
_HEADER = struct.Struct("<QQQ")  # token, size of the whole, magic; zeros until all is written
_MAP_NORESERVE = 0x4000


class SharedMemory(mmap.mmap):
    """[HEADER_BYTES + num_bytes], of this process. `fd` is open as long as the memory lives, for others to find it."""

    fd: int
    token: int

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        """Raises TransferError: there is no such memory."""
        size = HEADER_BYTES + num_bytes
        try:
            fd = os.memfd_create("sagellm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            raise TransferError(f"no shared memory here: {error}; it needs Linux.") from None
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self = cls(fd, size, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise TransferError(f"no {size} bytes of shared memory: {error}") from None
        self.madvise(mmap.MADV_HUGEPAGE)  # where the machine gives such pages to shared memory at all
        self.fd, self.token = fd, secrets.randbits(63) | 1
        weakref.finalize(self, os.close, fd).atexit = False
        self[: _HEADER.size] = _HEADER.pack(self.token, size, _MAGIC)
        return self

    @classmethod
    def tensor(cls, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros; it keeps the memory alive, and `memory_of` finds it."""
        memory = cls.create(max(torch.Size(shape).numel() * dtype.itemsize, 1))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        with _LOCK:
            _MADE[whole.data_ptr()] = memory
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return whole[HEADER_BYTES : HEADER_BYTES + num_bytes].view(dtype).view(shape)


_LOCK = threading.Lock()
_MADE: "weakref.WeakValueDictionary[int, SharedMemory]" = weakref.WeakValueDictionary()  # by address


def memory_of(tensor: torch.Tensor) -> tuple[SharedMemory, int] | None:
    """The memory that a tensor lies in, and at which byte of it; None where it is no such memory."""
    start = tensor.untyped_storage().data_ptr()
    with _LOCK:
        memory = _MADE.get(start)
    return None if memory is None else (memory, tensor.data_ptr() - start)


class Owner:
    """A process, and whether it is still that one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError, OverflowError) as error:
            raise TransferError(f"process {pid} has gone, or cannot be seen from here ({error}).") from None
        weakref.finalize(self, os.close, self._pidfd).atexit = False
        self._ended = select.epoll(1)  # several threads may ask it at once, which they may not with a poll object
        self._ended.register(self._pidfd, select.EPOLLIN)

    def is_alive(self) -> bool:
        return not self._ended.poll(0, 1)


def open_memory(pid: int, fd: int, token: int, num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] of another process, header included, read-only; it is readable as long as the array lives.

    Raises:
        TransferError: it is not there, not readable, half-written, of another size or another's, or could shrink.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that number must not hold this up
    except OSError as error:
        hint = "its owner has gone" if error.errno == errno.ENOENT else "the engines run as one user, on one host"
        raise TransferError(f"cannot open the KV memory of process {pid}: {error.strerror}; {hint}.") from None
    try:
        try:
            seals = fcntl.fcntl(own, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        size = os.fstat(own).st_size
        if not seals & fcntl.F_SEAL_SHRINK:
            raise TransferError(f"{path} could shrink while it is read; it is no KV memory, or another's.")
        if size != num_bytes or size < HEADER_BYTES:
            raise TransferError(f"{path} is {size} bytes, {num_bytes} are expected; half-written, or another's KV memory.")
        memory = mmap.mmap(own, size, flags=mmap.MAP_SHARED | _MAP_NORESERVE, prot=mmap.PROT_READ)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError) as error:
        raise TransferError(f"cannot map the KV memory of process {pid}: {error}") from None
    finally:
        os.close(own)
    found = _HEADER.unpack_from(memory)
    if found[2] != _MAGIC:
        raise TransferError(f"{path} is half-written, or no KV memory; connect again when its owner has started.")
    if found[:2] != (token, num_bytes):
        raise TransferError(f"{path} is the KV memory of another engine; are both on this host?")
    return np.frombuffer(memory, np.uint8)


def words(memory: SharedMemory) -> np.ndarray:
    """int64 [n]: what follows the header, for who owns it."""
    return as_bytes(torch.frombuffer(memory, dtype=torch.uint8))[HEADER_BYTES:].view(np.int64)
