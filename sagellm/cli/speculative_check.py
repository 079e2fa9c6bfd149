"""`sagellm speculative check`: whether a strategy keeps to the contract, and an engine with it to its answers."""

import sys
from contextlib import redirect_stdout

import click

from sagellm.accel.speculative.contract.exactness import Guesser
from sagellm.accel.speculative.contract.rules import check_engine, check_strategy
from sagellm.accel.speculative.registry import make_strategy
from sagellm.cli.current_folder import look_in_current_folder
from sagellm.cli.plug_ins import progress, read_options, show_report
from sagellm.cli.values import LONGEST_LIMIT_S, Finite
from sagellm.core.contract import ContractReport
from sagellm.core.errors import SageError, SpeculationError

__all__ = ["check"]


@click.command()
@click.argument("name")
@click.option("--options", default="{}", metavar="JSON", help="The strategy's options, a JSON object.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The first seed of the random scenarios."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Seeds to try.")
@click.option(
    "--limit-s", type=Finite(LONGEST_LIMIT_S), default=60.0, show_default=True,
    help="Seconds for a scenario; a strategy that takes longer has failed.",
)  # fmt: skip
@click.option("--engine/--no-engine", default=True, show_default=True, help="Run it in an engine on tiny models, too.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="The engine's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(
    name: str, options: str, seed: int, rounds: int, limit_s: float, engine: bool, device: str, as_json: bool
) -> None:
    """Hold a speculative strategy, by name or as module:Class, against every rule of the contract, and an engine with it.

    Modules are looked for in the current folder too. Exit code 0: all rules are kept; 1: one is not, or faults kept it from
    being tested; 2: misuse.
    """
    look_in_current_folder()
    given = read_options(options, {"lookahead": 4})
    try:
        make_strategy(name, **given)
    except SpeculationError as error:
        raise click.UsageError(str(error)) from None
    report = check_strategy(
        lambda **tried: make_strategy(name, **{**given, **tried}), seed=seed, rounds=rounds, progress=progress(),
        limit_s=limit_s,
    )  # fmt: skip
    if engine:
        report = _joined(report, _in_engine(Guesser(name, given), device, seed, limit_s))
    show_report("strategy", name, report, seed, as_json)
    sys.exit(0 if report.passed else 1)


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
