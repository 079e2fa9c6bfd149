"""What every result carries besides its figures: machine, versions, commit and patch state."""

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.machine import describe


def environment(checkouts: dict[str, Path | None]) -> dict[str, Any]:
    """`checkouts`: contestant -> its checkout, None for this one."""
    here = describe()
    from sagellm.engines.lmdeploy import patch_state

    state = patch_state()
    return {
        "machine": {"processor": here["processor"], "cores": here["cores"]},
        "python": here["python"],
        "versions": here["versions"],
        "load_at_start": here["load"],
        "patches": {"state": state.state, "lmdeploy": here["versions"]["lmdeploy"]},
        "commits": {name: commit(checkout or Path(__file__).parents[1]) for name, checkout in checkouts.items()},
    }


def commit(checkout: Path) -> dict[str, Any]:
    """{"commit": id or None, "changed": whether tracked files differ from it}."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
