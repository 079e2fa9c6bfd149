"""Every channel that works here keeps to the contract, and each planted fault is caught by the rule that it breaks."""

import pytest

from sagellm.comm_backend.kv_transfer.contract import faults, scenarios
from sagellm.comm_backend.kv_transfer.contract.rules import PLAYS, RULES, check_channel
from sagellm.comm_backend.kv_transfer.registry import find_channel, make_channel
from sagellm.comm_backend.kv_transfer.shm import ShmChannel
from sagellm.core.errors import TransferError
from tests.comm_backend.kv_transfer.bad_channels import BREAKS
from tests.contract import broken, check_caught, check_kept

HERE = ["shm", pytest.param("tcp", marks=pytest.mark.slow)]  # `mooncake` and `nixl` take minutes: sagellm comm check-channel
FOLLOWS = {"WholeBlocks": {"report"}, "OpenForEver": {"peer_closed"}}


@pytest.mark.parametrize("name", HERE)
def test_every_channel_keeps_to_it(name):
    check_kept(check_channel(find_channel(name)), RULES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BREAKS, ids=lambda kind: kind.__name__)
def test_each_fault_breaks_its_rule(kind):
    rule, play = BREAKS[kind]
    report = check_channel(kind, limit_s=3.0 if kind.__name__ == "Hangs" else 60.0, plays={play: PLAYS[play]})
    check_caught(report, rule, FOLLOWS.get(kind.__name__, ()), f"[scenario {play}, seed 0]")


def test_every_rule_is_broken_by_a_fault():
    assert {rule for rule, _ in BREAKS.values()} == set(RULES)


def test_scenarios_are_all_there():
    assert sorted([*scenarios.__all__, *faults.__all__]) == sorted(PLAYS)


def test_a_class_that_processes_cannot_import_is_refused_in_words():
    class Local(ShmChannel):
        pass

    report = check_channel(Local, plays={"starting": PLAYS["starting"]})
    assert "define the class in a module" in broken(report)["builds"]


def test_what_was_not_played_is_not_passed():
    report = check_channel(ShmChannel, plays={"starting": PLAYS["starting"]})
    assert not report.passed and not broken(report)


def test_an_unknown_channel_is_told_the_known_ones():
    with pytest.raises(TransferError, match="known are: shm, tcp"):
        make_channel("pigeon", None)
