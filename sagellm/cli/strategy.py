"""`sagellm strategy`: the scheduling strategies there are, and whether one keeps to the contract."""

from typing import Any

import click

from sagellm.cli.contract_check import check_options, conclude
from sagellm.cli.current_folder import look_in_current_folder
from sagellm.cli.plug_ins import option_defaults, progress, read_options, show_rows, summary_of
from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.contract.rules import check_strategy
from sagellm.scheduler_ir.strategies.registry import find_strategy, make_strategy, strategy_names


@click.group()
def strategy() -> None:
    """List the scheduling strategies, or check one of your own."""


@strategy.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_strategies(as_json: bool) -> None:
    """Name every strategy that is known, its options, and what it does in a sentence."""
    rows = [_describe(name) for name in strategy_names()]
    show_rows(rows, {"strategy": "strategy", "options": "options", "what it does": "summary"}, as_json)


@strategy.command()
@check_options("strategy")
def check(name: str, options: str, seed: int, rounds: int, limit_s: float, as_json: bool) -> None:
    """Hold a strategy, by name or as module:Class, against every rule of the contract.

    Modules are looked for in the current folder too. Exit code 0: it keeps to all of them; 1: it does not, or faults kept a
    rule from being tested; 2: misuse.
    """
    look_in_current_folder()
    given = read_options(options, {"ageing_s": 2.0})
    try:
        kind = find_strategy(name)
        if given or kind.__module__.startswith("sagellm."):
            make_strategy(name, **given)  # an option that is refused is misuse; what fails otherwise breaks a rule
    except PlanError as error:
        raise click.UsageError(str(error)) from None
    report = check_strategy(
        lambda **tried: kind(**{**given, **tried}), seed=seed, rounds=rounds, progress=progress(), limit_s=limit_s
    )
    conclude("strategy", name, report, seed, as_json)


def _describe(name: str) -> dict[str, Any]:
    kind = find_strategy(name)
    return {
        "strategy": name,
        "options": option_defaults(kind),
        "summary": summary_of(kind),
        "class": f"{kind.__module__}:{kind.__qualname__}",
    }
