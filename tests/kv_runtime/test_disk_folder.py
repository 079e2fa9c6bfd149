"""A folder belongs to one server at a time; one that cannot be used is refused with what to do."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.kv_runtime.disk_store_folder import LockedFolder
from tests.kv_runtime.store_contract import content, put
from tests.kv_runtime.test_disk_store import files, open_store


def test_a_second_server_is_refused(tmp_path: Path):
    """By another process, which has the first one's number, and by this one; and it works once the first is gone."""
    store = open_store(tmp_path)
    code = f"from tests.kv_runtime.test_disk_store import open_store; open_store({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    text = f"disk tier {tmp_path} is in use by process {os.getpid()}; stop that server, or name another folder."
    assert text in done.stderr
    with pytest.raises(TierError, match=f"in use by process {os.getpid()}"):
        open_store(tmp_path)
    put(store, 1)
    store.close()
    store = open_store(tmp_path)
    assert store.keys() == [1]
    store.close()


def test_a_second_server_is_told_who_was_named(tmp_path: Path):
    store = open_store(tmp_path, owner="process 17, a server")
    with pytest.raises(TierError, match="in use by process 17, a server; stop that server"):
        open_store(tmp_path)
    store.close()


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_folder(tmp_path: Path):
    """It has the lock's file open as well. And if one closes its copy of the store, the first one's lock stays."""
    store = open_store(tmp_path)
    closing = os.fork()
    if closing == 0:
        store.close()
        os._exit(0)
    os.waitpid(closing, 0)
    with pytest.raises(TierError, match="in use by process"):
        open_store(tmp_path)
    idle = os.fork()
    if idle == 0:
        signal.pause()
    try:
        store.close()
        open_store(tmp_path).close()
    finally:
        os.kill(idle, signal.SIGKILL)
        os.waitpid(idle, 0)


@pytest.mark.parametrize("is_emptied", [False, True], ids=["removed", "emptied"])
def test_a_folder_that_goes_and_is_another_stores_then(tmp_path: Path, is_emptied: bool):
    """The first one writes nothing there any more, and removes nothing: not its block 1, whose name is now the other one's."""
    first = open_store(tmp_path / "tier")
    put(first, 1)
    put(first, 2)
    for file in (tmp_path / "tier").iterdir():
        file.unlink()
    if not is_emptied:
        (tmp_path / "tier").rmdir()
    with pytest.raises(TierError, match="was removed or emptied while it was in use; start again"):
        put(first, 3)
    second = open_store(tmp_path / "tier")
    put(second, 1)
    with pytest.raises(TierError, match="was removed or emptied while it was in use; start again"):
        put(first, 3)
    first.remove(1)
    with pytest.raises(TierError, match="missing"):
        first.read(2)
    first.close()
    assert second.keys() == [1] and np.array_equal(second.read(1), content(1))
    assert len(files(tmp_path)) == 1 and not files(tmp_path, "tmp")
    second.close()


def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TierError, match="folder"):
            open_store(path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def folder_of_a_user() -> Iterator[Path]:
    """Root may write anywhere; so the test is somebody else for a while, in a folder that is theirs."""
    with tempfile.TemporaryDirectory() as name:
        if os.geteuid() != 0:
            yield Path(name)
            return
        os.chown(name, 65534, -1)
        os.seteuid(65534)
        yield Path(name)
        os.seteuid(0)


def test_a_folder_without_permission(folder_of_a_user: Path):
    (folder_of_a_user / "tier").mkdir(0o500)
    for path in (folder_of_a_user / "tier", folder_of_a_user / "tier" / "below"):
        with pytest.raises(TierError, match="permission denied; give this user the right to write there"):
            open_store(path)


def test_the_process_to_stop_is_the_server_not_its_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(pid=4711))
    folder = LockedFolder(tmp_path)
    with pytest.raises(TierError, match="in use by process 4711; stop that server"):
        LockedFolder(tmp_path)
    folder.close()
