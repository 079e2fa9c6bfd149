"""Plug-ins by name: what cannot be found or built says what there is."""

import re
import subprocess
import sys
from abc import ABC, abstractmethod
from importlib.metadata import EntryPoint

import pytest

import sagellm
from sagellm.core import registry
from sagellm.core.config import PluginSpec
from sagellm.core.errors import PluginError, SageError
from sagellm.core.hooks import Plugin
from sagellm.core.registry import Registry, find_plugin, known_plugins, load_plugin


class Good(Plugin):
    def __init__(self, size=1):
        self.size = size


class Unbuildable(Plugin):
    def __init__(self):
        raise OSError("no disk")


class NoPlugin:
    pass


class Shape(ABC):
    @abstractmethod
    def area(self): ...


INSTANCE = Good()
HERE = __name__


@pytest.fixture
def offered(monkeypatch):
    entries = [
        EntryPoint("good", f"{HERE}:Good", registry.GROUP),
        EntryPoint("broken", "sagellm_nowhere:Thing", registry.GROUP),
        EntryPoint("apple", f"{HERE}:NoPlugin", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == registry.GROUP else [])


def test_by_entry_point_and_by_class(offered):
    assert find_plugin("good") is Good
    assert find_plugin(f"{HERE}:Good") is Good
    assert known_plugins() == ["apple", "broken", "good"]
    assert load_plugin(PluginSpec(name="good", options={"size": 3})).size == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("goood", "unknown plug-in 'goood'; known are: apple, broken, good. Or name a class as module:Class."),
        ("broken", "plug-in broken: cannot load sagellm_nowhere:Thing (No module named 'sagellm_nowhere')."),
        ("apple", "no plug-in; give a subclass of sagellm.core.hooks.Plugin"),
        ("sagellm_nowhere:Thing", "cannot import sagellm_nowhere"),
        (":Thing", "cannot import a module without a name"),
        (f"{HERE}:Missing", f"module {HERE} has no Missing"),
        (f"{HERE}:", f"module {HERE} has no class without a name"),
        (f"{HERE}:NoPlugin", "no plug-in; give a subclass of sagellm.core.hooks.Plugin"),
        (f"{HERE}:INSTANCE", "no plug-in; give a subclass of sagellm.core.hooks.Plugin"),
    ],
)
def test_what_cannot_be_found(offered, name, message):
    with pytest.raises(PluginError, match=re.escape(message)) as caught:
        find_plugin(name)
    assert isinstance(caught.value, SageError)


def test_nothing_installed(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    with pytest.raises(PluginError, match="known are: none installed"):
        find_plugin("lru")


@pytest.mark.parametrize("text", ["import sagellm_nowhere", "raise RuntimeError('no')", "def :", "{}.missing"])
def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch, text):
    (tmp_path / "sagellm_broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sagellm_broken_module", raising=False)
    with pytest.raises(PluginError, match="cannot import sagellm_broken_module"):
        find_plugin("sagellm_broken_module:Thing")


@pytest.mark.parametrize(("name", "options"), [("Good", {"colour": "red"}), ("Unbuildable", {})])
def test_what_cannot_be_built(name, options):
    with pytest.raises(PluginError, match=re.escape(f"{HERE}:{name} cannot be built with options {options}")):
        load_plugin(PluginSpec(name=f"{HERE}:{name}", options=options))


def test_a_file_in_the_folder_is_a_name(tmp_path, monkeypatch):
    """A new class is one file. The file of a name wins over another file with a class of that name."""
    folder = tmp_path / "sagellm_shapes"
    folder.mkdir()
    base = "from tests.core.test_registry import Shape\n"
    (folder / "__init__.py").write_text("")
    (folder / "a_native.py").write_text(base + "class Fast(Shape):\n    name = 'square'\n    def area(self): ...\n")
    (folder / "square.py").write_text(base + "class Square(Shape):\n    name = 'square'\n    def area(self): ...\n")
    (folder / "half_open.py").write_text(base + "class HalfOpen(Shape):\n    name = 'half'\n")  # abstract
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    shapes = Registry("shape", Shape, PluginError, "sagellm.shapes", folder="sagellm_shapes", aliases={"box": "square"})
    assert shapes.names() == ["square"] and shapes.find("Box").__name__ == "Square"
    (folder / "circle.py").write_text(base + "class Circle(Shape):\n    name = 'circle'\n    def area(self): ...\n")
    again = Registry("shape", Shape, PluginError, "sagellm.shapes", folder="sagellm_shapes")
    assert again.names() == ["circle", "square"]
    with pytest.raises(PluginError, match="unknown shape 'x'; known are: circle, square"):
        again.find("x")
    with pytest.raises(PluginError, match="is abstract; define area"):
        again.find("sagellm_shapes.half_open:HalfOpen")


def test_the_package_root_imports_on_use():
    code = "import sys, sagellm; print('numpy' in sys.modules, sagellm.SageConfig().block_size, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "64", "False"], done.stderr
    assert all(getattr(sagellm, name) for name in sagellm.__all__)
