"""Contract of an engine plug-in, on a real engine of tiny size: `sagellm check plugin module:Class`.

The pool is smaller than what the requests need, so that blocks are evicted, requests are preempted and prefixes are found.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from sagellm.core.config import PluginSpec, SageConfig
from sagellm.core.contract import Broke, ContractReport, Played, Report, Scenario, Suite, play, run_scenarios
from sagellm.core.errors import SageError
from sagellm.core.hooks import COMM_HOOKS, DECISIONS, NOTICES, overrides
from sagellm.core.registry import Registry, load_plugin
from sagellm.demo_model.random_model import write_random_model
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.engines.lmdeploy.speculative.trial import SHAPE

__all__ = ["RULES", "SUITE"]

RULES = {
    "builds": "can be built with its options, and attached to an engine",
    "output": "changes no token of an answer, also when blocks are evicted and requests preempted",
    "stays_on": "raises nothing, answers in time and within the contract, so that it is not switched off",
    "called": "overrides hooks that this engine calls",
    "apart": "works in two engines of a process at once",
    "releases": "leaves no block active when all requests have ended",
}
NUM_NEW = 30
SMALL, LARGE = 30, 400  # blocks of 16 tokens
SETTLE_S = 10.0


class _Lab:
    """Starts engines with one plug-in on one tiny model."""

    def __init__(self, folder: Path, spec: PluginSpec) -> None:
        self.spec = spec
        self._model = folder / "model"
        write_random_model(self._model, dtype="float32", **SHAPE)
        self._answers: dict[int, list[tuple[int, ...]]] = {}

    @contextmanager
    def engine(self, *plugins: PluginSpec, kv_blocks: int = SMALL) -> Iterator[LMDeployEngine]:
        """An engine, closed at the end."""
        config = SageConfig(
            model=self._model, device="cpu", dtype="float32", threads=1, block_size=16, kv_blocks=kv_blocks, host_kv_blocks=20,
            max_batch_size=8, plugins=plugins,
        )  # fmt: skip
        with redirect_stdout(sys.stderr), LMDeployEngine(config) as engine:  # LMDeploy logs to where reports go
            yield engine

    def expected(self, seed: int) -> list[tuple[int, ...]]:
        """Answers of an engine without plug-ins and with room for all."""
        if seed not in self._answers:
            with self.engine(kv_blocks=LARGE) as engine:
                self._answers[seed] = generate(engine, prompts(seed))
        return self._answers[seed]


def prompts(seed: int) -> list[list[int]]:
    """Ten prompts, some of which share a prefix."""
    chance = random.Random(seed)
    texts = [[chance.randrange(10, 250) for _ in range(size)] for size in (40, 100, 33, 90, 64, 70, 20, 48, 9, 20)]
    return [*texts[:7], *(texts[7] + tail for tail in (texts[8], texts[9], texts[8][:1]))]


def generate(engine: LMDeployEngine, texts: list[list[int]]) -> list[tuple[int, ...]]:
    """Greedy answers."""
    return [each.token_ids for each in engine.generate(texts, SamplingParams(NUM_NEW, ignore_eos=True))]


@contextmanager
def _started(lab: _Lab, report: Report, count: int = 1) -> Iterator[list[LMDeployEngine]]:
    """Engines with the plug-in. A start that fails breaks `builds`."""
    with ExitStack() as stack:
        engines = []
        for _ in range(count):
            try:
                engines.append(stack.enter_context(lab.engine(lab.spec)))
            except (Exception, SystemExit) as error:
                report("builds", f"an engine does not start with it: {type(error).__name__}: {error}")
                raise Broke from error
        yield engines


def _judge(engine: LMDeployEngine, lab: _Lab, seed: int, report: Report, rule: str) -> None:
    expected = lab.expected(seed)
    for _ in range(2):
        try:
            found = generate(engine, prompts(seed))
        except SageError as error:
            report(rule, f"the engine failed: {error}")
            raise Broke from error
        if found != expected:
            different = sum(one != other for one, other in zip(found, expected, strict=True))
            report(rule, f"{different} of {len(expected)} answers differ from those without the plug-in.")
    said = engine.hooks.report()
    if said["faults"] or not all(said["enabled"].values()):
        faults = ", ".join(f"{hook} {kind}" for _, hook, kind, _ in said["faults"])
        report("stays_on", f"it was switched off: {faults or 'without a fault'}; the log has the traceback.")
    end_s = time.monotonic() + SETTLE_S
    while engine.hooks.kv.counts().active and time.monotonic() < end_s:
        generate(engine, [[11, 12]])  # the end of a request reaches the scheduler with a later step
    if active := engine.hooks.kv.counts().active:
        report("releases", f"{active} blocks are active {SETTLE_S:g} s after the last request.")


def pressure(lab: _Lab, seed: int, report: Report) -> Played:
    """All at once, then one by one."""
    with _started(lab, report) as (engine,):
        _judge(engine, lab, seed, report, "output")
        for text in prompts(seed):
            generate(engine, [text])
        called = {hook for _, hook, _ in engine.hooks.report()["calls"]}
        plugin = load_plugin(lab.spec)
        brought = {hook for hook in (*DECISIONS, *NOTICES) if overrides(plugin, hook)}
        is_on = all(engine.hooks.report()["enabled"].values())
        if is_on and (missing := sorted(brought - called)):
            report("called", f"never called: {', '.join(missing)}.")
        if is_on and (strange := sorted(called & set(COMM_HOOKS))):
            report("called", f"called without a collective: {', '.join(strange)}.")
    return Played(len(called), {"builds", "output", "stays_on", "called", "releases"})


def together(lab: _Lab, seed: int, report: Report) -> Played:
    """Two engines, in turn."""
    with _started(lab, report, 2) as engines:
        for engine in engines:
            _judge(engine, lab, seed, report, "apart")
    return Played(1, {"apart"})


SCENARIOS = {"pressure": Scenario(pressure), "together": Scenario(together)}


class _PluginSuite(Suite):
    def prepare(self, registry: Registry, name: str, options: dict[str, Any], **flags: Any) -> Callable[..., ContractReport]:
        """Find the class; it is built by the engines."""
        registry.find(name)
        return partial(self._run, PluginSpec(name=name, options=options))

    def _run(self, spec: PluginSpec, *, seed: int = 0, rounds: int = 1, progress: Any = None, limit_s: float | None = None):
        with tempfile.TemporaryDirectory(prefix="sagellm-check-") as folder:
            lab = _Lab(Path(folder), spec)
            return run_scenarios(
                RULES, SCENARIOS, partial(play, lab), seed=seed, rounds=rounds, progress=progress, limit_s=limit_s,
                what=self.what, raise_rule="stays_on",
            )  # fmt: skip


SUITE = _PluginSuite("plug-in", RULES, SCENARIOS, example={"size": 3})
