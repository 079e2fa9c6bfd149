"""Documentation keeps to plain English: no riddles, no fragments that open with a preposition, no endless sentences."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
MAX_WORDS = {"README": 32, "docstring": 36, "comment": 40, "help": 30}
OPENERS = re.compile(r"(Of|What|Who|Whoever|Whatever|Whose|Nobody|Lost too)\b(?!.*\?$)")
RIDDLES = re.compile(
    r"\b([Dd]oors?|[Nn]obody|for good|is none|are none|bears?|[Ww]hat stands|[Ll]ikewise|[Tt]he same of|[Ww]hoever)\b"
)
FENCE = "```"
FOLDERS = ("sagellm", "benchmarks", "tests")


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?;:])\s+(?=[A-Z`\"(])", " ".join(text.split())) if part]


def readme_texts(file: Path) -> Iterator[str]:
    """Paragraphs and list items; code, tables and headings are left out."""
    lines, fenced = [], False
    for line in file.read_text().splitlines():
        if line.startswith(FENCE):
            fenced = not fenced
        skipped = fenced or line.startswith((FENCE, "|", "#", "    "))
        lines.append("" if skipped else line)
    for paragraph in re.split(r"\n\s*\n|\n(?=(?:[-*]|\d+\.) )", "\n".join(lines)):
        yield from sentences(paragraph)


def definitions(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, and all classes and functions in it. Expressions, which are most of a tree, have none."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += [each for each in getattr(node, name, ()) if hasattr(each, "body")]


def python_texts(source: str) -> Iterator[tuple[str, str]]:
    for node in definitions(ast.parse(source)):
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[\w`*., ]+:\s)|\n(?=\s*- )", ast.get_docstring(node) or ""):
            yield from (("docstring", sentence) for sentence in sentences(paragraph))
    if "#" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comment", token.string.lstrip("# ")


def strings(source: str) -> Iterator[str]:
    """Sentences of string constants without docstrings: errors, help of metrics, results."""
    tree = ast.parse(source)
    docstrings = {id(node.body[0].value) for node in definitions(tree) if ast.get_docstring(node) is not None}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if is_text and id(node) not in docstrings:
            yield from sentences(node.value)


def native_comments(source: str) -> Iterator[str]:
    """Sentences of the comments of C++. Lines without code that follow each other are one text."""
    text: list[str] = []
    for line in [*source.splitlines(), ""]:
        code, slashes, comment = line.partition("// ")
        if slashes and not code.strip():
            text.append(comment)
            continue
        yield from sentences(" ".join(text))
        yield from sentences(comment)
        text = []


def findings(kind: str, sentence: str) -> Iterator[str]:
    if OPENERS.match(sentence):
        yield f"opens with {sentence.split()[0]!r}: {sentence}"
    if riddle := RIDDLES.search(sentence):
        yield f"says {riddle[0]!r}: {sentence}"
    if len(sentence.split()) > MAX_WORDS[kind]:
        yield f"has {len(sentence.split())} words: {sentence}"


READMES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *(file for folder in ("sagellm", "benchmarks", "patches") for file in sorted((ROOT / folder).rglob("*.md"))),
]


@pytest.mark.parametrize("file", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_readmes(file: Path) -> None:
    if file.parent.name == "results":
        pytest.skip("written by a benchmark")
    found = [finding for sentence in readme_texts(file) for finding in findings("README", sentence)]
    rows = [line for line in file.read_text().splitlines() if line.startswith("|")]
    found += [f"says {riddle[0]!r}: {row}" for row in rows if (riddle := RIDDLES.search(row))]
    assert not found, "\n".join(found)


def test_docstrings_and_comments() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {finding}"
        for file in (*(f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*.py"))), ROOT / "ci_gate.py")
        for kind, sentence in python_texts(file.read_text())
        for finding in findings(kind, sentence)
    ]
    assert not found, "\n".join(found)


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            yield from commands(command.get_command(context, sub), f"{name} {sub}")


def test_help_lines_stand_alone() -> None:
    from sagellm.cli import main

    found = []
    for name, command in commands(main, "sagellm"):
        for option in command.params:
            text = getattr(option, "help", None)
            if isinstance(option, click.Option) and option.opts != ["--help"]:
                if not text:
                    found.append(f"{name} {option.opts[0]} has no help")
                elif re.search(r"\b(its options|the same|likewise|ditto|as above)\b", text, re.I):
                    found.append(f"{name} {option.opts[0]} leans on another line: {text}")
                else:
                    found += [f"{name} {option.opts[0]} {f}" for s in sentences(text) for f in findings("help", s)]
    assert not found, "\n".join(found)


def test_strings() -> None:
    """Strings may be long, and `none` may be an allowed value."""
    found = [
        f"{file.relative_to(ROOT)}: {finding}"
        for folder in ("sagellm", "benchmarks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for sentence in strings(file.read_text())
        if "?" not in sentence  # a prompt
        for finding in findings("comment", sentence.replace("are none,", ""))
        if not finding.startswith("has")
    ]
    assert not found, "\n".join(found)


def test_native_comments() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {finding}"
        for suffix in ("h", "cpp")
        for file in sorted((ROOT / "sagellm" / "csrc").rglob(f"*.{suffix}"))
        for sentence in native_comments(file.read_text())
        for finding in findings("comment", sentence)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("patch", sorted((ROOT / "patches").glob("*.patch")), ids=lambda patch: patch.stem)
def test_patches(patch: Path) -> None:
    """The words of a patch are its preamble, and those of the files that it adds."""
    preamble, *files = re.split(r"^--- ", patch.read_text(), flags=re.MULTILINE)
    texts = [("README", sentence) for part in re.split(r"\n\s*\n", preamble) for sentence in sentences(part)]
    for file in files:
        if added := re.match(r"/dev/null\n\+\+\+ \S+(\.\w+)\n", file):
            source = "".join(f"{line[1:]}\n" for line in file.splitlines()[2:] if line.startswith("+"))
            is_python = added[1] == ".py"
            texts += python_texts(source) if is_python else (("comment", sentence) for sentence in native_comments(source))
    found = [finding for kind, sentence in texts for finding in findings(kind, sentence)]
    assert not found, "\n".join(found)
