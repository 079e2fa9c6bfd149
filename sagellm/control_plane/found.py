"""Find the running manager: by argument, by environment, or by the file that it leaves for its user."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from sagellm.core.cached_folder import default_cache_dir

__all__ = ["KEY_VARIABLE", "URL_VARIABLE", "FoundManager", "find_manager", "run_folder"]

URL_VARIABLE, KEY_VARIABLE = "SAGELLM_URL", "SAGELLM_API_KEY"
LOOK_S = 5.0


class FoundManager(NamedTuple):
    """`url`: of its gateway, without /v1. `control_key`: None where another user or machine has it."""

    url: str
    control_key: str | None = None


def run_folder() -> Path:
    """Return the folder with a file for each running manager of this user."""
    return default_cache_dir() / "managers"


def find_manager(url: str | None = None) -> FoundManager | None:
    """Return the manager at `url`, else that of the environment, else the last one that this user started and that answers."""
    wanted = (url or os.environ.get(URL_VARIABLE, "")).rstrip("/").removesuffix("/v1")
    files = sorted(run_folder().glob("*.json"), key=_changed, reverse=True)
    for file in files:
        try:
            facts = json.loads(file.read_text())
            found = FoundManager(facts["url"], facts["control_key"])
            is_running = Path(f"/proc/{int(facts['pid'])}").exists()
        except (OSError, ValueError, TypeError, KeyError):  # it ends now, or its disk was full
            continue
        if found.url == wanted or (not wanted and is_running and _answers(found.url)):
            return found
    return FoundManager(wanted) if wanted else None


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=LOOK_S).close()
    except urllib.error.HTTPError:  # it has no engine yet
        return True
    except OSError:
        return False
    return True
