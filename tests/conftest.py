"""Tiny random models, engines on them that are checked and closed after each test, and transformers as the oracle."""

import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# Set before torch is loaded, here and in every process that a test starts. Barriers between threads that share a core cost
# more than they save, and the plug-ins of the tests must be importable there.
os.environ["OMP_NUM_THREADS"] = "1"
# A thread that waits at a barrier sleeps instead of spinning. A third of the CPU time of servers with a thread for each core
# is saved, because other processes use those cores too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Without compiled modules on disk, each process would compile the patched files and ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from sagellm.core.config import PDHooks, PluginSpec, SageConfig
from tests.pool import check_pool, settle
from tests.reference import Reference, greedy_reference, write_mistral

sys.dont_write_bytecode = False  # and in each run each worker would rewrite the assertions of all tests

SHAPE = dict(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=320)
WINDOW = 24

# Half of a server's test is waiting, so there is one worker more than a small machine has cores.
NUM_WORKERS = 3
# Files and folders that take longest, in this order: begun last, one of them would leave the other workers idle.
LONG = [
    "benchmarks/test_gpu_kit.py",
    "csrc/test_checks.py",
    "accel/sot/test_group.py",
    "engines/lmdeploy/test_tensor_parallel.py",
    "engines/lmdeploy/test_worker_failures.py",
    "engines/lmdeploy/test_collective_choice.py",
    "pd/test_real_group.py",
    "serve/one_server",
    "benchmarks/test_runner.py",
    "benchmarks/test_serve_scenario.py",
    "comm_backend/test_contract.py",
    "engines/lmdeploy/test_exactness.py",
    "engines/lmdeploy/test_faults.py",
    "engines/lmdeploy/test_branches.py",
    "scheduler_ir/contract/test_contract.py",
    "comm_backend/kv_transfer/test_contract.py",
    "pd/test_lmdeploys_proxy.py",
    "serve/test_roles.py",
    "serve/test_plugins.py",
    "accel/speculative/contract/test_contract.py",
    "pd/test_proxy.py",
]

# Its files share a server that takes ten seconds of a core to start, so one worker runs them all.
ONE_SERVER = "tests/serve/one_server/"

# An example takes long when another worker has the core, so there is no deadline. Examples are the same in each run;
# `--hypothesis-profile search` looks for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("steady")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers for the whole suite, and 0 if a file, a keyword or a marker is named."""
    narrowed = any(config.getoption(name, None) for name in ("keyword", "lf", "stepwise", "collectonly"))
    narrowed = narrowed or config.getoption("markexpr", "") not in ("", "not slow")  # the latter is in pyproject.toml
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not narrowed
    return NUM_WORKERS if whole else 0


class ByFileAndServer(LoadFileScheduling):
    """Tests of a file go to one worker, and so do the files in `ONE_SERVER`."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return ONE_SERVER if file.startswith(ONE_SERVER) else file


def pytest_sessionstart() -> None:
    """Start what workers and ranks are forked from, in each process that runs many tests.

    Python has one fork server a process. One of another test, without the libraries, would let each worker load them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from sagellm.engines.lmdeploy.worker_processes import load_early

        load_early(keep=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out slow tests that would begin after `SLOW_TESTS_END`: `.ci/run` has limited time, and machines differ."""
    end = os.environ.get("SLOW_TESTS_END")  # seconds since the epoch
    if end and item.get_closest_marker("slow") and time.time() > float(end):
        pytest.skip("left out: this machine took too long for all slow tests")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFileAndServer | None:
    return ByFileAndServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would take a third of the time: collection loads every library.

    Later searches for garbage leave out all that is there at the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, order.get(item.path.parent, len(order))))


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
    """`start_engine(*plugins, model="llama", pd=None, **config)`. After the test every block must be accounted for."""
    from sagellm.engines.lmdeploy import worker_processes
    from sagellm.engines.lmdeploy.engine import LMDeployEngine
    from sagellm.engines.lmdeploy.workers import failure_of

    engines = []

    def start(*plugins: str | PluginSpec, model: str | Path = "llama", pd: PDHooks | None = None, **config):
        if config.get("tensor_parallel", 1) > 1:
            worker_processes.load_early(keep=True)
        specs = tuple(PluginSpec(name=p) if isinstance(p, str) else p for p in plugins)
        values = dict(device="cpu", threads=1, block_size=16, kv_blocks=64, max_batch_size=8, plugins=specs) | config
        folder = model_folder(model) if isinstance(model, str) else model
        engine = LMDeployEngine(SageConfig(model=folder, **values), pd=pd)
        engines.append(engine)
        return engine

    yield start
    try:
        for engine in engines:
            if failure_of(engine.engine.executor):  # a worker of it was killed, with its requests
                continue
            if not engine._loop.is_closed():
                settle(engine)
            check_pool(engine)
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`limits(run_dir=..., comm_metrics=...)` changes settings of the engine that users cannot set."""
    import sagellm.engines.lmdeploy.engine as module

    original = module.hook_config

    def change(**values) -> None:
        monkeypatch.setattr(module, "hook_config", lambda *args, **more: original(*args, **more).model_copy(update=values))

    return change
