"""Contract of a speculative strategy alone, then in an engine: `sagellm check speculative`."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.contract.exactness import Guesser
from sagellm.accel.speculative.contract.rules import RULES, check_engine, check_speculator
from sagellm.accel.speculative.contract.scenarios import SCENARIOS
from sagellm.accel.speculative.registry import make_speculator
from sagellm.core.contract import ContractReport, Flag, Suite
from sagellm.core.errors import EngineError, SageError
from sagellm.core.registry import Registry
from sagellm.engines.lmdeploy.speculative.draft_folder import check_folder
from sagellm.engines.lmdeploy.speculative.trial import EngineTrial

__all__ = ["SUITE"]


class _SpeculativeSuite(Suite):
    def prepare(self, registry: Registry, name: str, options: dict[str, Any], **flags: Any) -> Callable[..., ContractReport]:
        """Build the strategy, and look at the folders of the models that it loads."""
        models = _models(make_speculator(name, **options))
        if flags["engine"]:
            for folder in models:
                check_folder(folder)
        return partial(_check, Guesser(name, options, models), **flags)


def _check(
    guesser: Guesser, engine: bool, device: str, *, seed: int, rounds: int, progress: Callable[[str], None] | None,
    limit_s: float,
) -> ContractReport:  # fmt: skip
    def make(**tried: Any) -> SpeculativeStrategy:
        return make_speculator(guesser.name, **{**guesser.options, **tried})

    report = check_speculator(make, seed=seed, rounds=rounds, progress=progress, limit_s=limit_s)
    if not engine:
        return report
    try:
        with redirect_stdout(sys.stderr), EngineTrial(device) as trial:  # LMDeploy logs to where reports go
            found = check_engine(trial, guesser, seed=seed, progress=progress, limit_s=limit_s)
    except SageError as error:
        raise EngineError(f"the engine does not run without guesses either: {error}") from None
    return report._replace(results=(*report.results, *found.results))  # times are those of the strategy alone


def _models(strategy: SpeculativeStrategy) -> tuple[Path, ...]:
    try:
        return tuple(Path(folder) for folder in strategy.models)
    except (AttributeError, TypeError):  # a rule of the contract reports it
        return ()


SUITE = _SpeculativeSuite(
    "strategy", RULES, SCENARIOS, example={"lookahead": 4},
    flags=(
        Flag("engine", True, "Run it in an engine on tiny models, too."),
        Flag("device", "cpu", "Device of the engine; a GPU is checked in bfloat16 alone.", choices=("cpu", "cuda")),
    ),
)  # fmt: skip
