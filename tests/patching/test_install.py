"""Installing a table: what the engine takes, what it refuses and in which words. The files are those of the patches."""

from __future__ import annotations

import ctypes
import importlib.util
import sysconfig
from collections.abc import Iterator
from types import ModuleType
from typing import ClassVar

import pytest

from tests.patching.engine_files import compile_cpp

LIBRARY = """
#include "src/turbomind/sage/table.h"
using namespace turbomind::sage;
#define API extern "C" __attribute__((visibility("default")))
API const char* sage_install(const SageHooks* table) { return install(table); }
API void sage_remove() { remove(); }
API const SageHooks* sage_installed() { return installed(); }
API unsigned sage_size() { return sizeof(SageHooks); }
API unsigned sage_first_size() { return kFirstTableSize; }
"""
MODULE = """
#include "src/turbomind/sage/python.h"
PYBIND11_MODULE(engine, m) { turbomind::sage::define(m); }
"""
ABI, CAPSULE = 1, b"sage.hooks.v1"
REPLACE_TRIE, TIME_COMM = 1, 2
HEAD = [(name, ctypes.c_uint32) for name in ("abi", "struct_size", "flags", "reserved")]
HOOKS = "evict evicted released reset prefix_lookup prefix_store schedule admit step_end comm_begin comm_end".split()


class Table(ctypes.Structure):
    _fields_: ClassVar = [
        *HEAD,
        ("ctx", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in HOOKS),
        ("later", ctypes.c_uint64 * 4),
    ]


SIZE = Table.later.offset


def table(abi: int = ABI, struct_size: int = SIZE, flags: int = 0, **hooks: int) -> Table:
    return Table(abi, struct_size, flags, 0, None, **hooks)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_cpp(LIBRARY, tmp_path_factory.mktemp("table"), "table")))
    library.sage_install.restype = ctypes.c_char_p
    library.sage_installed.restype = ctypes.POINTER(Table)
    return library


@pytest.fixture(autouse=True)
def nothing_installed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "library" in request.fixturenames:
        request.getfixturevalue("library").sage_remove()


def test_the_layout_here_is_that_of_the_header(library: ctypes.CDLL) -> None:
    assert library.sage_size() == library.sage_first_size() == SIZE


REFUSED = {
    "another ABI": (table(abi=2), ["ABI 2", "engine 1", "same release"]),
    "no ABI": (table(abi=0), ["ABI 0"]),
    "a short table": (table(struct_size=SIZE - 8), [f"{SIZE - 8} bytes", f"at least {SIZE}", "struct_size"]),
    "no size": (table(struct_size=0), ["0 bytes"]),
    "unknown flags": (table(flags=TIME_COMM | 64), ["0x42", "0x3"]),
    "half an index": (table(flags=REPLACE_TRIE, prefix_lookup=1), ["prefix_store", "SAGE_REPLACE_TRIE"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_does_not_fit_is_refused_with_a_sentence(library: ctypes.CDLL, case: str) -> None:
    refused, words = REFUSED[case]
    reason = library.sage_install(ctypes.byref(refused))
    assert reason is not None and all(word in reason.decode() for word in words), reason
    assert not library.sage_installed()


def test_no_table_at_all(library: ctypes.CDLL) -> None:
    assert b"null" in library.sage_install(None)


def test_a_refused_table_leaves_the_installed_one(library: ctypes.CDLL) -> None:
    assert library.sage_install(ctypes.byref(table(evict=11))) is None
    assert library.sage_install(ctypes.byref(table(abi=9, evict=12))) is not None
    assert library.sage_installed().contents.evict == 11


def test_a_longer_table_is_read_as_far_as_it_is_known(library: ctypes.CDLL) -> None:
    longer = table(struct_size=ctypes.sizeof(Table), comm_end=7)
    longer.later[0] = 99
    assert library.sage_install(ctypes.byref(longer)) is None
    installed = library.sage_installed().contents
    assert (installed.struct_size, installed.comm_end) == (SIZE, 7)


def test_the_engine_keeps_a_copy_for_good(library: ctypes.CDLL) -> None:
    first = table(evict=1)
    assert library.sage_install(ctypes.byref(first)) is None
    kept = library.sage_installed()
    first.evict = 2
    for number in range(3, 2000):
        assert library.sage_install(ctypes.byref(table(evict=number))) is None
    library.sage_remove()
    assert not library.sage_installed()
    assert kept.contents.evict == 1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return a module that has only what bind.cpp adds to the engine's module."""
    pybind11 = pytest.importorskip("pybind11", reason="pybind11, which compiles the engine's module, is not installed")
    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    library = compile_cpp(MODULE, tmp_path_factory.mktemp("engine"), "engine", *includes)
    spec = importlib.util.spec_from_file_location("engine", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def capsule(value: Table, name: bytes = CAPSULE) -> object:
    """Holds the address of `value`, and does not keep it alive."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(value), name, None)


@pytest.mark.slow
def test_from_python(engine: ModuleType) -> None:
    before = engine.sage_query()
    assert before == before | {"abi": ABI, "capsule": CAPSULE.decode(), "struct_size": SIZE, "installed": False}
    value = table(flags=TIME_COMM)
    engine.sage_install(capsule(value))
    assert engine.sage_query() == before | {"installed": True, "table_struct_size": SIZE, "table_flags": TIME_COMM}
    engine.sage_remove()
    assert engine.sage_query() == before


@pytest.mark.slow
def test_from_python_a_foreign_object_is_refused(engine: ModuleType) -> None:
    good, other, short = table(), table(abi=3), table(struct_size=8)
    name = b"dltensor"
    for wrong, words in [
        (7, "type int, need a capsule named sage.hooks.v1"),
        (capsule(good, name), "named dltensor, need a capsule named sage.hooks.v1"),
        (capsule(other), "ABI 3"),
        (capsule(short), "8 bytes"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.sage_install(wrong)
    assert not engine.sage_query()["installed"]
