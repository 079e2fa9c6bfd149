"""`sagellm speculative check`: whether a strategy keeps to the contract, and an engine with it to its answers."""

import sys
from contextlib import redirect_stdout
from pathlib import Path

import click

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.contract.exactness import Guesser
from sagellm.accel.speculative.contract.rules import check_engine, check_speculator
from sagellm.accel.speculative.registry import make_speculator
from sagellm.cli.contract_check import check_options, conclude
from sagellm.cli.current_folder import look_in_current_folder
from sagellm.cli.plug_ins import progress, read_options
from sagellm.core.contract import ContractReport
from sagellm.core.errors import SageError, SpeculationError

__all__ = ["check"]


@click.command()
@check_options("strategy")
@click.option("--engine/--no-engine", default=True, show_default=True, help="Run it in an engine on tiny models, too.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="The engine's.")
def check(
    name: str, options: str, seed: int, rounds: int, limit_s: float, engine: bool, device: str, as_json: bool
) -> None:
    """Hold a speculative strategy, by name or as module:Class, against every rule of the contract, and an engine with it.

    On a GPU, where LMDeploy's engine has no float32, the engine is held against the rules of bfloat16 alone.

    Modules are looked for in the current folder too. Exit code 0: all rules are kept; 1: one is not, or faults kept it from
    being tested; 2: misuse.
    """
    look_in_current_folder()
    given = read_options(options, {"lookahead": 4})
    try:
        models = _models(make_speculator(name, **given))
        if engine:
            _check_folders(models)
    except SpeculationError as error:
        raise click.UsageError(str(error)) from None
    report = check_speculator(
        lambda **tried: make_speculator(name, **{**given, **tried}), seed=seed, rounds=rounds, progress=progress(),
        limit_s=limit_s,
    )  # fmt: skip
    if engine:
        report = _joined(report, _in_engine(Guesser(name, given, models), device, seed, limit_s))
    conclude("strategy", name, report, seed, as_json)


def _models(strategy: SpeculativeStrategy) -> tuple[Path, ...]:
    try:
        return tuple([Path(folder) for folder in strategy.models])
    except (AttributeError, TypeError):  # a rule of the contract says so
        return ()


def _check_folders(models: tuple[Path, ...]) -> None:
    """Raises SpeculationError: one of them is no model."""
    if models:
        from sagellm.engines.lmdeploy.speculative.draft_folder import check_folder

        for folder in models:
            check_folder(folder)


def _in_engine(guesser: Guesser, device: str, seed: int, limit_s: float) -> ContractReport:
    from sagellm.engines.lmdeploy.speculative.trial import EngineTrial

    try:
        # LMDeploy logs to where reports go.
        with redirect_stdout(sys.stderr), EngineTrial(device) as trial:
            return check_engine(trial, guesser, seed=seed, progress=progress(), limit_s=limit_s)
    except SageError as error:
        raise click.ClickException(f"the engine does not run without guesses either: {error}") from None


def _joined(one: ContractReport, other: ContractReport) -> ContractReport:
    """Rules of both; microseconds of an event are the strategy's own."""
    return one._replace(results=(*one.results, *other.results))
