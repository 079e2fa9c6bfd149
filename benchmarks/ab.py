"""Base and head of the project against each other: built side by side, up together, asked in turn."""

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from benchmarks.config import BenchmarkConfig, Contestant
from benchmarks.errors import BenchmarkError
from benchmarks.machine import git
from benchmarks.result import Result
from benchmarks.runner import BenchmarkRunner, require_empty

ROOT = Path(__file__).parents[1]
BASE, CONTROL, HEAD = "base", "control", "head"


def run_ab(base_rev: str, config: BenchmarkConfig, out: Path) -> Result:
    """Measure `base_rev`, `base_rev` once more as the control, and this checkout as it is.

    Raises:
        BenchmarkError: no such revision, it cannot be built, or `out` holds something already.
    """
    require_empty(out)
    found = git(ROOT, "rev-parse", "--verify", "--quiet", f"{base_rev}^{{commit}}")
    if found is None:
        raise BenchmarkError(f"{base_rev!r} is no revision of {ROOT}; give a branch, a tag or a commit")
    with tempfile.TemporaryDirectory(prefix="sagellm-base-") as folder:
        checkout = Path(folder) / "base"
        try:
            _build(found, checkout)
            sides = (
                Contestant(name=BASE, checkout=checkout),
                Contestant(name=CONTROL, checkout=checkout),
                Contestant(name=HEAD),
            )
            return BenchmarkRunner(out).run(config.model_copy(update={"contestants": sides}))
        finally:
            git(ROOT, "worktree", "remove", "--force", str(checkout))


def _build(commit: str, checkout: Path) -> None:
    """A worktree of its own with an environment of its own: patches and dependencies are part of what is compared."""
    if git(ROOT, "worktree", "add", "--detach", str(checkout), commit) is None:
        raise BenchmarkError(f"git cannot check {commit[:12]} out beside {ROOT}")
    plain = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")}
    pipe = subprocess.PIPE
    build = subprocess.Popen(
        ["./apply_patches.sh"], cwd=checkout, env=plain, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, errors = build.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(build.pid, signal.SIGKILL)  # or pip would go on writing into a folder that is being removed
        build.communicate()
        raise
    if build.returncode != 0:
        last = (errors or out).strip().splitlines()[-1:]
        raise BenchmarkError(f"./apply_patches.sh of {commit[:12]} ended with code {build.returncode}: {' '.join(last)}")

