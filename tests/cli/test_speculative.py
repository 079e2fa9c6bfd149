"""`sagellm speculative`: what it lists, a sweep on a tiny model, the setting that follows, and its exit codes."""

import json
from functools import partial

import pytest

from sagellm.accel.speculative.planning.table import LatencyTable, read_table
from sagellm.accel.speculative.registry import make_speculator, speculator_names
from tests.commands import run_sagellm

run = partial(run_sagellm, "speculative")


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "table.json"
    LatencyTable((1, 4), (0, 2), ((0.010, 0.012), (0.02, 0.05)), ((5, 5), (5, 5)), 100.0, {}).write(file)
    return file


def test_list():
    rows = json.loads(run("list", "--json").output)
    assert [row["strategy"] for row in rows] == speculator_names()
    (dynamic,) = [row for row in rows if row["strategy"] == "dynamic"]
    assert dynamic["options"]["strategy"] == "ngram" and dynamic["summary"].startswith("Asks another")
    assert all(name in run("list").output for name in speculator_names())
    shown = run("--help").output
    assert all(name in shown for name in ("check", "list", "profile", "recommend"))


def test_a_sweep_on_a_tiny_model(model_folder, tmp_path):
    file = tmp_path / "table.json"
    done = run(
        "profile", "--model", model_folder("llama"), "--out", file, "--device", "cpu", "--threads", 1, "--batches", "1,3",
        "--lookaheads", "2", "--context", 20, "--steps", 2,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2 guesses" in done.output
    found = read_table(file)
    assert (found.batches, found.lookaheads) == ((1, 3), (0, 2)) and 20 <= found.context < 60
    assert found.facts["device"] == "cpu" and found.facts["dtype"] == "float32" and found.facts["threads"] == 1
    assert make_speculator("dynamic:ngram", table=str(file)).report()["times"]["from_table"]


def test_recommend(table):
    found = json.loads(run("recommend", table, "--acceptance", 0.9, "--batch", 1, "--json").output)
    assert found["lookahead"] == 2 and found["speedup"] == pytest.approx(2.71 / 1.2)
    done = run("recommend", table, "--acceptance", 0.9, "--target-ms", 4.43, "--batch", 1)
    assert done.exit_code == 0 and "lookahead 2" in done.output and "beyond" not in done.output
    done = run("recommend", table, "--acceptance", 0.9, "--target-ms", 4.42, "--batch", 1)
    assert done.exit_code == 1 and "Nothing keeps to 4.42 ms" in done.output
    beyond = run("recommend", table, "--acceptance", 0, "--batch", 8)
    assert "beyond what was measured, 1 to 4 sequences, so only a guess" in beyond.output and beyond.exit_code == 0


def test_a_table_of_one_batch_says_nothing_of_others(tmp_path):
    file = tmp_path / "table.json"
    LatencyTable((2,), (0, 2), ((0.010, 0.012),), ((5, 5),), 100.0, {}).write(file)
    assert run("recommend", file, "--acceptance", 0.9, "--batch", 2).exit_code == 0
    assert json.loads(run("recommend", file, "--acceptance", 0.9, "--json").output)["batch"] == 2
    for other in (1, 16):
        done = run("recommend", file, "--acceptance", 0.9, "--batch", other)
        text = " ".join(done.output.split())
        assert done.exit_code == 2 and f"steps of 2 sequences alone, which say nothing of {other}" in text
        assert f"--batches {min(2, other)},{max(2, other)} " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recommend", "/nowhere", "--acceptance", "0.5"], "sagellm speculative profile"),
        (["recommend", "TABLE"], "Missing option"), (["recommend", "TABLE", "--acceptance", "2"], "not in the range"),
        (["recommend", "TABLE", "--acceptance", "1", "--target-ms", "0"], "not in the range"),
        (["profile", "--out", "x", "--batches", "0"], "whole numbers from 1"),
        (["profile", "--out", "x", "--lookaheads", "4,x"], "whole numbers from 0 to 64"),
        (["profile"], "Missing option"), (["nothing"], "No such command"),
    ],
)  # fmt: skip
def test_misuse(table, words, message):
    done = run(*(table if word == "TABLE" else word for word in words))
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")


def test_a_model_that_is_none(tmp_path):
    done = run("profile", "--model", tmp_path, "--out", tmp_path / "x", "--json")
    assert done.exit_code == 1 and str(tmp_path) in json.loads(done.output)["error"]
