"""Which `sagellm` and which extension a process gets."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import sagellm
from sagellm import _core

ROOT = Path(__file__).parents[2]


def place_of_extension(_: int) -> str:
    from sagellm import _core

    return _core.__file__


def test_the_extension_lies_beside_the_sources() -> None:
    assert Path(sagellm.__file__).parent == Path(_core.__file__).parent == ROOT / "sagellm"


def test_a_spawned_process_gets_the_same_one() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(place_of_extension, [0]) == [_core.__file__]


def test_another_checkout_is_not_shadowed_by_the_one_that_was_installed(tmp_path: Path) -> None:
    (tmp_path / "sagellm").mkdir()
    (tmp_path / "sagellm" / "__init__.py").touch()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", "import sagellm; print(sagellm.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "sagellm/__init__.py"
