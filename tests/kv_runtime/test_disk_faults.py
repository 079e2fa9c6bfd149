"""Damaged files, and folders and devices that cannot be used: said at opening, survived in flight, never a wrong block."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.kv_runtime import disk_store, disk_store_folder
from sagellm.kv_runtime.base import StoreFullError
from sagellm.kv_runtime.disk_store_folder import LockedFolder
from sagellm.kv_runtime.disk_store_format import FIELDS, HEADER_BYTES, SEAL_BYTES, record_bytes
from tests.kv_runtime.store_contract import BLOCK_BYTES, block, content, put
from tests.kv_runtime.test_disk_store import files, open_store

FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
# One or more of each part of the file: magic, version, flags, layout, digest, key, parent, depth to time, CRC, length of the
# tenant, zeros, seal, first, middle and last byte of the block.
PLACES = [
    0, 7, 8, 11, 12, 16, 31, 32, 47, 48, 55, 56, 63, 64, 72, 80, 88, 95, FIELDS.size - 6, FIELDS.size - 1, FIELDS.size,
    2000, HEADER_BYTES - SEAL_BYTES - 1, HEADER_BYTES - SEAL_BYTES, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2500,
    FILE_BYTES - 1,
]  # fmt: skip
LENGTHS = [0, 1, 8, FIELDS.size, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, FILE_BYTES - 1, FILE_BYTES + 1]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with blocks 1 and 2, closed."""
    store = open_store(tmp_path / "tier")
    put(store, 1, tenant_id="tenant")
    put(store, 2)
    store.close()
    return tmp_path / "tier"


def flip(file: Path, place: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def resize(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length].ljust(length, b"\0"))


def zero(file: Path, first: int) -> None:
    """As after a loss of power: the length is there, the bytes are not."""
    file.write_bytes(file.read_bytes()[:first].ljust(FILE_BYTES, b"\0"))


DAMAGES = (
    {f"bit {bit} of byte {place}": (flip, place, bit) for place in PLACES for bit in (0, 7)}
    | {f"{length} bytes": (resize, length) for length in LENGTHS}
    | {f"zeros from {first}": (zero, first) for first in (0, 512, HEADER_BYTES, HEADER_BYTES + 512)}
)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_dropped(written: Path, damage: tuple):
    """Before the folder is opened, or while it is: block 1 is never served, its file goes, and block 2 is as it was."""
    change, *how = damage
    whole = files(written)[0].read_bytes()
    for is_open in (False, True):
        (file,) = (file for file in files(written) if file.name.startswith(f"{1:016x}"))
        if not is_open:
            change(file, *how)
        store = open_store(written)
        if is_open:
            change(file, *how)
        if 1 in store:
            if file.stat().st_size > FILE_BYTES:  # bytes behind the block's own are none of it
                assert np.array_equal(store.read(1), content(1))
                store.remove(1)
            else:
                with pytest.raises(TierError, match="was dropped; compute it again"):
                    store.read(1)
        assert 1 not in store and not file.exists()
        assert np.array_equal(store.read(2), content(2))
        assert store.used_bytes() == store.capacity_bytes // 6
        store.close()
        file.write_bytes(whole)


def test_each_kind_of_damage_has_its_name(written: Path):
    def reason(change: Callable, *how: int) -> dict[str, int]:
        shutil.copytree(written, written.parent / "copy", dirs_exist_ok=True)
        change(files(written.parent / "copy")[0], *how)
        store = open_store(written.parent / "copy")
        store.close()
        return {name: count for name, count in store.counters().items() if name.startswith("dropped")}

    assert reason(flip, 0, 0) == reason(flip, 100, 0) == {"dropped corrupt": 1}
    assert reason(flip, 8, 1) == {"dropped other version": 1}
    assert reason(resize, 100) == reason(resize, FILE_BYTES - 1) == {"dropped torn": 1}


def test_a_file_under_the_name_of_another_block_is_not_taken_for_it(written: Path):
    first, second = files(written)
    second.write_bytes(first.read_bytes())
    store = open_store(written)
    assert store.keys() == [1] and store.counters() == {"dropped corrupt": 1}
    put(store, 3)
    newest = files(written)[-1]
    newest.write_bytes(files(written)[0].read_bytes())
    with pytest.raises(TierError, match="corrupt"):
        store.read(3)
    store.close()


def test_a_file_that_somebody_deleted_is_missed(written: Path):
    store = open_store(written)
    files(written)[0].unlink()
    with pytest.raises(TierError, match="is missing and was dropped"):
        store.read(1)
    assert store.keys() == [2] and store.counters() == {"dropped missing": 1}
    store.close()


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


def failing(call: Callable, number: int, after: int = 0) -> Callable:
    """`call`, which raises OSError `number` once it was called `after` times."""
    calls = iter(range(after))

    def fail(*arguments: object, **options: object) -> object:
        if next(calls, None) is None:
            raise OSError(number, os.strerror(number))
        return call(*arguments, **options)

    return fail


@pytest.mark.parametrize(
    ("call", "number", "text"),
    [
        ("open", errno.EROFS, "the file system is read-only; mount it writable"),
        ("writev", errno.EIO, "the device fails"),
        ("open", errno.EMFILE, "too many open files; raise the limit"),
        ("open", errno.ENOLCK, "No locks available"),
    ],
)
def test_what_cannot_be_used_is_said_at_opening(
    written: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, text: str
):
    """And costs no block."""
    with monkeypatch.context() as patch:
        patch.setattr(disk_store_folder.os, call, failing(getattr(os, call), number))
        with pytest.raises(TierError, match=text) as caught:
            open_store(written)
    assert str(written) in str(caught.value)
    store = open_store(written)
    assert store.keys() == [1, 2] and store.counters() == {}
    store.close()


@pytest.mark.parametrize(("call", "after"), [("writev", 0), ("open", 0), ("rename", 0), ("utime", 0), ("close", 0)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS])
def test_a_failed_write_is_refused_and_the_store_goes_on(
    written: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int, number: int
):
    store = open_store(written)
    used = store.used_bytes()
    store.prepare(block(3))[:] = content(3)
    with monkeypatch.context() as patch:
        real, fail = getattr(os, call), failing(getattr(os, call), number, after)
        if call == "close":  # the file is closed, and says only then that it could not be written

            def fail(file: int) -> None:
                real(file)
                raise OSError(number, os.strerror(number))

        patch.setattr(disk_store.os, call, fail)
        with pytest.raises(TierError, match="block 3 cannot be written") as caught:
            store.commit(3)
    assert isinstance(caught.value, StoreFullError) == (number == errno.ENOSPC)
    assert store.keys() == [1, 2] and store.used_bytes() == used and store.counters()["failed writes"] == 1
    assert not files(written, "tmp") and len(files(written)) == 2
    if number == errno.ENOSPC:  # as much as is there, no more
        store.remove(2)
    put(store, 3)
    assert np.array_equal(store.read(3), content(3))
    store.close()


def test_a_limit_of_file_sizes_is_a_full_device(written: Path):
    """The kernel's own refusal, in the middle of a file."""
    store = open_store(written)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store.prepare(block(3))[:] = content(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 100, hard))
    try:
        with pytest.raises(StoreFullError, match="a file may not be that large"):
            store.commit(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not files(written, "tmp") and store.keys() == [1, 2]
    put(store, 3)
    store.close()


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system(small_device: Path):
    """The bound becomes what the device can hold; at the next start the oldest blocks make way for the first new ones."""
    store = open_store(small_device, 1 << 20)
    with pytest.raises(StoreFullError, match="the device is full"):
        for key in range(20):
            put(store, key)
    held = store.keys()
    assert len(held) > 10 and all(np.array_equal(store.read(key), content(key)) for key in held)
    assert store.capacity_bytes == store.used_bytes() and store.capacity_blocks(BLOCK_BYTES) == len(held)
    assert store.counters()["lowered capacity"] == 1
    with pytest.raises(StoreFullError, match="remove others first"):
        store.prepare(block(98))
    store.remove(held[0])
    put(store, 99)
    assert store.keys() == [*held[1:], 99] and store.counters()["lowered capacity"] == 1
    store.close()
    store = open_store(small_device, 1 << 20)
    num_dropped = store.counters()["dropped device full"]
    assert 0 < num_dropped < 8 and store.keys() == [*held[1 + num_dropped :], 99]
    assert store.used_bytes() == len(store) * record_bytes(BLOCK_BYTES) and store.capacity_bytes == 1 << 20
    put(store, 100)
    store.close()
    (small_device / "filler").touch()
    with suppress(OSError), (small_device / "filler").open("r+b", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    store = open_store(small_device, 1 << 20)
    put(store, 101)
    store.close()
    for file in files(small_device):
        file.unlink()
    with (small_device / "filler").open("ab", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(TierError, match="the device is full; free some room"):
        open_store(small_device, 1 << 20)


def test_a_device_that_stays_full_costs_few_blocks(written: Path, monkeypatch: pytest.MonkeyPatch):
    """Its room is not to be had by removing files."""
    with monkeypatch.context() as patch:
        patch.setattr(disk_store, "MAX_GIVEN_UP_BYTES", 0)
        patch.setattr(disk_store_folder.os, "writev", failing(os.writev, errno.ENOSPC))
        with pytest.raises(StoreFullError, match="the device is full"):
            open_store(written)
    store = open_store(written)
    assert store.keys() == [2]
    store.close()


def test_a_full_device_without_blocks_of_the_store_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(disk_store_folder.os, "writev", failing(os.writev, errno.EDQUOT))
        with pytest.raises(StoreFullError, match="quota of this user is used up"):
            put(store, 1)
    assert store.capacity_blocks(BLOCK_BYTES) == 1
    put(store, 1)
    with pytest.raises(StoreFullError):
        store.prepare(block(2))
    store.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_read_that_fails_for_want_of_something_else_costs_no_block(
    written: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    store = open_store(written)
    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "open", failing(os.open, number))
        with pytest.raises(TierError, match="block 1 cannot be read"):
            store.read(1)
    assert np.array_equal(store.read(1), content(1))
    store.close()


def test_a_block_that_the_device_cannot_read_is_dropped(written: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(written)
    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "preadv", failing(os.preadv, errno.EIO))
        with pytest.raises(TierError, match="the device fails"):
            store.read(1)
    assert store.keys() == [2] and store.counters() == {"dropped unreadable": 1}
    store.close()


def test_a_file_system_that_has_become_read_only_is_still_read(written: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(written)
    with monkeypatch.context() as patch:
        for call in ("utime", "unlink", "writev", "rename"):
            patch.setattr(disk_store.os, call, failing(getattr(os, call), errno.EROFS))
        assert np.array_equal(store.read(1), content(1))
        store.remove(2)
        assert store.keys() == [1] and store.counters()["failed removals"] == 1
    store.close()


def test_too_many_open_files_at_opening_drop_nothing(written: Path):
    """The kernel's own refusal."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [int(name) for name in os.listdir("/proc/self/fd")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, limits[1]))
    fill = []
    try:
        with pytest.raises(OSError):
            while True:
                fill.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(TierError, match="too many open files; raise the limit"):
            open_store(written)
        os.close(fill.pop())  # enough for the lock, not for what comes after it
        with pytest.raises(TierError, match="too many open files; raise the limit"):
            open_store(written)
    finally:
        for file in fill:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    store = open_store(written)
    assert store.keys() == [1, 2] and store.counters() == {}
    store.close()


def test_the_process_to_stop_is_the_server_not_its_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(pid=4711))
    folder = LockedFolder(tmp_path)
    with pytest.raises(TierError, match="in use by process 4711; stop that server"):
        LockedFolder(tmp_path)
    folder.close()
