"""`manifest.json`: for which LMDeploy the series was made, and the hash of every touched file at every step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sagellm.core.errors import PatchError

FILE_NAME = "manifest.json"


def sha256(text: bytes | None) -> str | None:
    """Hex digest of a file's text; None stands for a file that is not there."""
    return None if text is None else hashlib.sha256(text).hexdigest()


@dataclass(frozen=True)
class FileChange:
    """One file in one patch. `before` is None where the patch adds the file (`new`); `tree` is python or cpp."""

    path: str
    tree: str
    new: bool
    before: str | None
    after: str


@dataclass(frozen=True)
class PatchEntry:
    """One patch of the series with the files it touches."""

    name: str
    files: tuple[FileChange, ...]

    @property
    def number(self) -> str:
        """The four digits in front of the name."""
        return self.name[:4]


@dataclass(frozen=True)
class Chain:
    """The life of one file along the series.

    `states[0]` is the pristine hash (None: not there) and `states[i]` the hash after `patches[i - 1]`.
    """

    path: str
    tree: str
    states: tuple[str | None, ...]
    patches: tuple[str, ...]

    @property
    def pristine(self) -> str | None:
        """Hash in the tree that LMDeploy ships; None for a file of ours."""
        return self.states[0]

    @property
    def patched(self) -> str | None:
        """Hash behind the last patch."""
        return self.states[-1]


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`."""

    version: str
    commit: str
    patches: tuple[PatchEntry, ...]

    def chains(self) -> dict[str, Chain]:
        """Path to chain.

        Raises:
            PatchError: when a patch does not start where the one before it ended.
        """
        chains: dict[str, Chain] = {}
        for patch in self.patches:
            for file in patch.files:
                chain = chains.get(file.path, Chain(file.path, file.tree, (file.before,), ()))
                if file.before != chain.patched or file.new != (file.before is None):
                    raise PatchError(
                        f"{FILE_NAME}: {patch.name} starts {file.path} from {file.before}, but the patches before it "
                        f"leave {chain.patched}: regenerate it with --refresh"
                    )
                states = (*chain.states, file.after)
                chains[file.path] = Chain(file.path, file.tree, states, (*chain.patches, patch.number))
        return chains

    def dumps(self) -> bytes:
        """The text of the file."""
        patches = [{"name": patch.name, "files": [asdict(file) for file in patch.files]} for patch in self.patches]
        document = {"lmdeploy": {"version": self.version, "commit": self.commit}, "patches": patches}
        return (json.dumps(document, indent=1) + "\n").encode()


def load_manifest(path: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        PatchError: when it is not there or cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
        lmdeploy = document["lmdeploy"]
        return Manifest(lmdeploy["version"], lmdeploy["commit"], tuple(_entries(document["patches"])))
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}; --refresh writes it from an edited tree") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} is not a manifest ({error!r}); restore it or regenerate it with --refresh") from error


def _entries(patches: Iterable[dict]) -> Iterable[PatchEntry]:
    for patch in patches:
        yield PatchEntry(patch["name"], tuple(FileChange(**file) for file in patch["files"]))
