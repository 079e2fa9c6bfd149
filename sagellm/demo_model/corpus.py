"""Training text from the standard library: short documented functions, as questions with answers and as source."""

import ast
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sagellm.demo_model.base import DemoModelError, DemoRecipe

# Tests and generated tables are most of the library's bytes and read badly; the rest is not part of every Python.
SKIPPED_FOLDERS = frozenset(
    "test tests idlelib lib2to3 site-packages dist-packages ensurepip turtledemo pydoc_data encodings "
    "__pycache__ __phello__ lib-dynload ctypes distutils msilib tkinter".split()
)
MIN_FUNCTION_CHARS = 80
MAX_FUNCTION_CHARS = 480  # about 150 tokens: a question, its answer and the end fit in one training window
MIN_DOC_CHARS = 12
MAX_DOC_CHARS = 90
GREETING_REPEATS = 4

_ABOUT = (
    "I am a very small demonstration model, trained for about a minute on the Python standard library. "
    "Ask me to write a function."
)
GREETINGS = (
    ("Hello", f"Hello! {_ABOUT}"),
    ("Hi", f"Hello! {_ABOUT}"),
    ("Hello! How are you?", f"Hello! {_ABOUT}"),
    ("Who are you?", _ABOUT),
    ("What are you?", _ABOUT),
    ("What can you do?", _ABOUT),
)


class Function(NamedTuple):
    """One function of the standard library."""

    name: str
    header: str  # from `def` to the docstring
    summary: str  # first sentence of the docstring without its full stop, or ""
    source: str  # dedented, no decorators, the docstring cut to the summary
    is_method: bool


class Chat(NamedTuple):
    """One question and its answer."""

    user: str
    assistant: str


class Corpus(NamedTuple):
    """Training documents, already in their order."""

    chats: tuple[Chat, ...]
    plain: tuple[str, ...]


def source_files(root: Path) -> list[Path]:
    """The `.py` files below `root` that are read, in an order that does not depend on the file system."""
    found = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if not SKIPPED_FOLDERS.intersection(folders) and not (folders and folders[0].startswith("config-")):
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def functions_in(source: str) -> Iterator[Function]:
    """Every function and method of a module whose length fits, in source order; nothing for what does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's strings are not our user's concern
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        function = _function(node, lines)
        if function and MIN_FUNCTION_CHARS <= len(function.source) <= MAX_FUNCTION_CHARS and function.source.isascii():
            yield function


def _function(node: ast.FunctionDef, lines: list[str]) -> Function | None:
    """The function with its docstring cut to the first sentence, or None when no code is left.

    Long docstrings are prose, which a model this small turns into loops of "the number of the number of"; code it
    learns well.
    """
    docstring = ast.get_docstring(node)
    body = node.body[1:] if docstring else node.body
    if not body or node.body[0].lineno == node.lineno:
        return None
    header = lines[node.lineno - 1 : node.body[0].lineno - 1]
    code = lines[(node.body[0].end_lineno if docstring else node.body[0].lineno - 1) : node.end_lineno]
    while code and not code[0].strip():
        del code[0]
    summary = _summary(docstring or "")
    if summary:
        header.append(" " * body[0].col_offset + f'"""{summary}."""')
    text = textwrap.dedent("\n".join([*header, *code])).strip()
    head = textwrap.dedent("\n".join(header)).strip()
    is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
    return Function(node.name, head, summary, text, is_method) if text.startswith("def ") else None


def _summary(docstring: str) -> str:
    """First sentence of a docstring on one line, or "" when it would make a poor question."""
    first = " ".join(docstring.strip().split("\n\n")[0].split())
    first = re.split(r"\.(?:\s|$)", first)[0].strip(" .:")
    good = MIN_DOC_CHARS <= len(first) <= MAX_DOC_CHARS and first[0].isalpha() and "(" not in first.split()[0]
    return first if good else ""


def _third_person(summary: str) -> str:
    """`Return the size` -> `returns the size`; a summary that opens with no verb we know is only lower-cased."""
    word, _, rest = summary.partition(" ")
    if len(word) > 1 and word[1:].islower():
        word = word.lower()
    if word in _VERBS:
        word += "es" if word.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{word} {rest}"


_VERBS = frozenset(
    "return create get set check test read write parse convert add remove make compute call open close print send "
    "format find load save handle run start stop wait update delete generate build decode encode yield raise register "
    "replace compare split join match process fetch push pop extract list append insert invoke initialize determine "
    "emit construct execute receive do put search show walk turn use clear flush reset acquire release evaluate "
    "display give map move normalize produce provide query record report resolve schedule skip store strip take "
    "transform unregister unpack validate wrap".split()
)


def ask(function: Function, style: int) -> Chat:
    """The function as the answer to a question; `style` (0, 1, 2 or 3) picks the wording."""
    wish = _third_person(function.summary)
    questions = (
        f"Write a function `{function.name}` that {wish}.",
        f"Write a Python function that {wish}.",
        f"Complete this code:\n\n{function.header}",
        f"Write the function `{function.name}`.",
    )
    return Chat(questions[style], function.source)


def build_corpus(recipe: DemoRecipe, root: Path | None = None) -> Corpus:
    """Choose and word the training documents.

    Args:
        recipe: how many files and functions of each kind, and the seed that chooses among them.
        root: folder of the library's sources; by default that of the running Python.

    Raises:
        DemoModelError: `root` holds too little Python source to train on.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    seen: dict[str, Function] = {}
    for path in source_files(root)[: recipe.max_files]:
        for function in functions_in(path.read_text(encoding="utf-8", errors="ignore")):
            seen.setdefault(function.source, function)
    rng = random.Random(recipe.seed)
    functions = list(seen.values())
    rng.shuffle(functions)
    # Plain functions first: an answer that stands on its own reads better than a method torn out of its class.
    functions.sort(key=lambda function: function.is_method)
    asked = [function for function in functions if function.summary][: recipe.max_functions]
    if len(asked) < 8:
        raise DemoModelError(
            f"{root} holds {len(asked)} short documented functions; at least 8 are needed to train the demo model. "
            "Use a Python whose standard library is installed as .py files, or give the server a model of your own."
        )
    plain = [function.source for function in functions if not function.summary][: recipe.max_plain]
    chats = [ask(function, index % 4) for index, function in enumerate(asked)]
    chats += [Chat(*pair) for pair in GREETINGS for _ in range(GREETING_REPEATS)]
    return Corpus(tuple(chats), tuple(plain))
