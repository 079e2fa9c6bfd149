"""`sagellm policy`: the eviction policies there are, and whether one keeps to the contract."""

from collections.abc import Callable
from typing import Any

import click

from sagellm.cli.contract_check import check_options, conclude
from sagellm.cli.current_folder import look_in_current_folder
from sagellm.cli.plug_ins import option_defaults, progress, read_options, show_rows, summary_of
from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.contract.rules import check_policy
from sagellm.kv_policy.registry import find_policy, make_policy, policy_names


@click.group()
def policy() -> None:
    """List the eviction policies, or check one of your own."""


@policy.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_policies(as_json: bool) -> None:
    """Name every eviction policy that is known, its options, and what it does in a sentence."""
    rows = [_describe(name) for name in policy_names()]
    columns = {"policy": "policy", "native": "native", "options": "options", "what it does": "summary"}
    show_rows(rows, columns, as_json)


@policy.command()
@check_options("policy")
@click.option("--reference", is_flag=True, help="Check the twin in plain Python, not the native one.")
def check(name: str, options: str, seed: int, rounds: int, reference: bool, limit_s: float, as_json: bool) -> None:
    """Hold a policy, by name or as module:Class, against every rule of the contract.

    Modules are looked for in the current folder too. Exit code 0: it keeps to all of them; 1: it does not, or faults kept a
    rule from being tested; 2: misuse.
    """
    look_in_current_folder()
    make = _maker(name, read_options(options, {"small_ratio": 0.2}), reference)
    report = check_policy(make, seed=seed, rounds=rounds, progress=progress(), limit_s=limit_s)
    conclude("policy", name, report, seed, as_json)


def _describe(name: str) -> dict[str, Any]:
    reference = find_policy(name, reference=True)
    return {
        "policy": name,
        "native": find_policy(name) is not reference,
        "options": option_defaults(reference),
        "summary": summary_of(reference),
        "class": f"{reference.__module__}:{reference.__qualname__}",
    }


def _maker(name: str, options: dict[str, Any], reference: bool) -> Callable[[int], EvictionPolicy]:
    """A policy that cannot be found or does not know an option is misuse; one that fails otherwise breaks a rule."""
    try:
        kind = find_policy(name, reference)
        if options or kind.__module__.startswith("sagellm."):
            make_policy(name, 16, reference, **options)
    except PolicyError as error:
        raise click.UsageError(str(error)) from None
    return lambda capacity: kind(capacity, **options)
