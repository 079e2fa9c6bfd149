"""Devices that are full, fail or may not be written: said at opening, survived in flight, at the cost of few blocks."""

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.kv_runtime import disk_store, disk_store_folder
from sagellm.kv_runtime.base import StoreFullError
from sagellm.kv_runtime.disk_store_format import HEADER_BYTES, record_bytes
from tests.kv_runtime.store_contract import BLOCK_BYTES, block, content, put
from tests.kv_runtime.test_disk_store import files, open_store


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


@pytest.mark.parametrize("name", ["probe.tmp", "lock"])
@pytest.mark.parametrize("plant", ["link", "dangling link", "pipe"])
def test_nothing_is_written_through_a_link(written: Path, tmp_path: Path, name: str, plant: str):
    target = tmp_path / "precious"
    target.write_text("precious")
    (written / name).unlink(missing_ok=True)
    if plant == "pipe":
        os.mkfifo(written / name)
    else:
        (written / name).symlink_to(target if plant == "link" else tmp_path / "nothing")
    with pytest.raises(TierError, match="symbolic link is where|a pipe or device is where"):
        open_store(written)
    assert target.read_text() == "precious" and not (tmp_path / "nothing").exists()
    (written / name).unlink()
    store = open_store(written)
    assert store.keys() == [1, 2], "no block was lost"
    store.close()


def test_the_folder_is_this_users_alone(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    open_store(tmp_path / "new" / "folder").close()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(written)
    with pytest.raises(TierError, match="symbolic link is where"):
        open_store(tmp_path / "link")
    for mode in (0o770, 0o702):
        written.chmod(mode)
        with pytest.raises(TierError, match=f"has mode {mode:o}: others can write to it. Run chmod go-w"):
            open_store(written)
    written.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(TierError, match="this process runs as 54321; name a folder of this user"):
        open_store(written)
    monkeypatch.undo()
    store = open_store(written)
    assert store.keys() == [1, 2]
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
    command = ["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "tmpfs", str(folder)]
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
