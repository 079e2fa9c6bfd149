"""LMDeploy's two engines as the server starts them: what each needs, how its hooks get in, what it leaves behind."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import REGISTRY

from sagellm.core.config import PDHooks, SageConfig
from sagellm.core.errors import ConfigError
from sagellm.core.registry import find_plugin
from sagellm.engines.lmdeploy.architecture import check_harmony
from sagellm.engines.lmdeploy.device_settings import check_threads, set_threads
from sagellm.engines.lmdeploy.engine import build_engine_config, check_quantization, hook_config, require_patched
from sagellm.engines.lmdeploy.ray_workers import set_ray
from sagellm.engines.lmdeploy.rpc import SentOutputs, fail_when_dead
from sagellm.engines.lmdeploy.settings_plugins import all_plugins, check_settings_plugins
from sagellm.engines.lmdeploy.sizing import Sizes, resolve_device
from sagellm.serve.metrics import TurboMindCollector, register


class Backend(Protocol):
    name: str

    def require(self) -> str:
        """The device. Called before anything is started.

        Raises:
            SageError: this engine cannot run here, or not with these settings.
        """
        ...

    def engine_config(self, model: Path, sizes: Sizes, device: str, run_dir: Path, pd: PDHooks | None = None) -> Any:
        """LMDeploy's configuration of the engine."""
        ...

    def extend(self, engine: Any) -> None:
        """Add the numbers of the hooks to those of LMDeploy's `AsyncEngine`."""
        ...

    async def command(self, engine: Any, name: str, **arguments: Any) -> Any:
        """Ask the hooks of the engine for something between two steps; see `SchedulerHooks.command`.

        Raises:
            ConfigError: the engine refused, in its own words, or cannot do it.
        """
        ...

    def describe(self, device: str) -> dict[str, Any]:
        """Return facts of the engine on this machine, for `GET /sagellm/info`. Slow: it looks at the machine."""
        ...

    def hang_up(self, engine: Any) -> None:
        """The server's event loop ends: tasks that would still tell the engine something end instead."""
        ...

    def abandon(self, engine: Any) -> None:
        """The engine died: nothing may wait for it when it is closed."""
        ...

    def close(self) -> None:
        """After the engine was closed."""
        ...


def backend_of(config: SageConfig) -> Backend:
    return TurboMindBackend(config) if config.engine == "turbomind" else PytorchBackend(config)


class PytorchBackend:
    """A process of its own; the hooks live there."""

    name = "pytorch"

    def __init__(self, config: SageConfig) -> None:
        self._config = config

    def require(self) -> str:
        require_patched()
        check_settings_plugins(self._config)
        check_quantization(self._config)
        device = resolve_device(self._config.device)
        check_threads(self._config, device)
        return device

    def engine_config(self, model: Path, sizes: Sizes, device: str, run_dir: Path, pd: PDHooks | None = None) -> Any:
        check_harmony(model)
        set_threads(self._config, device)
        set_ray(self._config)
        return build_engine_config(self._config, sizes, device, hook_config(self._config, run_dir, pd), model)

    def extend(self, engine: Any) -> None:
        register(engine)
        fail_when_dead(engine.engine.rpc_client, engine.engine.proc)
        SentOutputs(engine.engine.rpc_client)

    async def command(self, engine: Any, name: str, **arguments: Any) -> Any:
        answer = await self.ask(engine, name, arguments)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["result"]

    async def ask(self, engine: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of `SchedulerHooks.command`."""
        return await engine.engine._collective_rpc_async("sage_command", name, arguments)

    def describe(self, device: str) -> dict[str, Any]:
        from sagellm.engines.lmdeploy.capabilities import pytorch_capabilities

        return {"engine": self.name, "device": device, "capabilities": asdict(pytorch_capabilities(device))}

    def hang_up(self, engine: Any) -> None:
        async def call(*_: Any, **__: Any) -> None:
            raise asyncio.CancelledError

        engine.engine.rpc_client._async_call_impl = call  # LMDeploy's own would listen anew, on a socket that is closed

    def abandon(self, engine: Any) -> None:
        # Closing a socket waits until what was sent through it is read, and a dead engine reads nothing.
        client = engine.engine.rpc_client
        for each in (client.async_socket, client.sync_socket):
            if not each.closed:
                each.linger = 0

    def close(self) -> None:
        pass


class TurboMindBackend:
    """Threads of the server's own process; the hook table must be installed before they are made."""

    name = "turbomind"

    def __init__(self, config: SageConfig) -> None:
        self._config = config
        self._hooks: Any = None

    def require(self) -> str:
        from sagellm.engines.lmdeploy.turbomind import refuse_impossible
        from sagellm.engines.lmdeploy.turbomind_build import probe
        from sagellm.engines.lmdeploy.turbomind_config import check_settings

        probe().require()
        require_patched()
        check_settings(self._config)
        check_settings_plugins(self._config)
        kinds = [(spec.name, find_plugin(spec.name)) for spec in all_plugins(self._config)]
        refuse_impossible((name, object.__new__(kind)) for name, kind in kinds)
        return resolve_device("cuda")

    def engine_config(self, model: Path, sizes: Sizes, device: str, run_dir: Path, pd: PDHooks | None = None) -> Any:
        from lmdeploy.turbomind.supported_models import is_supported

        from sagellm.engines.lmdeploy.turbomind import TurboMindHooks
        from sagellm.engines.lmdeploy.turbomind_build import install
        from sagellm.engines.lmdeploy.turbomind_config import build_turbomind_config

        if not is_supported(str(model)):
            raise ConfigError(f"TurboMind does not know the architecture of {model}; use --engine pytorch.")
        hooks = hook_config(self._config).model_copy(update={"block_bytes": sizes.schema.block_bytes})
        self._hooks = TurboMindHooks(hooks, self._config.block_size, self._config.prefix_caching)
        install(self._hooks.table)
        return build_turbomind_config(self._config, sizes)

    def extend(self, engine: Any) -> None:
        REGISTRY.register(TurboMindCollector(engine, self._hooks))

    async def command(self, engine: Any, name: str, **arguments: Any) -> Any:
        raise ConfigError(f"{name} is not supported by the engine turbomind; use --engine pytorch.")

    def describe(self, device: str) -> dict[str, Any]:
        return {"engine": self.name, "device": device}

    def hang_up(self, engine: Any) -> None:
        pass  # nothing lies between them that is closed

    def abandon(self, engine: Any) -> None:
        pass  # its threads end with this process

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
