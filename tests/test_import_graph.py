"""Imports of the package and the benchmarks: no circle, and none from a lower layer to a higher one.

Function-local imports and those under TYPE_CHECKING count. The package root exports lazily and is exempt.
"""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package may import those of the rows above it, and those of its own row.
LAYERS = (
    {"core"},
    {"patching", "demo_model"},
    {"models"},
    {"prefix_reuse"},
    {"kv_policy"},
    {"kv_runtime"},
    {"scheduler_ir", "comm_backend", "accel"},
    {"replay"},
    {"engines"},
    {"serve", "evaluate"},
    {"pd"},
    {"control_plane"},
    {"cli"},
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def modules(folder: str) -> dict[str, Path]:
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str, source: str, known: dict[str, Path]) -> set[str]:
    """Modules among `known` that the source of module `name` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            candidates = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for candidate in candidates:
            while candidate and candidate not in known:
                candidate = candidate.rpartition(".")[0]
            if candidate and candidate not in (name, "sagellm"):
                found.add(candidate)
    return found


@functools.cache
def graph(folder: str) -> dict[str, set[str]]:
    known = modules(folder)
    return {name: imports(name, file.read_text(), known) for name, file in known.items()}


@pytest.mark.parametrize("folder", ["sagellm", "benchmarks"])
def test_no_circle(folder: str) -> None:
    try:
        TopologicalSorter(graph(folder)).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_every_package_has_a_layer() -> None:
    packages = {file.parent.name for file in (ROOT / "sagellm").glob("*/__init__.py")}
    assert packages == set(LEVEL)


def test_no_import_from_a_higher_layer() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in graph("sagellm").items()
        for other in others
        if "." in name and LEVEL[other.split(".")[1]] > LEVEL[name.split(".")[1]]
    ]
    assert not upward, "\n".join(upward)


def test_no_relative_imports() -> None:
    """They would escape the checks above."""
    for folder in ("sagellm", "benchmarks"):
        for name, file in modules(folder).items():
            assert not re.search(r"^\s*from\s*\.", file.read_text(), re.MULTILINE), name


def test_a_local_import_that_closes_a_circle_is_found() -> None:
    known = {"sagellm.a": Path(), "sagellm.b": Path()}
    source = "def f():\n    from sagellm.b import x\n"
    assert imports("sagellm.a", source, known) == {"sagellm.b"}
