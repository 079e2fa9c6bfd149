"""Engine and table must mean the same by the table: the patch carries the header of the native library, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

from tests.patching.engine_files import HEADER, engine_files

OURS = Path(__file__).parents[2] / "sagellm/csrc/include/sage_hooks.h"


def test_the_engine_gets_the_header_of_the_library() -> None:
    marker, _, header = engine_files()[HEADER].partition(b"\n")
    assert marker.startswith(b"// sage:0001 ")
    assert header == OURS.read_bytes()


def test_what_the_engine_includes_of_ours_is_in_the_series() -> None:
    files = engine_files()
    included = {
        name for text in files.values() for name in re.findall(r'#include "(src/turbomind/sage/[^"]+)"', text.decode())
    }
    assert HEADER in included
    assert included <= set(files)


def test_every_hook_is_called() -> None:
    header = OURS.read_text()
    table = header[header.index("typedef struct SageHooks") : header.index("} SageHooks;")]
    hooks = re.findall(r"\(\*(\w+)\)\(void\* ctx", table)
    code = b"\n".join(text for path, text in engine_files().items() if path != HEADER).decode()
    assert len(hooks) == 11
    for hook in hooks:
        assert re.search(rf"(?:hooks\.|hooks_\.|hooks_->){hook}\(", code), hook
