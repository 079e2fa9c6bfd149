"""The contract of a KV channel as checks that anybody can run on theirs: `sagellm check channel module:Class`.

Every scenario runs in a process of its own, with others that own blocks. A broken rule reports what was got, what is allowed,
the scenario and the seed.
"""

import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel
from sagellm.comm_backend.kv_transfer.contract import faults, scenarios
from sagellm.comm_backend.kv_transfer.contract.desk import Desk, Facts, Task, run_desk
from sagellm.comm_backend.kv_transfer.contract.owner import CONTEXT, OwnerStarter
from sagellm.core.contract import ContractReport, Played, Report, Scenario, Suite, run_scenarios
from sagellm.core.registry import Registry

__all__ = ["PLAYS", "RULES", "SUITE", "check_channel"]

RULES = {
    "builds": "serves KV blocks, and says how it is reached, as JSON",
    "options": "refuses, with TransferError, an option that it does not have",
    "report": "counts transfers, bytes and peers",
    "copies": "brings over exactly the peer's bytes of the tokens that a plan names",
    "nothing_else": "writes nothing but these",
    "converts": "converts block sizes and TP degrees, or refuses them if it says that it does not convert",
    "layout": "refuses to connect to what is laid out otherwise, and names the difference",
    "address": "refuses an address that makes no sense, with TransferError",
    "key": "refuses peers with another key, if it says that it checks keys",
    "misuse": "refuses, with TransferError and nothing written, what makes no sense, and works afterwards",
    "disconnect": "forgets a peer",
    "checksums": "has the checksums of the contract, and fails where they differ, naming the blocks",
    "fresh": "brings what the peer has now",
    "deadline": "ends what takes too long with TransferTimeoutError, in time",
    "cancel": "ends what is cancelled with TransferCancelled",
    "after_end": "writes nothing after a transfer has failed",
    "turns": "runs no more than `max_running` transfers at once, and mixes none",
    "closed": "ends what runs when it is closed, and refuses, with TransferError, whatever is called after that",
    "peer_closed": "fails, with TransferError, where the peer has closed",
    "peer_killed": "fails, with TransferError and in time, where the peer's process was killed",
    "comes_back": "connects again where a peer of the same name has come back",
    "stalled": "keeps to deadlines where the peer's process stands still",
    "ends": "comes to an end in every scenario, and lives",
}

PLAYS: dict[str, Callable[[Desk], None]] = {
    "starting": scenarios.starting,
    "copies": scenarios.copies,
    "conversions": scenarios.conversions,
    "layouts": scenarios.layouts,
    "misuse": scenarios.misuse,
    "checksums": scenarios.checksums,
    "fresh_bytes": scenarios.fresh_bytes,
    "deadlines": faults.deadlines,
    "cancelling": faults.cancelling,
    "turns": faults.turns,
    "closing": faults.closing,
    "killing": faults.killing,
    "stalling": faults.stalling,
}
RANDOM = ("copies",)


def check_channel(
    kind: type[KVTransferChannel],
    *,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    rounds: int = 1,
    progress: Callable[[str], None] | None = None,
    limit_s: float = 60.0,
    plays: dict[str, Callable[[Desk], None]] | None = None,
) -> ContractReport:
    """Hold a channel against every rule. One that was never put to the test, because other faults came first, is not passed.

    Args:
        kind: a class that other processes can import.
        options: of the channel.
        seed: the first of `rounds` seeds of the random scenarios.
        progress: called with the name of each scenario before it begins.
        limit_s: for one scenario; one that takes longer has broken `ends`, and is killed.
        plays: scenarios to play, by default all.
    """
    plays = PLAYS if plays is None else plays
    return run_scenarios(
        RULES, {name: Scenario(partial(_play, play, limit_s), name in RANDOM) for name, play in plays.items()},
        lambda scenario, number, report: scenario.run(Task(kind, options or {}, number), number, report),
        seed=seed, rounds=rounds, progress=progress, limit_s=None, what="channel", raise_rule="ends",
    )  # fmt: skip


class _ChannelSuite(Suite):
    def prepare(self, registry: Registry, name: str, options: dict[str, Any], **flags: Any) -> Callable[..., ContractReport]:
        """Find the channel. Its options are tried by the processes that own the blocks."""
        return partial(check_channel, registry.find(name), options=options)


SUITE = _ChannelSuite("channel", RULES, {}, example={"port": 0})


def _play(play: Callable[[Desk], None], limit_s: float, task: Task, seed: int, report: Report) -> Played:
    try:
        message = pickle.dumps((play, task))
    except (pickle.PicklingError, AttributeError) as error:
        report("builds", f"it cannot be sent to another process ({error}); define the class in a module.")
        return Played(0, frozenset())
    here, there = CONTEXT.Pipe()
    with OwnerStarter() as starter:
        process = CONTEXT.Process(target=_perform, args=(there, starter.pipe, message), name="kv-contract")
        process.start()
        there.close()
        try:
            facts = here.recv() if here.poll(limit_s) else None
        except (EOFError, OSError):
            facts = None
        process.join(0 if facts is None else 5)
        process.kill()
        process.join()
    if facts is None:
        report("ends", f"the process died, or had no end within {limit_s:g} s.")
        return Played(0, {"ends"})
    for rule, message in facts.reports:
        report(rule, message)
    return Played(facts.num_operations, facts.seen | {"ends"})


def _perform(pipe: Connection, starter: Connection, message: bytes) -> None:
    torch.set_num_threads(1)
    try:
        play, task = pickle.loads(message)
    except Exception as error:  # the module of the class cannot be imported there
        said = f"another process cannot load it: {type(error).__name__}: {error}"
        pipe.send(Facts([("builds", said)], set(), 0))
        return
    pipe.send(run_desk(task, play, starter))
