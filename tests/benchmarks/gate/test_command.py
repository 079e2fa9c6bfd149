"""The command line: every exit code, what it prints and writes, and what it refuses."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.errors import BenchmarkError
from ci_gate import main
from tests.benchmarks.gate.made_up import steady

ROOT = Path(__file__).parents[3]
TRIO = ("base", "control", "head")


@pytest.fixture
def write(tmp_path):
    def write(result, name="result.json"):
        result.write(tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("{name: tiny, rounds: 4, components: {prefix_index: {}}}")
    return file


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def misused(done, told):
    assert done.exit_code == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and told in line


@pytest.mark.parametrize(
    ("result", "code", "verdict"),
    [
        (steady(names=TRIO), 0, "pass"),
        (steady(names=TRIO, head={"ttft_p50_s": 1.1}), 1, "regression"),
        (steady(names=TRIO, rounds=2), 3, "cannot tell"),
        (steady(names=("base", "head", "control"), head={"ttft_p50_s": 1.2}), 3, "cannot tell"),
    ],
)
def test_exit_codes_of_one_result(write, result, code, verdict):
    done = run("--current", write(result), "--baseline-name", "base", "--current-name", "head")
    assert done.exit_code == code and done.stdout.startswith(f"## Benchmark: {verdict}\n")
    printed = run("--current", write(result), "--json")
    assert printed.exit_code == code and json.loads(printed.stdout)["verdict"] == verdict


def test_exit_codes_of_two_results(write):
    old, same = write(steady(names=("head",)), "old.json"), write(steady(names=("head",), seed=1), "same.json")
    slow = write(steady(names=("head",), seed=2, head={"tpot_p95_s": 1.3}), "slow.json")
    assert run("--baseline", old, "--current", same).exit_code == 0
    assert run("--baseline", old, "--current", slow).exit_code == 1


def test_as_a_program(write):
    file = write(steady(names=TRIO, head={"ttft_p50_s": 1.1}))
    done = subprocess.run(
        [sys.executable, ROOT / "ci_gate.py", "--current", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr == "" and "**Regression**" in done.stdout


def test_markdown_is_written(write, tmp_path):
    file = tmp_path / "summary.md"
    done = run("--current", write(steady()), "--markdown", file)
    assert file.read_text().strip() == done.stdout.strip()


def test_rules_change_the_verdict(write, tmp_path):
    file, rules = write(steady(head={"mfu": 0.9})), tmp_path / "rules.yaml"
    rules.write_text("metrics: {mfu: {gated: false, reason: the peak is wrong}}")
    assert run("--current", file).exit_code == 1
    done = run("--current", file, "--rules", rules)
    assert done.exit_code == 0 and "- mfu: the peak is wrong" in done.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("{", "is no JSON"),
        ('{"schema": "other/9"}', "has schema 'other/9'"),
        ("[]", "has schema None"),
        ('{"schema": "sagellm-benchmark/1"}', "is damaged at name"),
    ],
)
def test_files_that_are_no_results(tmp_path, text, told):
    file, summary = tmp_path / "result.json", tmp_path / "summary.md"
    if text is not None:
        file.write_text(text)
    misused(run("--current", file, "--markdown", summary), told)
    assert not summary.exists()


def test_refusals_write_nothing(write, tmp_path):
    broken, summary = steady(), tmp_path / "summary.md"
    broken.status, broken.reason = "partial", "stopped by its user"
    misused(run("--current", write(broken), "--markdown", summary), "the result is partial (stopped by its user)")
    assert not summary.exists()
    misused(run("--current", write(steady()), "--markdown", tmp_path / "none" / "summary.md"), "cannot write")
    misused(run("--current", write(steady()), "--rules", tmp_path / "none.yaml"), "cannot read")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--baseline", "a.json"],
        ["--current", "a.json", "--preset", "ci"],
        ["--current", "a.json", "--rounds", "5"],
        ["--ab", "main", "--current", "a.json"],
        ["--ab", "main", "--preset", "ci", "--config", "a.yaml"],
        ["--ab", "main", "--rounds", "0"],
        ["--nothing"],
    ],
)
def test_options_that_do_not_go_together(arguments):
    done = run(*arguments)
    assert done.exit_code == 2 and "Error: " in done.stderr


def test_ab_runs_base_and_head_and_judges_them(monkeypatch, tmp_path, config):
    asked = []

    def run_ab(base_rev, config, out):
        asked.append((base_rev, config.name, config.rounds, out))
        return steady(names=TRIO, head={"ttft_p50_s": 1.1})

    monkeypatch.setitem(sys.modules, "benchmarks.ab", types.SimpleNamespace(run_ab=run_ab))
    done = run("--ab", "origin/main", "--config", config, "--rounds", 7, "--out", tmp_path / "out")
    assert done.exit_code == 1 and "A/A check passed" in done.stdout
    assert asked == [("origin/main", "tiny", 7, tmp_path / "out")]
    run("--ab", "HEAD", "--config", config)
    assert asked[1] == ("HEAD", "tiny", 4, Path("benchmark-ab"))


def test_ab_that_cannot_run_is_misuse(monkeypatch, config, tmp_path):
    def run_ab(base_rev, config, out):
        raise BenchmarkError(f"revision {base_rev!r} is unknown")

    monkeypatch.setitem(sys.modules, "benchmarks.ab", types.SimpleNamespace(run_ab=run_ab))
    misused(run("--ab", "nothing", "--config", config), "revision 'nothing' is unknown")
    misused(run("--ab", "HEAD", "--config", tmp_path / "none.yaml"), "cannot read")
    misused(run("--ab", "HEAD", "--preset", "nothing"), "preset 'nothing' is unknown")


def test_mistakes_are_told_before_anything_is_measured(monkeypatch, config, tmp_path):
    def run_ab(base_rev, config, out):
        raise AssertionError("measured")

    monkeypatch.setitem(sys.modules, "benchmarks.ab", types.SimpleNamespace(run_ab=run_ab))
    (tmp_path / "rules.yaml").write_text("metrics: {mfu: {limit: 1}}")
    misused(run("--ab", "HEAD", "--config", config, "--rules", tmp_path / "rules.yaml"), "limit: unknown key")
    misused(run("--ab", "HEAD", "--config", config, "--markdown", tmp_path / "none" / "a.md"), "folder is missing")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (KeyboardInterrupt(), "interrupted; nothing was judged"),
        (OSError("no space"), "the gate itself failed: OSError('no space')"),
        ("partial", "the comparison is partial (stopped)"),
        ("failed", "the comparison is failed (stopped)"),
    ],
)
def test_what_was_not_measured_whole_is_no_regression(monkeypatch, config, end, told):
    def run_ab(base_rev, config, out):
        if isinstance(end, str):
            return steady(names=TRIO, head={"ttft_p50_s": 1.1}).model_copy(update={"status": end, "reason": "stopped"})
        raise end

    monkeypatch.setitem(sys.modules, "benchmarks.ab", types.SimpleNamespace(run_ab=run_ab))
    done = run("--ab", "HEAD", "--config", config)
    assert done.exit_code == 3 and f"error: {told}" in done.stderr and done.stdout == ""
