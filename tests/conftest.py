"""Tiny random models, engines on them that are checked and closed after each test, and transformers as the oracle."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is loaded, here and in every process that a test starts: barriers between threads that share a core cost
# more than they save, and the plug-ins of the tests must be importable there.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pytest

from sagellm.core.config import PluginSpec, SageConfig
from tests.pool import check_pool, settle
from tests.reference import Reference, greedy_reference, write_mistral

SHAPE = dict(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=320)
WINDOW = 24


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny float32 model: llama, qwen2, qwen2-window, mistral (also with a window), or llama-bf16."""
    from sagellm.demo_model.random_model import write_random_model

    root = tmp_path_factory.mktemp("models")
    variants = {
        "llama": dict(architecture="llama"),
        "qwen2": dict(architecture="qwen2"),
        "qwen2-window": dict(architecture="qwen2", sliding_window=WINDOW),
        "llama-bf16": dict(architecture="llama", dtype="bfloat16"),
    }

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            if name == "mistral":
                write_mistral(path, SHAPE, WINDOW)
            else:
                write_random_model(path, **SHAPE, **variants[name])
        return path

    return folder


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path]) -> Reference:
    """`reference(prompts, n, model)`: the greedy continuations by transformers, computed once for each prompt."""
    return greedy_reference(model_folder)


@pytest.fixture
def start_engine(model_folder: Callable[[str], Path]) -> Iterator[Callable]:
    """`start_engine(*plugins, model="llama", **config)`. After the test every block must be accounted for."""
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    engines = []

    def start(*plugins: str | PluginSpec, model: str = "llama", **config):
        values = dict(device="cpu", threads=1, block_size=16, kv_blocks=64, max_batch_size=8) | config
        specs = tuple(PluginSpec(name=p) if isinstance(p, str) else p for p in plugins)
        engine = LMDeployEngine(SageConfig(model=model_folder(model), plugins=specs, **values))
        engines.append(engine)
        return engine

    yield start
    try:
        for engine in engines:
            if not engine._loop.is_closed():
                settle(engine)
            check_pool(engine)
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`limits(hold_limit_s=..., run_dir=...)` for what travels to the engine but is no user's setting."""
    import sagellm.engines.lmdeploy.engine as module

    original = module.hook_config

    def change(**values) -> None:
        monkeypatch.setattr(module, "hook_config", lambda config: original(config).model_copy(update=values))

    return change
