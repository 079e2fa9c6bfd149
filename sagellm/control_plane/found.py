"""Find the running manager, by argument, by environment or by the file that it leaves for its user; and ask it."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.errors import ConfigError, EngineError

__all__ = ["CONTROL_HEADER", "KEY_VARIABLE", "URL_VARIABLE", "FoundManager", "ask", "find_manager", "run_folder"]

URL_VARIABLE, KEY_VARIABLE = "SAGELLM_URL", "SAGELLM_API_KEY"
CONTROL_HEADER = "x-sagellm-control"  # a page of another site cannot send it
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


def ask(
    manager: FoundManager, method: str, path: str, body: dict[str, Any] | None = None, *, api_key: str | None = None,
    timeout_s: float | None = None,
) -> Any:  # fmt: skip
    """Return the JSON that a control route answers.

    Raises:
        ConfigError: it refuses, in its own words.
        EngineError: nothing answers there, or an engine could not do it.
    """
    headers = {"content-type": "application/json"}
    if manager.control_key is not None:
        headers[CONTROL_HEADER] = manager.control_key
    if api_key := api_key or os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {api_key}"
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(manager.url + path, content, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            words = json.load(error)["error"]["message"]
        except (ValueError, TypeError, KeyError):
            words = f"{manager.url}{path} answers {error.code}; is it a manager's gateway?"
        raise (EngineError if error.code >= 500 else ConfigError)(words) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise EngineError(f"{manager.url} does not answer as a manager: {why}. Start one with `sagellm up`.") from None
