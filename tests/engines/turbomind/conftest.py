"""`start(*plugins, **config)`: the hooks of a process, closed after the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sagellm.core.config import HookConfig, PluginSpec
from sagellm.engines.lmdeploy.turbomind import TurboMindHooks
from tests.engines.turbomind.played import BLOCK

HERE = "tests.engines.turbomind.plugins"


@pytest.fixture
def start() -> Iterator[Callable[..., TurboMindHooks]]:
    started = []

    def begin(*plugins: str | tuple[str, dict[str, Any]], prefix_caching: bool = True, **config: Any) -> TurboMindHooks:
        named = [(plugin, {}) if isinstance(plugin, str) else plugin for plugin in plugins]
        specs = tuple(PluginSpec(name=f"{HERE}:{name}", options=options) for name, options in named)
        values = {"time_limit_s": 20.0, "block_bytes": 4096} | config
        started.append(TurboMindHooks(HookConfig(plugins=specs, **values), BLOCK, prefix_caching))
        return started[-1]

    yield begin
    for hooks in started:
        hooks.close()


def plugin_of(hooks: TurboMindHooks, place: int = 0) -> Any:
    return hooks._host.plugins[place][1]
