"""Tests that the code uses only what the oldest Python of pyproject.toml has. The Python that runs them may be any."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vermin
from vermin.rules import KWARGS_REQS, MOD_MEM_REQS, MOD_REQS

ROOT = Path(__file__).parents[2]
FOLDERS = ("sagellm", "benchmarks", "tests", "examples")


def oldest() -> tuple[int, int]:
    promised = re.search(r'requires-python = ">=3\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert promised
    return 3, int(promised[1])


def newer(version: tuple[int, int]) -> set[str]:
    """Modules of the standard library, their members ("enum.StrEnum") and their functions' arguments ("zip(strict=)")."""
    config = vermin.Config()
    names = {name: since for rules in (MOD_REQS, MOD_MEM_REQS) for name, (_, since) in rules(config).items()}
    names |= {f"{name}({argument}=)": since for (name, argument), (_, since) in KWARGS_REQS(config).items()}
    return {name for name, since in names.items() if since and since > version}


def used(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports, the members that it takes from them, and the arguments that it names."""
    homes: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            homes |= {name.asname: name.name for name in node.names if name.asname}
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            homes |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            yield _name(node, homes)
        elif isinstance(node, ast.Call):
            name = _name(node.func, homes)
            yield from (f"{name}({argument.arg}=)" for argument in node.keywords)


def _name(node: ast.expr, homes: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value, homes)}.{node.attr}"
    return homes.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def found(text: str, version: tuple[int, int], names: set[str]) -> list[str]:
    return sorted(names.intersection(used(ast.parse(text, feature_version=version))))


def test_nothing_newer_than_the_oldest_python_is_used() -> None:
    version = oldest()
    names = newer(version)
    files = [ROOT / "ci_gate.py", *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    faults = {str(file.relative_to(ROOT)): found(file.read_text(), version, names) for file in files}
    assert {file: faulty for file, faulty in faults.items() if faulty} == {}


def test_what_is_newer_is_found_however_it_is_imported() -> None:
    text = """
import asyncio, enum as kinds, os.path, datetime
import tomllib
from hashlib import file_digest
from typing import Self as Own, Any
async def one(task):
    async with asyncio.timeout(1): pass
    asyncio.Task(task, eager_start=True)
    return ExceptionGroup, kinds.StrEnum, os.path.isjunction, datetime.UTC, kinds.Enum, asyncio.wait_for, Any
"""
    assert found(text, (3, 10), newer((3, 10))) == [
        "ExceptionGroup", "asyncio.Task(eager_start=)", "asyncio.timeout", "datetime.UTC", "enum.StrEnum",
        "hashlib.file_digest", "os.path.isjunction", "tomllib", "typing.Self",
    ]  # fmt: skip
