"""The contract of a communication backend as checks that anybody can run on theirs: `sagellm check backend module:Class`.

Every scenario is played by all ranks of a new group; a rule that is broken says what was got, what is allowed, and which
scenario and seed show it again.
"""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.contract import faults, scenarios
from sagellm.comm_backend.contract.fleet import Fleet, Play, ProcessFleet, ThreadFleet
from sagellm.comm_backend.contract.seat import Task
from sagellm.core.contract import ContractReport, Flag, Played, Report, Scenario, Suite, run_scenarios
from sagellm.core.registry import Registry

__all__ = ["PLAYS", "RULES", "SUITE", "check_backend"]

RULES = {
    "builds": "joins a group, says which rank it is, and raises CommError and its kinds alone",
    "options": "refuses, with CommError, an option that it does not have",
    "meets": "gives up with CommTimeoutError where not all ranks come",
    "all_reduce": "gives every rank the reduction, of each operation and dtype",
    "same_bits": "gives every rank the same bits",
    "all_gather": "gives every rank the tensors of all, in the order of ranks, and leaves the input alone",
    "broadcast": "gives every rank the tensor of the source",
    "barrier": "lets no rank go on before all have come",
    "order": "delivers messages of a pair in the order in which they were sent",
    "apart": "mixes no message with those of other pairs, or with a collective",
    "reuse": "lets a tensor be overwritten once `send` has ended, and changes none that is sent",
    "both_ways": "carries megabytes in all directions at once",
    "asynchronous": "returns work that comes to its end by itself and answers the same when asked again",
    "empty": "takes tensors without values, and without dimensions",
    "groups": "keeps groups of the same ranks apart",
    "leaves": "lets a rank close as soon as its own collective has ended",
    "deadline": "ends what takes too long with CommTimeoutError, in time",
    "broken": "fails at once, for the first reason, whatever is called next; others hang no longer than their deadline",
    "peer_left": "ends what waits for a rank that has closed, in time",
    "peer_killed": "ends what waits for a rank whose process was killed, in time",
    "closed": "raises CommError whatever is called after `close`, which may be called twice",
    "misuse": "refuses, with CommError, what makes no sense, and works afterwards",
    "mismatch": "raises CommError on every rank where shapes or dtypes differ, if it says that it detects that",
    "ends": "comes to an end in every scenario, and lives",
}

PLAYS: dict[str, Play] = {
    "joining": scenarios.joining,
    "collectives": scenarios.collectives,
    "messages": scenarios.messages,
    "large": scenarios.large,
    "asynchronous": scenarios.asynchronous,
    "empties": scenarios.empties,
    "groups": scenarios.groups,
    "leaving": scenarios.leaving,
    "misuse": faults.misuse,
    "closing": faults.closing,
    "deadlines": faults.deadlines,
    "departing": faults.departing,
    "mismatches": faults.mismatches,
    "killing": faults.killing,
}
RANDOM = ("collectives", "messages")


def check_backend(
    kind: type[CommBackendProtocol],
    *,
    world_size: int = 3,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    rounds: int = 1,
    progress: Callable[[str], None] | None = None,
    limit_s: float = 60.0,
    plays: dict[str, Play] | None = None,
) -> ContractReport:
    """Hold a backend against every rule. One that was never put to the test, because other faults came first, is not passed.

    Args:
        kind: a class that other processes can import; one for `memory://` is played by threads of this process.
        world_size: 2 or more.
        options: of the backend.
        seed: the first of `rounds` seeds of the random scenarios.
        progress: called with the name of each scenario before it begins.
        limit_s: for one scenario; ranks that take longer have broken `ends`, and are killed.
        plays: scenarios to play, by default all.
    """
    fleet_kind = ThreadFleet if kind.schemes == ("memory",) else ProcessFleet
    plays = PLAYS if plays is None else plays
    with fleet_kind(world_size, limit_s) as fleet:
        return run_scenarios(
            RULES, {name: Scenario(partial(_play, fleet, name, play), name in RANDOM) for name, play in plays.items()},
            lambda scenario, number, report: scenario.run((kind, options or {}), number, report),
            seed=seed, rounds=rounds, progress=progress, limit_s=None, what="backend", raise_rule="ends",
        )  # fmt: skip


class _BackendSuite(Suite):
    def prepare(self, registry: Registry, name: str, options: dict[str, Any], **flags: Any) -> Callable[..., ContractReport]:
        """Find the backend. Its options are tried by the ranks."""
        return partial(check_backend, registry.find(name), world_size=flags["ranks"], options=options)


SUITE = _BackendSuite(
    "backend", RULES, {}, example={"ring_bytes": 1 << 20},
    flags=(Flag("ranks", 3, "Ranks of the groups.", low=2, high=16),),
)  # fmt: skip


def _play(fleet: Fleet, name: str, play: Play, what: tuple, seed: int, report: Report) -> Played:
    if not fleet.can_build:
        return Played(0, frozenset())
    kind, options = what
    rendezvous = fleet.rendezvous(kind.schemes[0])
    tasks = [Task(kind, name, rank, fleet.world_size, rendezvous, options, seed) for rank in range(fleet.world_size)]
    try:
        facts = fleet.play(play, tasks)
    except (pickle.PicklingError, AttributeError) as error:
        report("builds", f"it cannot be sent to the processes of the ranks ({error}); define the class in a module.")
        fleet.can_build = False
        return Played(0, frozenset())
    seen = {"ends"}
    for rank, each in enumerate(facts):
        if each is None:
            is_victim = name == "killing" and rank == fleet.world_size - 1
            if not is_victim:
                report("ends", f"rank {rank} of {fleet.world_size} died, or had no end within {fleet.limit_s:g} s.")
            continue
        seen |= each.seen
        for rule, message in each.reports:
            report(rule, message)
    found = [each for each in facts if each is not None]
    fleet.can_build = name != "joining" or any(each.num_operations for each in found)
    _compare([each.values for each in found], report)
    return Played(sum(each.num_operations for each in found), seen)


def _compare(values: list[dict[str, Any]], report: Report) -> None:
    """Check rules that only all ranks together show."""
    bits = [each["same_bits"] for each in values if "same_bits" in each]
    for number, results in enumerate(zip(*bits, strict=False)):
        if len(set(results)) > 1:
            report("same_bits", f"all_reduce {number} ended in other bits on rank {_first_other(results)} than on rank 0.")
    times = [each["barrier"] for each in values if "barrier" in each]
    if times and (early_s := max(came for came, _ in times) - min(left for _, left in times)) > 0:
        report("barrier", f"a rank went on {early_s:.3f} s before the last one had come.")


def _first_other(results: tuple) -> int:
    return next(rank for rank, each in enumerate(results) if each != results[0])
