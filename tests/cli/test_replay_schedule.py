"""`sagellm replay --schedule`: what it prints, what it refuses, and its exit codes."""

import json
from functools import partial
from pathlib import Path

import pytest

from sagellm.replay.schedule.decisions import read_decisions
from tests.commands import run_sagellm

LOG = Path(__file__).parents[1] / "replay" / "schedule" / "engine.jsonl.gz"
FIFO, LAST = "tests.scheduler_ir.simulation.made:Fifo", "tests.scheduler_ir.simulation.made:LastFirst"
CUTS = "tests.scheduler_ir.simulation.made:Cuts"


run = partial(run_sagellm, "replay")


def test_table():
    done = run("--schedule", LOG, "--strategy", f"engine,{LAST}", "--ttft-slo-ms", 800)
    assert done.exit_code == 0, done.output
    assert "40 requests, 223 steps, 60 blocks of 16 tokens, decided by engine" in done.output
    assert "error of the prediction, engine against the log: mean TTFT" in done.output
    rows = [line.split()[0] for line in done.output.splitlines() if line.startswith(("log ", "engine ", LAST))]
    assert rows == ["log", "engine", LAST] and "requests/s" in done.output
    assert f"decisions of {LAST}: " in done.output and "used the tokens they expected" in done.output


def test_json_is_the_same_each_time():
    arguments = ("--schedule", LOG, "--strategy", f"engine,{FIFO},{CUTS}", "--json", "--strategy-options",
                 json.dumps({CUTS: {"tokens": 64}}), "--tpot-slo-ms", 100)  # fmt: skip
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    log, engine, fifo, cuts = found["rows"]
    assert [row["strategy"] for row in found["rows"]] == ["log", "engine", FIFO, CUTS]
    assert log["decisions"] == engine["decisions"] == {} and fifo["decisions"]["steps"] > 100
    assert 0.9 < fifo["decisions"]["as_expected_share"] <= fifo["decisions"]["carried_out_share"] < 1
    assert {**fifo, "strategy": "", "decisions": {}} == {**engine, "strategy": ""} and cuts["steps"] > engine["steps"]
    assert all(row["num_requests"] == 40 and row["goodput"] is not None for row in found["rows"])
    assert found["log"]["engine"]["num_blocks"] == 60 and found["step_times"]["decode_error"]["num_samples"] == 188
    error = found["prediction"]["errors"]["ttft_mean_s"]
    assert error == pytest.approx(engine["ttft_mean_s"] / log["ttft_mean_s"] - 1)
    assert run(*arguments).output == done.output


def test_arrivals_twice_as_fast():
    slow, fast = (json.loads(run("--schedule", LOG, "--json", "--speedup", x).output) for x in (1, 2))
    assert fast["rows"][1]["ttft_mean_s"] > slow["rows"][1]["ttft_mean_s"]
    assert fast["prediction"] == slow["prediction"]  # of the log as it was


def test_decisions_and_plot(tmp_path):
    done = run("--schedule", LOG, "--decisions", tmp_path / "d.jsonl", "--plot", tmp_path / "plots")
    assert done.exit_code == 0, done.output
    assert {(line.policy, line.decision) for line in read_decisions(tmp_path / "d.jsonl")} == {("engine", None)}
    assert (tmp_path / "plots" / "ttft.png").exists() and "ttft.png" in done.output
    done = run("--schedule", LOG, "--strategy", f"{FIFO},{LAST}", "--decisions", tmp_path / "d.jsonl", "--json")
    files = [Path(name) for name in json.loads(done.output)["files"]]
    assert [file.name for file in files] == [f"d-{name.replace(':', '-')}.jsonl" for name in (FIFO, LAST)]
    assert [read_decisions(file)[0].policy for file in files] == [FIFO, LAST]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--trace", "zipf"), "give either"),
        (("--policy", "lru"), "--policy has no meaning with --schedule"),
        (("--capacity", "10"), "--capacity has no meaning with --schedule"),
        (("--strategy", ","), "names no strategy"),
        (("--strategy", "tests.scheduler_ir.simulation.made:Nobody"), "has no Nobody"),
        (("--strategy", "tests.replay.schedule.made:request"), "a strategy is a subclass"),
        (("--strategy", CUTS, "--strategy-options", '{"size": 1}'), "cannot be built"),
        (("--strategy-options", "{"), "not JSON"),
        (("--strategy-options", "[]"), "give a JSON object"),
        (("--strategy-options", '{"other": {}}'), "names other"),
        (("--strategy", f"engine,{CUTS}", "--strategy-options", '{"tokens": 3}'), "with several names goes by name"),
        (("--strategy-options", '{"tokens": 3}'), "engine takes no options"),
        (("--speedup", "0"), "speedup"),
        (("--ttft-slo-ms", "nan"), "not a finite number"),
    ],
)
def test_misuse(arguments, words):
    done = run("--schedule", LOG, *arguments)
    assert done.exit_code == 2 and words in done.output, done.output


@pytest.mark.parametrize("option, value", [("--strategy", "fifo"), ("--speedup", "2"), ("--ttft-slo-ms", "100")])
def test_no_schedule_without_a_log(option, value):
    done = run("--trace", "zipf", "--capacity", 10, option, value)
    assert done.exit_code == 2 and f"{option} has no meaning with --trace" in done.output


def test_a_log_that_cannot_be_read(tmp_path):
    done = run("--schedule", tmp_path / "nowhere.jsonl")
    assert done.exit_code == 2 and "no such file" in done.output
