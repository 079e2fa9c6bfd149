"""`sagellm policy`: what it lists, what it says about a policy, and its exit codes."""

import json

import pytest
from click.testing import CliRunner

from sagellm.cli import main
from sagellm.kv_policy import policy_names

BAD = """
from sagellm.kv_policy.eviction.lru import Lru
class Bad(Lru):
    def select_victims(self, context):
        decision = super().select_victims(context)
        return type(decision)(decision.victims[:-1], decision.reason, decision.reasons[:-1])
class Silent(Lru):
    def on_insert(self, block):
        raise SystemExit(0)
class Sized(Lru):
    def __init__(self, capacity, *, size=1):
        super().__init__(capacity)
"""


def run(*arguments):
    return CliRunner().invoke(main, ["policy", *(str(argument) for argument in arguments)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "policy_of_a_test.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # undone afterwards, with what the command adds


def test_list():
    done = run("list", "--json")
    rows = json.loads(done.output)
    assert done.exit_code == 0 and [row["policy"] for row in rows] == policy_names()
    (s3fifo,) = [row for row in rows if row["policy"] == "s3fifo"]
    assert s3fifo["options"] == {"small_ratio": 0.1, "ghost_ratio": 0.9, "move_to_main": 2} and s3fifo["summary"]
    table = run("list")
    assert table.exit_code == 0 and all(name in table.output for name in policy_names())


def test_a_good_policy():
    done = run("check", "S3-FIFO", "--options", '{"small_ratio": 0.2}', "--rounds", 1, "--reference", "--json")
    document = json.loads(done.output)
    assert done.exit_code == 0 and document["passed"] and document["event_us"] > 0
    assert all(rule["passed"] and rule["message"] == "" for rule in document["rules"])


def test_a_bad_policy_in_this_folder(here):
    done = run("check", "policy_of_a_test:Bad", "--rounds", 1, "--seed", 7)
    assert done.exit_code == 1 and "does not keep to the contract" in done.output
    assert "enough" in done.output and "seed 7" in done.output.replace("\n", " ")


def test_a_policy_that_ends_the_process_does_not_pass(here):
    done = run("check", "policy_of_a_test:Silent", "--rounds", 1)
    assert done.exit_code == 1 and "not seen" in done.output and "SystemExit" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "known are: arc, belady"),
        (["policy_of_a_test:Missing"], "has no Missing"),
        (["lru", "--options", "{"], "is not JSON"),
        (["lru", "--options", "[1]"], "JSON list"),
        (["lru", "--options", '{"size": 1}'], "no options"),
        (["policy_of_a_test:Sized", "--options", '{"colour": 1}'], "cannot be built with options"),
        (["belady"], "option future"),
        (["lru", "--rounds", "0"], "0 is not in the range"),
        (["lru", "--limit-s", "nan"], "not a finite number above 0"),
        (["lru", "--limit-s", "inf"], "inf is not in the range"),
        (["lru", "--limit-s", "1e300"], "is not in the range"),
        (["lru", "--limit-s", "0"], "is not in the range"),
        (["lru", "--options", "[" * 100_000], "[...' is not JSON"),
        ([], "Missing argument"),
    ],
)
def test_misuse(here, arguments, message):
    done = run("check", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
