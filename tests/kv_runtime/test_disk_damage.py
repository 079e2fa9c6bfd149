"""Damaged files are dropped with their reason; a wrong block is never served."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.kv_runtime.disk_store_format import FIELDS, HEADER_BYTES, SEAL_BYTES
from tests.kv_runtime.store_contract import BLOCK_BYTES, content, put
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
            if file.stat().st_size > FILE_BYTES:  # bytes behind the block's own do not belong to the block
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
