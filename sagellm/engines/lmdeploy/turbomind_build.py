"""Parts of TurboMind on this machine: the compiled engine, its hook table, a GPU; and the next step if one is missing."""

import importlib
import importlib.util
import mmap
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm._core import HOOKS_ABI, HOOKS_CAPSULE
from sagellm.core.errors import EngineError, PatchError
from sagellm.patching import default_target

EXTENSION = "_turbomind"
BUILD = (
    "Build LMDeploy from the patched submodule: git submodule update --init third_party/lmdeploy, then ./apply_patches.sh, "
    "then LMDeploy's own installation guide. Or use --engine pytorch"
)
_MISSING_LIBRARY = re.compile(r"^(\S+): cannot open shared object file")


@dataclass(frozen=True, slots=True)
class Probe:
    """`state`: ready, absent, not loadable, without hooks, refused or no gpu. `next_step` is empty when ready."""

    state: str
    text: str
    next_step: str = ""

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def require(self) -> None:
        """Raises EngineError, one sentence and the next step, unless TurboMind can run here with its hooks."""
        if not self.is_ready:
            raise EngineError(f"{self.text}. {self.next_step}.")


def probe() -> Probe:
    """Loads the compiled engine into this process, but starts nothing. torch is imported only where all else is there."""
    try:
        library = default_target() / "lib"
    except PatchError as error:
        return Probe("absent", str(error).rstrip("."), "Run ./apply_patches.sh")
    _find_beside(library)
    found = importlib.util.find_spec(EXTENSION)
    if found is None or found.origin is None:
        return Probe("absent", f"LMDeploy in {library.parent} has no compiled TurboMind", BUILD)
    try:
        engine = importlib.import_module(EXTENSION)
    except ImportError as error:
        return _not_loadable(Path(found.origin), str(error))
    if not hasattr(engine, "sage_install"):
        return Probe("without hooks", f"TurboMind in {found.origin} was built without the hook table", BUILD)
    return _refused(engine) or _no_gpu() or Probe("ready", f"TurboMind in {found.origin} has the hook table")


def install(table: Any) -> None:
    """Install a `_core.HookTable` in the compiled engine, which `probe` found ready.

    Raises:
        EngineError: the engine refuses it, with its own sentence.
    """
    engine = importlib.import_module(EXTENSION)
    try:
        engine.sage_install(table.capsule())
    except ValueError as error:
        raise EngineError(f"TurboMind refuses the hook table: {error}") from None


def _find_beside(library: Path) -> None:
    """LMDeploy looks for its extension the same way, so that both get the same module."""
    if str(library) not in sys.path:
        sys.path.append(str(library))


def _not_loadable(file: Path, reason: str) -> Probe:
    missing = _MISSING_LIBRARY.match(reason)
    why = f"it needs {missing[1]}, which is not on this machine" if missing else reason
    text = f"TurboMind in {file} cannot be loaded: {why}"
    if not _names_install(file):
        return Probe("not loadable", f"{text}; and it was built without the hook table", BUILD)
    return Probe("not loadable", text, "Install CUDA's libraries: ./apply_patches.sh --cuda. Or use --engine pytorch")


def _names_install(file: Path) -> bool:
    """Whether a file that cannot be loaded has the hook table: its bindings have their names in it as text."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"sage_install") >= 0


def _refused(engine: Any) -> Probe | None:
    abi = engine.sage_query().get("abi")
    if abi == HOOKS_ABI:
        return None
    text = f"TurboMind was built for version {abi} of the hook table; this sagellm has version {HOOKS_ABI} ({HOOKS_CAPSULE})"
    return Probe("refused", text, BUILD)


def _no_gpu() -> Probe | None:
    import torch

    if torch.cuda.is_available():
        return None
    return Probe("no gpu", "TurboMind has the hook table, but torch sees no GPU here", "Use --engine pytorch")
