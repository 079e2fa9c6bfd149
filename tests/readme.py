"""The README of a package: its demo runs and prints what it says, and it names every file."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def check_demo(package: ModuleType, num_prints: int) -> None:
    """The demos print, line by line, what stands behind each `print`, up to a colon that begins an explanation."""
    demos = re.findall(r"```python\n(.*?)```", _text(package), re.DOTALL)
    assert sum(demo.count("print(") for demo in demos) == num_prints
    for demo in demos:
        promised = re.findall(r"^print\(.*\)  # ([^:\n]+)", demo, re.MULTILINE)
        assert len(promised) == demo.count("print(")
        found = subprocess.run([sys.executable, "-c", demo], capture_output=True, text=True, check=True)
        assert found.stdout.splitlines() == promised


def unnamed_files(package: ModuleType) -> set[str]:
    """Modules of the package, not of packages in it, that the README does not name."""
    text = _text(package)
    files = {path.name for path in Path(package.__file__).parent.glob("*.py")} - {"__init__.py"}
    return {name for name in files if f"`{name}`" not in text}


def _text(package: ModuleType) -> str:
    return Path(package.__file__).with_name("README.md").read_text()
