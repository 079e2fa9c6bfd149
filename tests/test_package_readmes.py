"""The README of a package: its demos run and print what they say, and it names every file and every plug-in."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.contract.rules import check_speculator
from sagellm.accel.speculative.registry import speculator_names
from sagellm.comm_backend.kv_transfer.registry import channel_names
from sagellm.comm_backend.registry import backend_names
from sagellm.control_plane.registry import ENGINE_KINDS, ROUTERS, SCALERS

ROOT = Path(__file__).parents[1] / "sagellm"
NUM_PRINTS = {
    "comm_backend": 2, "comm_backend/control": 2, "comm_backend/kv_transfer": 2, "kv_policy": 4, "kv_runtime": 5, "pd": 2,
    "prefix_reuse": 5, "scheduler_ir": 8,
}  # fmt: skip


def text_of(package: str) -> str:
    return (ROOT / package / "README.md").read_text()


def demos_of(package: str) -> list[str]:
    """Blocks that can run alone: some show a line for use inside a hook."""
    return [demo for demo in re.findall(r"```python\n(.*?)```", text_of(package), re.DOTALL) if "import " in demo]


@pytest.mark.parametrize("package", NUM_PRINTS)
def test_demos_print_what_they_say(package: str, tmp_path: Path) -> None:
    """Each line printed is the comment behind its `print`, up to a colon that begins an explanation. Ports may vary."""
    printed: list[str] = []
    promised: list[str] = []
    for demo in demos_of(package):
        promised += re.findall(r"^ *print\(.*\)  # (.+)", demo, re.MULTILINE)
        found = subprocess.run([sys.executable, "-c", demo], cwd=tmp_path, capture_output=True, text=True, check=True)
        printed += [re.sub(r":\d{4,}:", ":PORT:", line) for line in found.stdout.splitlines()]
    assert len(promised) == NUM_PRINTS[package]
    for line, words in zip(printed, promised, strict=True):
        assert words == line or words.startswith(f"{line}: "), f"{words!r} is promised, {line!r} printed"


@pytest.mark.parametrize("package", [*NUM_PRINTS, "accel", "control_plane", "engines/lmdeploy/kernels"])
def test_every_file_is_named(package: str) -> None:
    """By its name, by a pattern such as `disk_store*.py`, or with its folder (`contract/`)."""
    files = set((ROOT / package).glob("*.py"))
    if "`contract/`" not in text_of(package):
        files |= set((ROOT / package / "contract").glob("*.py"))
    if package == "accel":  # its README is that of the packages in it too, and of its part of the engine
        files |= {*(ROOT / package).rglob("*.py"), *(ROOT / "engines" / "lmdeploy" / "speculative").glob("*.py")}
    pages = [package, "accel/quantization", "accel/sparsity", "accel/sot", "accel/cot"] if package == "accel" else [package]
    patterns = [pattern for page in pages for pattern in re.findall(r"[`/]([\w*]+\.py)`", text_of(page))]
    names = {file.name for file in files} - {"__init__.py", "__main__.py"}
    assert not {name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("accel", speculator_names), ("comm_backend", backend_names), ("comm_backend/kv_transfer", channel_names),
        ("control_plane", ENGINE_KINDS.names), ("control_plane", ROUTERS.names), ("control_plane", SCALERS.names),
    ],
)
def test_every_plugin_is_named(package, names):
    assert not [name for name in names() if not re.search(rf"`{name}[`:]", text_of(package))]


def test_the_strategy_of_accel_keeps_to_the_contract():
    names: dict = {}
    exec(demos_of("accel")[0], names)
    assert issubclass(names["Repeats"], SpeculativeStrategy)
    assert check_speculator(names["Repeats"], rounds=1).passed
