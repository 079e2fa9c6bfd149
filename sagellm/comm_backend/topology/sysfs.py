"""Reads sysfs below any folder. A missing value is None; an invalid one is None and a note."""

import os
import re
from pathlib import Path

from sagellm.core.errors import CommError

__all__ = ["Sysfs"]

MAX_TEXT_BYTES = 1 << 16
MAX_NUMBER = 1 << 48  # no count, size or speed in sysfs is larger
MAX_CPUS = 1 << 16


class Sysfs:
    """Raises CommError: `root` is no folder that can be read."""

    def __init__(self, root: Path | str = "/sys") -> None:
        self.root = Path(os.path.realpath(root))
        self.notes: list[str] = []
        try:
            os.listdir(self.root)
        except OSError as error:
            raise CommError(
                f"cannot read {root} as sysfs: {error.strerror}; give the folder that holds bus, class and devices."
            ) from None

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def text(self, *parts: str) -> str | None:
        path = self.root.joinpath(*parts)
        try:
            with open(path, "rb") as file:
                return file.read(MAX_TEXT_BYTES).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            # EINVAL and ENODATA are how drivers say "does not apply", such as the speed of a NIC that is down.
            if not isinstance(error, PermissionError) and error.strerror in ("Invalid argument", "No data available"):
                return None
            self.note(f"{self._short(path)}: {error.strerror}")
            return None

    def number(self, *parts: str, low: int = 0) -> int | None:
        """A whole number, decimal or 0x. Below `low`, as -1 for "unknown", it is None without a note."""
        text = self.text(*parts)
        if not text:
            return None
        try:
            value = int(text, 0)
        except ValueError:
            return self._nonsense(text, *parts)
        if value > MAX_NUMBER or value < min(low, -1):
            return self._nonsense(text, *parts)
        return value if value >= low else None

    def matched(self, pattern: str, *parts: str) -> re.Match[str] | None:
        """Where the text of a file has this pattern. A text without it is a note; an empty or unknown one is None."""
        text = self.text(*parts)
        found = re.search(pattern, text) if text else None
        return found if found or not text or text.startswith("Unknown") else self._nonsense(text, *parts)

    def names(self, *parts: str) -> list[str]:
        """Return the names in a folder, sorted; none without the folder."""
        path = self.root.joinpath(*parts)
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note(f"{self._short(path)}: {error.strerror}")
            return []

    def real(self, *parts: str) -> Path | None:
        """Where a path leads once its links are followed; None where that is nothing, or outside the tree."""
        path = Path(os.path.realpath(self.root.joinpath(*parts)))
        return path if path.exists() and path.is_relative_to(self.root) else None

    def cpu_list(self, *parts: str) -> tuple[int, ...]:
        """CPUs or nodes of a list such as 0-3,8."""
        text = self.text(*parts)
        found: set[int] = set()
        for piece in (text or "").split(","):
            if not piece.strip():
                continue
            first, _, last = piece.strip().partition("-")
            try:
                low, high = int(first), int(last or first)
            except ValueError:
                low, high = 1, 0
            if not 0 <= low <= high < MAX_CPUS:
                self._nonsense(text or "", *parts)
                return ()
            found.update(range(low, high + 1))
        return tuple(sorted(found))

    def _nonsense(self, text: str, *parts: str) -> None:
        self.note(f"{'/'.join(parts)} holds {text[:40]!r}, which makes no sense")

    def _short(self, path: Path) -> str:
        return str(path.relative_to(self.root))
