"""Folders of processes that were killed go at the next start; those of others, and those in use, stay."""

import os
import subprocess
import sys
import tempfile
import time

from sagellm.core.run_folder import hold, remove_abandoned


def test_only_abandoned_folders_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("sagellm-abandoned", "sagellm-held", "sagellm-foreign", "sagellm-new", "sagellm-empty", "other-abandoned")
    folders = {name.partition("-")[2] if name[0] == "s" else "other": tmp_path / name for name in names}
    for folder in folders.values():
        folder.mkdir()
    code = "import sys; from pathlib import Path; from sagellm.core.run_folder import hold; hold(Path(sys.argv[1]))"
    for name in ("abandoned", "other"):
        subprocess.run([sys.executable, "-c", code, folders[name]], check=True)
        (folders[name] / "socket").touch()
    mark = hold(folders["held"])
    (folders["foreign"] / "thesis.txt").touch()
    (tmp_path / "sagellm-link").symlink_to(folders["foreign"])
    (tmp_path / "sagellm-file").touch()
    old = time.time() - 3600
    for name in ("foreign", "empty", "abandoned", "held"):
        os.utime(folders[name], (old, old))
    remove_abandoned("sagellm-*")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"sagellm-held", "sagellm-foreign", "sagellm-new", "other-abandoned", "sagellm-link", "sagellm-file"}
    assert (folders["foreign"] / "thesis.txt").exists()
    os.close(mark)
    remove_abandoned("sagellm-*")
    assert not folders["held"].exists()
