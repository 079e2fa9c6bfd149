"""`sagellm replay`: what it prints, what it refuses, and its exit codes."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import sagellm
from sagellm.core.events import EventLog
from tests.commands import run_sagellm

ROOT = Path(sagellm.__file__).parents[1]
RECENCY = "tests.replay.policies:Recency"
ARRIVAL = "tests.replay.policies:Arrival"


run = partial(run_sagellm, "replay")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    ids = [[0, 1, 2], [3], [0, 1, 2], [0, 4]]
    path.write_text(
        "".join(
            json.dumps({"timestamp": time, "input_length": 512 * len(row), "output_length": 9, "hash_ids": row}) + "\n"
            for time, row in enumerate(ids)
        )
    )
    return path


def test_help():
    done = run("--help")
    assert done.exit_code == 0 and all(
        word in done.output for word in ("--json", "--verify", "--tiers", "conversation")
    )


def test_json(trace):
    done = run("--trace", trace, "--policy", f"{RECENCY},{ARRIVAL}", "--capacity", "3,4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["trace"]["requests"] == 4 and found["trace"]["block_size"] == 512 and found["trace"]["skipped"] == 0
    assert [(row["policy"], row["capacity"]) for row in found["rows"]] == [
        (RECENCY, 3), (RECENCY, 4), (ARRIVAL, 3), (ARRIVAL, 4)
    ]  # fmt: skip
    assert {"semantics", "hit_rate_block", "hit_rate_token", "accesses", "seconds"} <= set(found["rows"][0])
    assert found["rows"][0]["hit_rate_block"] == 3 / 9 and found["rows"][1]["hit_rate_block"] == 4 / 9


def test_table_and_plots(trace, tmp_path):
    done = run("--trace", trace, "--policy", RECENCY, "--capacity", 3, "--plot", tmp_path / "plots", "--no-belady")
    assert done.exit_code == 0, done.output
    assert "0.3333" in done.output and "prefix semantics" in done.output and "regret" not in done.output
    assert (tmp_path / "plots" / "hit_rate.png").exists() and "hit_rate.png" in done.output


def test_every_built_in_policy_runs():
    from sagellm.kv_policy.registry import policy_names

    names = policy_names()
    done = run("--trace", "zipf:requests=60,prefixes=20", "--policy", ",".join(names), "--capacity", 60, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["rows"]
    assert [row["policy"] for row in rows] == names and all(row["regret_block"] >= 0 for row in rows)


def test_native_and_reference_agree():
    words = ["--trace", "agentic:requests=150", "--policy", "lru,s3fifo,belady", "--capacity", "300,900"]
    for more in ([], ["--running", 4, "--outputs"], ["--semantics", "object"]):
        native, plain = (json.loads(run(*words, *more, *extra, "--json").output) for extra in ([], ["--reference"]))
        for one, other in zip(native["rows"], plain["rows"], strict=True):
            assert other["implementation"] == "python"
            assert {
                key: one[key] for key in ("policy", "hit_blocks", "evictions", "retries", "preempted", "regret_block")
            } == {
                key: other[key] for key in ("policy", "hit_blocks", "evictions", "retries", "preempted", "regret_block")
            }


def test_tiers(trace):
    done = run("--trace", trace, "--policy", RECENCY, "--tiers", "gpu:3,cpu:4", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)["rows"]
    assert row["tiers"] == {"gpu": 3, "cpu": 4} and row["hit_blocks"] == 4 and row["migration_bytes"] > 0


def test_policy_options():
    words = ["--trace", "zipf:requests=30", "--capacity", 50, "--json"]
    done = run(*words, "--policy", "slru", "--policy-options", '{"protected_ratio": 0.5}')
    assert json.loads(done.output)["rows"][0]["options"] == {"protected_ratio": 0.5}
    done = run(*words, "--policy", "lru,slru", "--policy-options", '{"slru": {"protected_ratio": 0.5}}')
    assert [row["options"] for row in json.loads(done.output)["rows"]] == [{}, {"protected_ratio": 0.5}]


@pytest.mark.parametrize(
    "where", [["--capacity", "20"], ["--tiers", "gpu:20,cpu:20"], ["--capacity", 50, "--semantics", "object"]]
)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Raising", "ZeroDivisionError in on_insert"), ("Leaving", "SystemExit in on_hit"), ("Endless", "RecursionError in"),
        ("Answerless", "answers select_victims with a NoneType"), ("Listing", "answers select_victims with a list"),
        ("Wordy", "ValueError in select_victims"), ("Unbuilt", "no such model"), ("Nameless", "has no name"),
    ],
)  # fmt: skip
def test_faults_of_a_policy_are_its_own(where, kind, why):
    done = run("--trace", "zipf:requests=30", *where, "--policy", f"tests.replay.faulty:{kind}", "--no-belady")
    assert done.exit_code == 2 and f"faulty:{kind}" in done.output and why in " ".join(done.output.split()), done.output
    assert kind in ("Unbuilt", "Nameless") or "request " in done.output or "access " in done.output


def test_a_base_class_is_no_policy():
    for name in ("sagellm.kv_policy.base:EvictionPolicy", "tests.replay.leaving:Policy"):
        done = run("--trace", "zipf:requests=30", "--capacity", 9, "--policy", name)
        assert done.exit_code == 2 and name in done.output, done.output


GENERATED = ["--trace", "zipf:requests=30"]
MISUSE = {
    "nothing": ([], "--trace and --capacity"),
    "trace and log": ([*GENERATED, "--verify", "x"], "give either"),
    "no capacity": (GENERATED, "give --capacity"),
    "capacity and tiers": ([*GENERATED, "--capacity", 5, "--tiers", "gpu:5"], "give --capacity, or --tiers"),
    "capacity 0": ([*GENERATED, "--capacity", "100,0"], "'0' is not a number of blocks"),
    "capacity -1": ([*GENERATED, "--capacity", "-1"], "'-1' is not a number of blocks"),
    "capacity 1.5": ([*GENERATED, "--capacity", "1.5"], "'1.5' is not a number of blocks"),
    "capacity empty": ([*GENERATED, "--capacity", "5,"], "'' is not a number"),
    "semantics": ([*GENERATED, "--capacity", 5, "--semantics", "token"], "'prefix', 'object'"),
    "policy": ([*GENERATED, "--capacity", 5, "--policy", "magic"], "unknown eviction policy 'magic'; known are: arc, belady"),
    "no policy": ([*GENERATED, "--capacity", 5, "--policy", ","], "names no policy"),
    "no module": ([*GENERATED, "--capacity", 5, "--policy", "absent.module:Thing"], "absent"),
    "option": ([*GENERATED, "--capacity", 5, "--policy", "lru", "--policy-options", '{"speed": 3}'], "speed"),
    "options not JSON": ([*GENERATED, "--capacity", 5, "--policy-options", "{"], "is not JSON"),
    "options a list": ([*GENERATED, "--capacity", 5, "--policy-options", "[]"], "is a JSON list"),
    "options of another": ([*GENERATED, "--capacity", 5, "--policy-options", '{"arc": {}}'], "names arc; chosen are lru"),
    "options of which": ([*GENERATED, "--capacity", 5, "--policy", "lru,arc", "--policy-options", '{"a": 1}'], "by name"),
    "missing file": (["--trace", "absent.jsonl", "--capacity", 5], "absent.jsonl: no such file"),
    "parameter": (["--trace", "zipf:speed=1", "--capacity", 5], "zipf has no parameter speed"),
    "tiers": ([*GENERATED, "--tiers", "gpu:5,nvme:5"], "give gpu, then cpu, then nvme"),
    "tiers 0": ([*GENERATED, "--tiers", "gpu:0"], "at least 1 block"),
    "tiers twice": ([*GENERATED, "--tiers", "gpu:1,gpu:2"], "gpu is there twice"),
    "tiers and belady": ([*GENERATED, "--tiers", "gpu:5", "--policy", "belady"], "leave it out with --tiers"),
    "objects that run": ([*GENERATED, "--capacity", 5, "--semantics", "object", "--running", 2], "--running needs prefix"),
    "rates": ([*GENERATED, "--tiers", "gpu:5", "--load-gb-per-s", "gpu:5"], "is not cpu:GB/s"),
    "capacity of many digits": ([*GENERATED, "--capacity", "9" * 5000], "from 1 to 1073741824"),
    "capacity above": ([*GENERATED, "--capacity", 2**30 + 1], "from 1 to 1073741824"),
    "tiers above": ([*GENERATED, "--tiers", "gpu:5,cpu:" + "9" * 5000], "at most 1073741824"),
    "prefill nan": ([*GENERATED, "--capacity", 5, "--prefill-tokens-per-s", "nan"], "not a finite number above 0"),
    "prefill inf": ([*GENERATED, "--capacity", 5, "--prefill-tokens-per-s", "inf"], "not a finite number above 0"),
    "running": ([*GENERATED, "--capacity", 5, "--running", 10**20], "1<=x<=2147483647"),
    "soon": ([*GENERATED, "--capacity", 5, "--soon", 10**20], "0<=x<=2147483647"),
    "output": (["--trace", "zipf:requests=10,output=99999999999", "--capacity", 5], "less than or equal to 1048576"),
    "parameter twice": (["--trace", "zipf:requests=1,requests=2", "--capacity", 5], "requests is there twice"),
    "block size twice": (["--trace", "zipf:block_size=4", "--block-size", 8, "--capacity", 5], "apart as 8; give it once"),
    "broken policy": ([*GENERATED, "--capacity", 20, "--policy", "tests.replay.policies:Foreign"], "not on tier"),
    "lazy policy": ([*GENERATED, "--capacity", 40, "--policy", "tests.replay.policies:Lazy"], "it must choose as many"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case):
    words, expected = MISUSE[case]
    done = run(*words)
    assert done.exit_code == 2 and expected in " ".join(done.output.split()), done.output


def test_one_policy_under_several_spellings_is_one_row():
    words = ["--trace", "zipf:requests=30", "--capacity", 50, "--json", "--policy", "s3fifo,S3-FIFO,LRU,lru,be-lady"]
    done = run(*words, "--policy-options", '{"S3_fifo": {"small_ratio": 0.2}}')
    rows = json.loads(done.output)["rows"]
    assert [row["policy"] for row in rows] == ["s3fifo", "lru", "belady"] and rows[0]["options"] == {"small_ratio": 0.2}


def test_a_file_with_the_name_of_a_generator(trace, monkeypatch):
    monkeypatch.chdir(trace.parent)
    trace.rename("zipf")
    done = run("--trace", "zipf", "--capacity", 3)
    assert done.exit_code == 2 and "give zipf: or ./zipf" in done.output
    assert json.loads(run("--trace", "./zipf", "--capacity", 3, "--json").output)["trace"]["requests"] == 4
    assert "10,000 requests" in run("--trace", "zipf:", "--capacity", 999, "--no-belady").output


def test_too_little_memory_is_misuse(monkeypatch):
    def hungry(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("sagellm._core.replay_prefix", hungry)
    done = run("--trace", "zipf:requests=30", "--capacity", 50)
    assert done.exit_code == 2 and "not enough memory" in done.output


def test_bad_lines(trace):
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([lines[0], "{oops}", *lines[1:]]) + "\n")
    words = ["--trace", trace, "--policy", RECENCY, "--capacity", 4]
    done = run(*words)
    assert done.exit_code == 2 and "line 2: is not JSON" in done.output and "--skip-bad" in done.output
    done = run(*words, "--skip-bad", "--json")
    found = json.loads(done.output)
    assert found["trace"]["skipped"] == 1 and found["rows"][0]["skipped_lines"] == 1
    assert "1 lines skipped" in run(*words, "--skip-bad").output


@pytest.mark.parametrize("num", [0, 1, 30])
def test_verify(monkeypatch, num):
    """The report is made here; how a log is checked has tests of its own."""
    from sagellm.replay import verify

    differences = [verify.Difference(line, "kv_room", "victims", [1], [2]) for line in range(num)]
    found = verify.VerifyReport("log.jsonl", num_decisions=40, differences=differences)
    monkeypatch.setattr(verify, "verify_log", lambda path: found)
    done = run("--verify", "log.jsonl")
    assert (
        done.exit_code == (1 if num else 0)
        and f"40 decisions on 0 victims, 0 of 0 blocks found; {num} differ" in done.output
    )
    assert done.output.count("recorded [1], replayed [2]") == min(num, 20)
    done = run("--verify", "log.jsonl", "--json")
    assert done.exit_code == (1 if num else 0) and len(json.loads(done.output)["differences"]) == num


def test_verify_tells_what_is_missing(monkeypatch):
    from sagellm.replay import verify

    found = verify.VerifyReport("log.jsonl", gaps=[(7, 5, 9)], truncated=True)
    monkeypatch.setattr(verify, "verify_log", lambda path: found)
    done = run("--verify", "log.jsonl")
    assert done.exit_code == 1 and "line 7: lines are missing, number 5 was expected and 9 came" in done.output
    assert "1 gaps; the last line was cut off" in done.output


def test_verify_tells_that_a_log_stops_early(monkeypatch):
    from sagellm.replay import verify

    for num, text in (
        (0, "0 gaps."),
        (1, "0 gaps; it ends without a close line."),
        (2, "2 processes end without a close line."),
    ):
        monkeypatch.setattr(verify, "verify_log", lambda path, num=num: verify.VerifyReport("log.jsonl", num_open=num))
        done = run("--verify", "log.jsonl")
        assert done.exit_code == 0 and done.output.strip().endswith(text)


@pytest.mark.parametrize(
    "more", [["--capacity", 5], ["--policy", "lru"], ["--skip-bad"], ["--plot", "here"], ["--soon", 3]]
)
def test_verify_takes_no_other_options(more):
    done = run("--verify", "log.jsonl", *more)
    assert done.exit_code == 2 and f"{more[0]} has no meaning with --verify" in done.output


@pytest.mark.parametrize("more", [["--migration", "never"], ["--load-gb-per-s", "cpu:5"]])
def test_options_of_tiers_go_with_tiers(more):
    done = run(*GENERATED, "--capacity", 50, *more)
    assert done.exit_code == 2 and f"{more[0]} needs --tiers" in done.output


def test_verify_a_log_that_is_not_there():
    done = run("--verify", "absent.jsonl")
    assert done.exit_code == 2 and "absent.jsonl" in done.output


def test_as_a_process(trace):
    code = "from sagellm.cli import main; main()"
    words = ["replay", "--trace", trace, "--policy", "belady", "--capacity", "3", "--semantics", "object", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["hit_blocks"] == 3 and done.stderr == ""
    failed = subprocess.run([sys.executable, "-c", code, "replay"], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr


def test_a_policy_of_the_current_folder(tmp_path):
    """As an installed command has it: the current folder is not on sys.path by itself."""
    (tmp_path / "mine.py").write_text(
        "from sagellm.kv_policy.eviction.fifo import Fifo\n\n\nclass Mine(Fifo):\n    name = 'mine'\n"
    )

    def replay(*words):
        code = f"import sys; sys.path[0] = {str(ROOT)!r}; from sagellm.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "replay", *words], capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = replay("--trace", "zipf:requests=20", "--capacity", "90", "--policy", "mine:Mine", "--json")
    assert found["rows"][0]["policy"] == "mine:Mine"
    log = EventLog(tmp_path / "log.jsonl")
    log.write("open", format=2)
    tier = {"tier": "gpu", "capacity": 4, "policy": "mine:Mine", "options": {}}
    migration = {"name": "cost", "options": {}}
    log.write("kv_open", format=2, tiers=[tier], migration=migration, quotas={}, block_size=4, block_bytes=64)
    log.write("close")
    log.close()
    assert replay("--verify", "log.jsonl", "--json")["differences"] == []
