"""One start of `EmbeddedServer`: the steps of `sagellm serve` without its processes, signals and readiness line."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from prometheus_client import REGISTRY
from tqdm import tqdm

from sagellm.core.config import SageConfig
from sagellm.core.ports import listen
from sagellm.engines.lmdeploy.engine import end_steps, own_grammars, prepare_weights
from sagellm.engines.lmdeploy.sizing import size_engine
from sagellm.models import find_model, prepare_model
from sagellm.serve.backends import PytorchBackend
from sagellm.serve.metrics import register
from sagellm.serve.server import Launch, check_plugins

__all__ = ["serve_here"]

HOST = "127.0.0.1"
VARIABLES = ("OMP_NUM_THREADS", "TM_LOG_LEVEL")  # set for processes of an engine, and not for those of this program


def serve_here(config: SageConfig, life: Any) -> None:
    """Serve on this thread until the end, and leave nothing. Raises SageError as `sagellm.serve.server.run`.

    Args:
        life: the `Life` of an `EmbeddedServer`.
    """
    source = find_model(config.model)
    config = config.model_copy(update={"model_name": config.model_name or source.name})
    backend = EmbeddedBackend(config)
    device = backend.require()
    check_plugins(config)
    with contextlib.closing(listen(HOST, 0)) as listener, _kept_settings() as put_back:
        model = prepare_weights(config, prepare_model(source))
        engine_config = backend.engine_config(model, size_engine(config, model, device), device, None)
        life.url, life.model, life.device = f"http://{HOST}:{listener.getsockname()[1]}", config.model_name, device
        launch = EmbeddedLaunch(
            config, backend, model, source.sampling(model), engine_config, False, listener, life, life, life, None, None
        )
        with contextlib.closing(backend):
            launch.open(put_back)


@dataclass(frozen=True)
class EmbeddedLaunch(Launch):
    """A start whose banner, loading and watch are a `Life`. The loggers of the program stay as they are."""

    log_config: ClassVar[None] = None

    def server(self, app: Any, engine: Any) -> Any:
        server = super().server(app, engine)
        self.watch.take(server, engine.engine)
        return server


class EmbeddedBackend(PytorchBackend):
    """The engine in the server's process, on its event loop."""

    _engine: Any = None

    def engine_config(self, *arguments: Any) -> Any:
        from lmdeploy.messages import PytorchEngineConfig

        class Here(PytorchEngineConfig):
            """LMDeploy's `serve` asks each PyTorch engine for a process; this one has none."""

            enable_mp_engine = property(lambda self: False, lambda self, asked: None)

        config = super().engine_config(*arguments)
        self._device = config.device_type
        return Here(**{field.name: getattr(config, field.name) for field in fields(config)})

    def extend(self, engine: Any) -> None:
        from lmdeploy.metrics.loggers import LoggingStatLogger

        self._engine, self._collector = engine.engine, register(engine)
        own_grammars(self._engine)
        # LMDeploy prints figures to standard output every ten seconds, which is the program's.
        engine.stat_loggers[:] = [one for one in engine.stat_loggers if not isinstance(one, LoggingStatLogger)]

    async def ask(self, engine: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return engine.engine.scheduler.sage.command(name, arguments)

    def hang_up(self, engine: Any) -> None:
        pass  # no other process is told anything

    def abandon(self, engine: Any) -> None:
        pass

    def close(self) -> None:
        from lmdeploy.serve.openai.api_server import VariableInterface

        VariableInterface.async_engine = None
        if self._engine is not None:
            REGISTRY.unregister(self._collector)
            end_steps(self._engine, self._device)
            self._engine.scheduler.sage.grammars.join()
            self._engine = self._collector = None


@contextlib.contextmanager
def _kept_settings() -> Iterator[Callable[[], None]]:
    """Give a function that sets what an engine changes for its process back to what it is now. It is called at the end too."""
    before, interval_s = {name: os.environ.get(name) for name in VARIABLES}, tqdm.monitor_interval
    tqdm.monitor_interval = 0  # or the bar of the weights leaves a thread

    def put_back() -> None:
        tqdm.monitor_interval = interval_s
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    try:
        yield put_back
    finally:
        put_back()
