"""`sagellm list` and `sagellm check` for every kind of plug-in, their older spellings, and their exit codes."""

import json
from pathlib import Path

import pytest

from sagellm.comm_backend.registry import find_backend
from sagellm.core.contract import Suite
from sagellm.core.errors import ConfigError
from sagellm.core.kinds import KINDS, find_kind
from sagellm.core.registry import Registry
from tests.commands import run_sagellm as run

ROOT = Path(__file__).parents[2]

MINE = """
from dataclasses import replace
from sagellm.comm_backend.kv_transfer.shm import ShmChannel
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.core.hooks import MigrationPlan, Plugin, ScheduleDecision
from sagellm.kv_policy.base import MigrationDecision
from sagellm.kv_policy.eviction.lru import Lru
from sagellm.kv_policy.lifetime.exponential import ExponentialLifetime
from sagellm.kv_policy.migration.always import Always
from sagellm.pd.routing import PDPolicy
from sagellm.scheduler_ir.strategies.fifo import Fifo

class FewVictims(Lru):
    def select_victims(self, context):
        decision = super().select_victims(context)
        return type(decision)(decision.victims[:-1], decision.reason, decision.reasons[:-1])
class Exits(Lru):
    def on_insert(self, block):
        raise SystemExit(0)
class SizedPolicy(Lru):
    def __init__(self, capacity, *, size=1):
        super().__init__(capacity)
class Forgets(Fifo):
    def decide(self, view):
        return ScheduleDecision([request.request_id for request in view.requests][:-1])
class SizedStrategy(Fifo):
    def __init__(self, *, size=1):
        if size < 1:
            raise ValueError(size)
class Holes(Always):
    def plan(self, context):
        keys = tuple(block.key for block in context.blocks)[1:]
        return MigrationDecision(MigrationPlan(context.src_tier, context.dst_tier, keys), 0.0, "all but the first")
class Fickle(Always):
    count = 0
    def plan(self, context):
        self.count += 1
        keys = tuple(block.key for block in context.blocks)[: self.count % 2]
        return MigrationDecision(MigrationPlan(context.src_tier, context.dst_tier, keys), 0.0, "now and then")
class Hasty(ExponentialLifetime):
    def predict_ttl(self, key, time_s, quantile=0.5):
        return 1 - quantile
class Anywhere(PDPolicy):
    def choose(self, request, engines):
        decision = super().choose(request, engines)
        prefill = next((one.engine_id for one in engines if one.role == "prefill"), None)
        return decision if request.can_split else replace(decision, prefill_on=prefill)
class FromZero(MemoryBackend):
    def _start_broadcast(self, tensor, src, timeout_s):
        return super()._start_broadcast(tensor, 0, timeout_s)
class Unbuilt(ShmChannel):
    def _open(self):
        raise RuntimeError("no")
class Raises(Plugin):
    def on_step_end(self, result):
        raise OSError("no disk")
"""


def text_of(done):
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # undone afterwards, with what the command adds


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_of_the_table(kind):
    """Everything that a row names exists, its list has every registered name, and `check` explains itself."""
    registry, suite = kind.load("registry"), kind.load("suite")
    assert isinstance(registry, Registry) and isinstance(suite, Suite) and suite.rules and registry.base is kind.load("base")
    assert isinstance(kind.load("example"), type) and (ROOT / kind.docs).is_file()
    rows = json.loads(run("list", kind.name, "--json").output)
    assert [row["name"] for row in rows] == [row[kind.key] for row in rows] == registry.names()
    assert all(row["summary"] and row["class"] != "" for row in rows)
    table = run("list", kind.name)
    assert table.exit_code == 0 and all(name in table.output for name in registry.names())
    shown = text_of(run("check", kind.name, "--help"))
    assert all(flag in shown for flag in ("--options", "--seed", "--rounds", "--limit-s", "--json", kind.docs))
    assert all(f"--{flag.name}" in shown for flag in suite.flags)


def test_the_table_of_kinds():
    rows = json.loads(run("list", "--json").output)
    assert [row["name"] for row in rows] == [kind.name for kind in KINDS]
    assert all(kind.name in run("list").output and kind.name in run("check", "--help").output for kind in KINDS)
    assert find_kind("policy").load("base").__name__ == "EvictionPolicy"
    with pytest.raises(ConfigError, match="unknown kind of plug-in 'policies'; known are: plugin, policy"):
        find_kind("policies")
    assert run("list", "policies").exit_code == 2 and run("check", "policies", "lru").exit_code == 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.old_list], ids=lambda kind: kind.name)
def test_older_spellings(kind):
    assert run(*kind.old_list, "--json").output == run("list", kind.name, "--json").output
    old, new = run(*kind.old_check, "--help").output, run("check", kind.name, "--help").output
    assert old.split("\n")[2:] == new.split("\n")[2:]
    assert all(command in run(kind.old_list[0], "--help").output for command in (kind.old_list[1], kind.old_check[1]))


def test_facts_of_a_list():
    rows = {kind.name: {row["name"]: row for row in json.loads(run("list", kind.name, "--json").output)} for kind in KINDS}
    s3fifo = rows["policy"]["s3fifo"]
    assert s3fifo["options"] == {"small_ratio": 0.1, "ghost_ratio": 0.9, "move_to_main": 2} and s3fifo["native"]
    assert rows["strategy"]["priority"]["options"] == {"ageing_s": 5.0}
    assert rows["strategy"]["priority"]["summary"].startswith("Lowest number first")
    assert rows["speculative"]["dynamic"]["options"]["strategy"] == "ngram" and rows["speculative"]["eagle"]["class"] is None
    backends = rows["backend"]
    assert backends["memory"]["here"] == backends["gloo"]["here"] == "yes" and backends["gloo"]["devices"] == "cpu"
    assert backends["nccl"]["here"] == (find_backend("nccl").missing() or "yes")
    assert backends["memory"]["summary"] == "Ranks that are threads of this process."
    assert rows["channel"]["tcp"]["class"] == "sagellm.comm_backend.kv_transfer.tcp:TcpChannel"
    assert rows["device"]["cpu"]["devices"] == "cpu"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "policy", "S3-FIFO", "--options", '{"small_ratio": 0.2}', "--reference"],
        ["policy", "check", "S3-FIFO"],
        ["check", "migration", "cost", "--options", '{"lifetime": "history"}'],
        ["check", "lifetime", "history"],
        ["check", "routing", "pd"],
        pytest.param(["strategy", "check", "Slo-Aware", "--options", '{"default_ttft_s": 0.2}'], marks=pytest.mark.slow),
        pytest.param(["speculative", "check", "Prompt-Lookup", "--no-engine"], marks=pytest.mark.slow),
        ["comm", "check", "Memory", "--ranks", "2"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_a_good_one(arguments):
    done = run(*arguments, "--rounds", 1, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["passed"] and document["event_us"] > 0
    assert document["name"] == document[find_kind(document["kind"]).key] == arguments[2]
    assert all(rule["passed"] and rule["message"] == "" for rule in document["rules"])


@pytest.mark.parametrize(
    ("kind", "name", "rule", "message"),
    [
        ("policy", "FewVictims", "enough", ""),
        ("policy", "Exits", "raises_nothing", "SystemExit"),
        ("migration", "Holes", "first", "leaves one before them out"),
        ("migration", "Fickle", "asking", "answered otherwise"),
        ("lifetime", "Hasty", "quantile", "the times must not fall"),
        ("routing", "Anywhere", "splits", "cannot be split"),
        ("strategy", "Forgets", "names_all", ""),
        pytest.param("strategy", "SizedStrategy", "options", "", marks=pytest.mark.slow),
        ("backend", "FromZero", "broadcast", "broadcast from 1 gave"),
        ("channel", "Unbuilt", "builds", "RuntimeError: no"),
        pytest.param("plugin", "Raises", "stays_on", "on_step_end raised", marks=pytest.mark.slow),
    ],
)
def test_a_bad_one_in_this_folder(here, kind, name, rule, message):
    done = run("check", kind, f"mine_of_a_test:{name}", "--rounds", 1, "--seed", 7, "--json")
    (found,) = [each for each in json.loads(done.stdout)["rules"] if each["rule"] == rule]
    assert done.exit_code == 1 and not found["passed"] and found["seen"] and message in found["message"]
    assert "[scenario " in found["message"] and "seed 7" in found["message"]


def test_a_report_in_words(here):
    done = run("check", "policy", "mine_of_a_test:Exits", "--rounds", 1, "--seed", 7)
    assert done.exit_code == 1 and "does not keep to the contract" in text_of(done) and "not seen" in done.output
    assert "seed 7" in text_of(done)


def test_an_option_that_the_ranks_refuse():
    done = run("check", "backend", "memory", "--options", '{"size": 1}', "--json")
    builds = json.loads(done.output)["rules"][0]
    assert done.exit_code == 1 and builds["rule"] == "builds" and "memory has none" in builds["message"]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("policy", ["nothing"], "known are: arc, belady"),
        ("policy", ["mine_of_a_test:Missing"], "has no Missing"),
        ("policy", ["lru", "--options", '{"size": 1}'], "no options"),
        ("policy", ["mine_of_a_test:SizedPolicy", "--options", '{"colour": 1}'], "cannot be built with options"),
        ("policy", ["belady"], "option future"),
        ("migration", ["nothing"], "known are: always, cost"),
        ("migration", ["cost", "--options", '{"lifetime": 3}'], "give a lifetime predictor"),
        ("strategy", ["nothing"], "known are: adaptive, aegaeon"),
        ("strategy", ["fifo", "--options", '{"size": 1}'], "cannot be built with options"),
        ("strategy", ["priority", "--options", '{"ageing_s": -1}'], "give a number of at least"),
        ("strategy", ["mine_of_a_test:SizedStrategy", "--options", '{"size": 0}'], "cannot be built with options"),
        ("speculative", ["nothing"], "known are: chain, draft, dynamic"),
        ("speculative", ["eagle"], "start a server on a GPU"),
        ("backend", ["nothing"], "known are: memory, gloo"),
        ("backend", ["memory", "--ranks", "1"], "1 is not in the range"),
        ("channel", ["pigeon"], "known are: shm, tcp"),
        ("plugin", ["nothing"], "known are: none installed"),
        ("plugin", ["mine_of_a_test:FewVictims"], "no plug-in; give a subclass"),
        ("device", ["abacus"], "known are: cpu"),
        ("device", ["cpu", "--options", '{"size": 1}'], "takes no options"),
    ],
)
def test_misuse(here, kind, arguments, message):
    done = run("check", kind, *arguments)
    assert done.exit_code == 2 and message in text_of(done)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--options", "{"], "is not JSON"),
        (["--options", "[1]"], "JSON list"),
        (["--options", "[" * 100_000], "[...' is not JSON"),
        (["--rounds", "0"], "0 is not in the range"),
        (["--limit-s", "nan"], "not a finite number above 0"),
        (["--limit-s", "inf"], "inf is not in the range"),
        (["--limit-s", "1e300"], "is not in the range"),
        (["--limit-s", "0"], "is not in the range"),
    ],
)
def test_misuse_of_what_all_kinds_share(arguments, message):
    done = run("check", "strategy", "fifo", *arguments)
    assert done.exit_code == 2 and message in text_of(done)
    assert "Missing argument" in text_of(run("check", "strategy"))


def test_the_cpu_device():
    done = run("check", "device", "cpu", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout[done.stdout.index("{") :])["passed"]


def test_a_bad_device(monkeypatch):
    from sagellm.engines.lmdeploy.contract import device as contract
    from sagellm.engines.lmdeploy.cpu.device import CpuDevice

    class Careless(CpuDevice):
        def validate(self, config):
            pass

        def to_device(self, value):
            return value

        def apply_token_bitmask(self, logits, bitmask):
            pass

        def memory(self):
            return 2, 1

    class Partial:
        torch_device = "cpu"

    for kind, broken in ((Careless, {"validates", "memory", "copies", "bitmask"}), (Partial, {"builds"})):
        monkeypatch.setattr(contract, "load_offered", lambda *arguments, kind=kind: kind())
        report = contract.SUITE.prepare(contract.DEVICES, "cpu", {})(
            seed=0, rounds=1, progress=None, limit_s=None, only=["parts"]
        )
        assert {result.rule for result in report.results if result.seen and not result.passed} == broken
