"""Tests of the corpus: the texts that are taken from the standard library."""

from pathlib import Path

import pytest

from sagellm.demo_model import DemoModelError, DemoRecipe
from sagellm.demo_model.corpus import MAX_FUNCTION_CHARS, ask, build_corpus, functions_in, source_files

MODULE = '''
class Box:
    @property
    def size(self):
        """Return the number of things in the box.

        More about it.
        """
        # Counted anew each time.
        return len(self.things) + len(self.others)

def no_doc(first, second):
    total = first + second
    return total * 2 + first * second

def only_doc(first_argument, second_argument):
    """Return nothing at all, whatever the first and the second argument may be."""

def one_line(): return "a function on one line is left out, since it has no indented body"
'''


def test_functions_are_dedented_and_keep_one_docstring_line():
    size, no_doc = functions_in(MODULE)
    assert size.source == (
        'def size(self):\n    """Return the number of things in the box."""\n'
        "    # Counted anew each time.\n    return len(self.things) + len(self.others)"
    )
    assert (size.summary, size.is_method) == ("Return the number of things in the box", True)
    assert (no_doc.name, no_doc.summary, no_doc.is_method) == ("no_doc", "", False)


def test_questions():
    function = next(functions_in(MODULE))
    questions = [ask(function, style).user for style in range(4)]
    assert questions[0] == "Write a function `size` that returns the number of things in the box."
    assert questions[1] == "Write a Python function that returns the number of things in the box."
    assert questions[2].endswith(function.header) and function.source.startswith(function.header)
    assert questions[3] == "Write the function `size`."


def test_source_that_does_not_parse_is_left_out():
    assert list(functions_in("def broken(:\n    pass\n")) == []
    assert list(functions_in("a\0b")) == []


def test_test_packages_are_skipped(tmp_path: Path):
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "site-packages/f.py", "config-3.11-x/g.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path.relative_to(tmp_path)) for path in source_files(tmp_path)] == ["a/c.py", "b.py"]


@pytest.mark.slow
def test_corpus_of_this_python_is_the_same_each_time():
    recipe = DemoRecipe(max_files=40, max_functions=60, max_plain=10)
    corpus = build_corpus(recipe)
    assert corpus == build_corpus(recipe)
    assert corpus != build_corpus(recipe.model_copy(update={"seed": 1}))
    assert len(corpus.plain) == 10
    code = [chat for chat in corpus.chats if chat.assistant.startswith("def ")]
    assert len(code) == 60
    assert all(len(chat.assistant) <= MAX_FUNCTION_CHARS for chat in code)


def test_a_library_without_sources_is_an_error(tmp_path: Path):
    with pytest.raises(DemoModelError, match="holds 0 short documented functions; at least 8 are needed"):
        build_corpus(DemoRecipe(), tmp_path)
