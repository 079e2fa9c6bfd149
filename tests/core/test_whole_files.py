"""Files that are written at once, and figures."""

import builtins

import pytest

from sagellm.core.cached_folder import write_whole
from sagellm.core.errors import CommError, ConfigError
from sagellm.core.figure import new_figure, save_figure


def test_a_write_that_fails_leaves_the_older_file_and_nothing_else(tmp_path):
    file = tmp_path / "facts.json"
    write_whole(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new" * 10_000 + "\ud800")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError):
        write_whole(tmp_path / "nowhere" / "facts.json", "new")


def test_a_figure_goes_into_a_file_of_a_known_kind(tmp_path):
    assert save_figure(new_figure(1, 1), tmp_path / "a.svg").read_text().startswith("<?xml")
    with pytest.raises(CommError, match=r"cannot write .*a\.docx: .*Use a \.png, \.svg or \.pdf file"):
        save_figure(new_figure(1, 1), tmp_path / "a.docx", CommError)
    with pytest.raises(ConfigError, match=r"cannot write .*a\.png"):
        save_figure(new_figure(1, 1), tmp_path / "nowhere" / "a.png")
    assert save_figure(new_figure(1, 1), tmp_path / "nowhere" / "a.png", make_folder=True).exists()


def test_without_matplotlib(monkeypatch):
    real = builtins.__import__

    def without(name, *more, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CommError, match="pip install matplotlib"):
        new_figure(1, 1, CommError)
