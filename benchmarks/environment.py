"""Machine, versions, commit and patch state, which every result carries.

`python -m benchmarks.environment` prints what is installed in this checkout, for a result of another one.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, git
from benchmarks.server import interpreter

ROOT = Path(__file__).parents[1]


def environment(checkouts: dict[str, Path | None]) -> dict[str, Any]:
    """`checkouts`: contestant -> its checkout, None for this one. `elsewhere`: what is installed in the others."""
    here = describe()
    return {
        "machine": {"processor": here["processor"], "cores": here["cores"]},
        **installed(),
        "load_at_start": here["load"],
        "commits": {name: commit(checkout or ROOT) for name, checkout in checkouts.items()},
        "elsewhere": {name: _elsewhere(checkout) for name, checkout in checkouts.items() if checkout is not None},
    }


def installed() -> dict[str, Any]:
    """Versions and patch state of this checkout."""
    from sagellm.engines.lmdeploy import patch_state

    here = describe()
    patches = {"state": patch_state().state, "lmdeploy": here["versions"]["lmdeploy"]}
    return {"python": here["python"], "versions": here["versions"], "patches": patches}


def _elsewhere(checkout: Path) -> dict[str, Any]:
    command = [interpreter(checkout), "-m", "benchmarks.environment"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    try:
        return json.loads(done.stdout)
    except ValueError:  # a revision that cannot tell
        return {"unknown": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}


def commit(checkout: Path) -> dict[str, Any]:
    """{"commit": id or None, "changed": whether tracked files differ from it}."""
    changed = git(checkout, "status", "--porcelain", "--untracked-files=no")
    return {"commit": git(checkout, "rev-parse", "HEAD"), "changed": bool(changed)}


if __name__ == "__main__":
    print(json.dumps(installed()))
