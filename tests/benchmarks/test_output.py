"""One writer for all results: JSON of few lines, CSV beside it, tables."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.output import WIDTH, Output, json_text, table, with_output

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
NAMES = st.text(max_size=9)
JSON = st.recursive(PLAIN, lambda inside: st.lists(inside, max_size=9) | st.dictionaries(NAMES, inside, max_size=9))
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@given(JSON)
def test_json_keeps_every_value_and_its_order(value: object):
    text = json_text(value)
    assert json.dumps(json.loads(text)) == json.dumps(value)
    assert text.endswith("\n") and "\n\n" not in text


def test_a_list_of_numbers_takes_one_line_and_members_share_lines():
    numbers = [number / 7 for number in range(60)]
    lines = json_text({"rounds": numbers, "a": {f"figure{number}": number / 7 for number in range(20)}}).splitlines()
    assert f' "rounds": {json.dumps(numbers)},' in lines
    assert len(lines) < 12 and all(len(line) <= WIDTH for line in lines if "rounds" not in line)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_committed_results_are_in_this_form(file: Path):
    assert file.read_text() == json_text(json.loads(file.read_text()))


@click.command()
@with_output
def measure(output: Output) -> None:
    """A benchmark of one figure."""
    output.say(table(["name", "us"], [("lookup", 1.5), ("insertion", 12)]))
    output.finish({"lookup_us": {"median": 1.5, "rounds": [1, 2]}, "name": "x", "is_quick": True})


def test_a_command_prints_a_table_or_json_and_writes_both_files(tmp_path: Path):
    done = CliRunner().invoke(measure, ["--out", str(tmp_path / "out.json")])
    assert done.output == "name        us\nlookup     1.5\ninsertion   12\n", done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["lookup_us"] == {"median": 1.5, "rounds": [1, 2]} and result["machine"]["cores"] >= 1
    rows = list(csv.reader((tmp_path / "out.csv").read_text().splitlines()))
    assert rows == [["figure", "value"], ["lookup_us.median", "1.5"], ["lookup_us.rounds.0", "1"],
                    ["lookup_us.rounds.1", "2"], ["is_quick", "True"]]  # fmt: skip
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.csv", "out.json"]
    done = CliRunner().invoke(measure, ["--json"])
    assert json.loads(done.output)["name"] == "x"


def test_a_result_in_json_has_stdout_to_itself():
    script = """
import os, subprocess
import click
from benchmarks.output import with_output

@click.command()
@with_output
def measure(output):
    print("a log line")
    subprocess.run(["echo", "a log line of another process"], check=True)
    output.say("a table")
    output.finish({"name": "x"})

measure()
"""
    for option, wanted in (["--json"], "stderr"), ([], "stdout"):
        done = subprocess.run([sys.executable, "-c", script, *option], capture_output=True, text=True, check=True)
        assert getattr(done, wanted).count("a log line") == 2
        assert (json.loads(done.stdout)["name"] == "x") if option else ("a table" in done.stdout)
