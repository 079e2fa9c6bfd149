"""Plug-ins by name: what cannot be found or built says what there is."""

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from sagellm.core import registry
from sagellm.core.config import PluginSpec
from sagellm.core.errors import PluginError, SageError
from sagellm.core.hooks import Plugin
from sagellm.core.registry import find_plugin, known_plugins, load_plugin


class Good(Plugin):
    def __init__(self, size=1):
        self.size = size


class Unbuildable(Plugin):
    def __init__(self):
        raise OSError("no disk")


class NoPlugin:
    pass


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
