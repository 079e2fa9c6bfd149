"""The secret that the processes of a group share."""

import os
import secrets
import stat
from pathlib import Path

from sagellm.core.errors import ConfigError

__all__ = ["MIN_KEY_BYTES", "new_key", "read_key"]

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096


def new_key() -> bytes:
    """A key as a file may hold it: 64 hexadecimal digits."""
    return secrets.token_hex(32).encode()


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key in a file: its text, without blanks and line ends around it.

    Raises:
        ConfigError: no such file, or none that can be read; others than its owner may read or write it; it holds less than
            16 bytes, more than 4096, or something that is not text.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would make us wait
            raise ConfigError(f"the key file {path} is not a regular file.")
        with path.open("rb") as file:
            state = os.fstat(file.fileno())  # of what is read, whatever the path names by now
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}.") from None
    if state.st_mode & 0o077:
        raise ConfigError(
            f"the key file {path} has mode {stat.S_IMODE(state.st_mode):03o}, so that others than its owner may use it; "
            f"run chmod 600 {path}."
        )
    key = content.strip()
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        size = f"{len(key)} bytes" if len(content) <= MAX_KEY_BYTES else f"more than {MAX_KEY_BYTES} bytes"
        raise ConfigError(f"the key file {path} holds {size}; a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES}.")
    try:
        key.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the key file {path} does not hold text; write a long random word into it.") from None
    return key
