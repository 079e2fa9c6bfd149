"""`sagellm strategy`: what it lists, what it says about a strategy, and its exit codes."""

import json

import pytest
from click.testing import CliRunner

from sagellm.cli import main
from sagellm.scheduler_ir.strategies.registry import strategy_names

BAD = """
from sagellm.core.hooks import ScheduleDecision
from sagellm.scheduler_ir.strategies.fifo import Fifo
class Bad(Fifo):
    def decide(self, view):
        return ScheduleDecision([request.request_id for request in view.requests][:-1])
class Sized(Fifo):
    def __init__(self, *, size=1):
        if size < 1:
            raise ValueError(size)
"""


def run(*arguments):
    return CliRunner().invoke(main, ["strategy", *(str(argument) for argument in arguments)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "strategy_of_a_test.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # undone afterwards, with what the command adds


def test_list():
    done = run("list", "--json")
    rows = json.loads(done.output)
    assert done.exit_code == 0 and [row["strategy"] for row in rows] == strategy_names()
    (priority,) = [row for row in rows if row["strategy"] == "priority"]
    assert priority["options"] == {"ageing_s": 5.0} and priority["summary"].startswith("Lowest number first")
    table = run("list")
    assert table.exit_code == 0 and all(name in table.output for name in strategy_names())


def test_a_good_strategy():
    done = run("check", "Slo-Aware", "--options", '{"default_ttft_s": 0.2}', "--rounds", 1, "--json")
    document = json.loads(done.output)
    assert done.exit_code == 0 and document["passed"] and document["strategy"] == "Slo-Aware"
    assert all(rule["passed"] and rule["message"] == "" for rule in document["rules"]) and document["event_us"] > 0


def test_a_bad_strategy_in_this_folder(here):
    done = run("check", "strategy_of_a_test:Bad", "--rounds", 1, "--seed", 7)
    assert done.exit_code == 1 and "does not keep to the contract" in done.output
    assert "names_all" in done.output and "seed 7" in done.output.replace("\n", " ")


def test_options_that_are_not_checked_break_a_rule(here):
    done = run("check", "strategy_of_a_test:Sized", "--rounds", 1, "--json")
    broken = [rule["rule"] for rule in json.loads(done.output)["rules"] if not rule["passed"]]
    assert done.exit_code == 1 and broken == ["options"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "known are: adaptive, aegaeon"),
        (["strategy_of_a_test:Missing"], "has no Missing"),
        (["fifo", "--options", "{"], "is not JSON"),
        (["fifo", "--options", "[1]"], "JSON list"),
        (["fifo", "--options", '{"size": 1}'], "cannot be built with options"),
        (["priority", "--options", '{"ageing_s": -1}'], "give a number of at least"),
        (["strategy_of_a_test:Sized", "--options", '{"size": 0}'], "cannot be built with options"),
        (["fifo", "--rounds", "0"], "0 is not in the range"),
        (["fifo", "--limit-s", "nan"], "not a finite number above 0"),
        (["fifo", "--limit-s", "inf"], "inf is not in the range"),
        (["fifo", "--limit-s", "1e300"], "is not in the range"),
        (["fifo", "--limit-s", "0"], "is not in the range"),
        (["fifo", "--options", "[" * 100_000], "[...' is not JSON"),
        ([], "Missing argument"),
    ],
)
def test_misuse(here, arguments, message):
    done = run("check", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())
