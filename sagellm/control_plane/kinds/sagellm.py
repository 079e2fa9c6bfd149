"""`sagellm serve` as a process of the manager, with any of its settings."""

import json
import sys
from pathlib import Path
from typing import Any

from sagellm.control_plane.base import totals
from sagellm.control_plane.child_engine import ChildEngine, needs
from sagellm.core.config import read_config
from sagellm.core.errors import ConfigError
from sagellm.core.run_folder import RunFolder
from sagellm.models import find_model, prepare_model

__all__ = ["SageLLM"]

FOLDER = "sagellm-engine-"
OURS = ("host", "port", "api_key", "pd")  # set by the manager


class SageLLM(ChildEngine):
    """The engine of this project.

    Args:
        model: name, folder, .gguf file or hub id; None: the default model of `sagellm serve`.
        settings: settings of the server, by the names of `SageConfig`.

    Attributes:
        config: the same, as the server reads them.

    Raises:
        ConfigError: an unknown setting or an invalid value.
    """

    name = "sagellm"
    is_local = False
    metrics = {  # noqa: RUF012
        "running": "lmdeploy:num_requests_running", "waiting": "lmdeploy:num_requests_waiting",
        "kv_use": "sagellm_kv_utilization", **totals("lmdeploy"),
    }  # fmt: skip

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if taken := [name for name in OURS if name in settings]:
            raise ConfigError(f"{', '.join(taken)}: the manager sets this for its engines; leave it out.")
        given = {name: value for name, value in settings.items() if value is not None}
        if model is not None:
            given["model"] = str(model)
        self.config = read_config(None, given)
        self._settings = json.loads(self.config.model_dump_json(include=set(_fields(given))))
        self.device = "" if (asked := given.get("device", "auto")) == "auto" else asked
        self.model = given.get("model_name")
        self._folder = RunFolder(FOLDER)  # it may hold paths and keys

    def take_feed_key(self, key: bytes) -> None:
        settings = self._settings
        has_events = settings.get("engine") != "turbomind" and settings.get("prefix_caching", True)
        if has_events and not settings.get("sot_workers"):
            self.feed_key = key

    def model_folder(self) -> Path:
        model = self._settings.get("model")
        return prepare_model(find_model(None if model is None else Path(model)))

    def command(self, port: int) -> list[str]:
        file = self._folder.path / "serve.yaml"
        ours: dict[str, Any] = {} if self.api_key is None else {"api_key": self.api_key}
        if self.num_cpus is not None:
            ours["threads"] = self._settings.get("threads") or max(1, self.num_cpus // self._num_workers)
        if self.feed_key is not None:
            ours["pd"] = {"key_file": str(self._folder.write_key(self.feed_key))}
        file.write_text(json.dumps(self._settings | ours))  # JSON is YAML
        where = ["--host", self.host, "--port", str(port)]
        return [sys.executable, "-m", "sagellm.serve", "--config", str(file), *where, "--json"]

    def resources(self) -> dict[str, float]:
        if self._settings.get("distributed_executor_backend") == "ray":  # its workers are placed by themselves
            return needs(1)
        return needs(self._settings.get("threads") or 1, self.device, self._num_workers)

    @property
    def _num_workers(self) -> int:
        return self._settings.get("tensor_parallel", 1)

    def on_ready(self, line: dict[str, Any]) -> None:
        self.device, self.model = line.get("device", self.device), line.get("model", self.model)

    async def stop(self, grace_s: float = 10.0) -> None:
        await super().stop(grace_s)
        self._folder.remove()


def _fields(given: dict[str, Any]) -> list[str]:
    """Fields of `SageConfig` that these settings fill: `speculative_config` is written as two others."""
    others = ["speculative", "speculative_options"] if "speculative_config" in given else []
    return [*given, *others]
