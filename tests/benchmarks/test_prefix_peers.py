"""Contestants are asked in turn, in processes of their own, and a wrong answer costs a contestant its figures."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.errors import BenchmarkError
from benchmarks.peers.process import ContestantProcess
from benchmarks.prefix.comparison import WORKER, Entrant, Plan, measure, num_requests
from benchmarks.prefix.contestants.base import Found
from benchmarks.prefix.native import run_native
from benchmarks.prefix.report import markdown
from benchmarks.prefix.worker import Worker
from benchmarks.prefix.workload import PrefixWorkload
from benchmarks.prefix_peers import main

OURS, TWIN, LMDEPLOY = "sagellm", "sagellm, plain twin", "LMDeploy BlockTrie"
SMALL = {"seed": 1, "block_size": 64, "num_sequences": 30, "num_lookups": 16}

# A Python in which every contestant is `sagellm` with wrong answers.
WRONG = """#!/bin/sh
exec {python} -c '
import json, sys
from benchmarks.peers.worker import answer_requests
from benchmarks.prefix.contestants.base import Found
from benchmarks.prefix.contestants.sagellm_index import SageContestant
from benchmarks.prefix.worker import Worker

right = SageContestant.found


def wrong(self, query):
    found = right(self, query)
    return {wrong}


SageContestant.found = wrong
sys.argv = ["worker", json.dumps(json.loads(sys.argv[-1]) | dict(contestant="sagellm"))]
answer_requests(Worker)
' "$@"
"""


def wrong_python(folder: Path, wrong: str) -> str:
    path = folder / "python"
    path.write_text(WRONG.format(python=sys.executable, wrong=wrong))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", [OURS, TWIN, LMDEPLOY])
def test_contestants_answer_what_the_workload_knows(name: str):
    worker = Worker(name, **SMALL)
    inserted = [worker.insert(rounds=4) for _ in range(4)]
    sequences = [worker._workload.sequence(number) for number in range(30)]
    assert sum(answer["num_tokens"] for answer in inserted) == 64 * sum(len(each.block_ids) for each in sequences)
    assert worker.insert(rounds=4)["num_tokens"] == 0
    memory = worker.memory()
    assert memory["num_cached_tokens"] == worker._workload.num_cached_tokens
    assert worker.check() == {"num_wrong": 0, "first": ""}
    matched = sum(worker._workload.matched_tokens(number) for number in range(16))
    for _ in range(2):
        answer = worker.lookup()
        assert answer.keys() == set(worker._contestant.parts)
        assert all((row["num_lookups"], row["matched_tokens"]) == (16, matched) for row in answer.values())
        assert all(row["cpu_ns"] > 0 and row["first_cpu_ns"] > 0 for row in answer.values())
    worker.touch(seed=1)
    assert worker.check()["num_wrong"] == 0, "lookups left something behind"
    evicted = worker.evict(num_blocks=8, calls=3)
    assert evicted["num_blocks"] >= 24
    while worker.evict(num_blocks=4096, calls=1)["num_blocks"]:
        pass
    assert worker.check()["num_wrong"] == 16, "everything was evicted, so every lookup must be wrong"


def test_touched_sequences_are_evicted_in_the_order_of_touching():
    worker = Worker(OURS, **SMALL)
    worker.insert(1)
    index, order = worker._contestant._index, np.random.default_rng(7).permutation(30)
    worker.touch(seed=7)
    own = [set(worker._workload.sequence(int(n)).block_ids.tolist()) for n in order]
    first = index.evict_lru(1).kv_block_ids[0]
    assert first in own[0]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda found: Found(found.num_tokens - 64, found.block_ids[:-1]), "lookup 0 found .* tokens, .* are cached"),
        (lambda found: Found(found.num_tokens, found.block_ids + 1), "lookup 0 found other blocks"),
    ],
)
def test_wrong_answers_are_counted(monkeypatch: pytest.MonkeyPatch, wrong: Any, words: str):
    worker = Worker(OURS, **SMALL)
    worker.insert(1)
    right = worker._contestant.found
    monkeypatch.setattr(worker._contestant, "found", lambda query: wrong(right(query)))
    check = worker.check()
    assert check["num_wrong"] == 16 and re.match(words, check["first"])


def test_figures_have_one_value_a_round():
    answered: list[None] = []
    entrants = [Entrant(OURS, sys.executable, OURS, 30), Entrant(TWIN, sys.executable, TWIN, 30)]
    plan = Plan(seed=1, block_size=64, num_lookups=16, rounds=3, starts=2)
    figures = measure(entrants, plan, lambda: answered.append(None))
    assert len(answered) == num_requests(entrants, plan)
    for own in figures.values():
        assert own["refused"] == "" and own["about"]["version"] and "workload" not in own["about"]
        for figure in ("insert_ns_per_token", "ns_per_matched_token", "evict_ns_per_block"):
            assert len(own[figure]) == 6 and min(own[figure]) > 0
        assert all(len(own[figure]["lookup"]) == 6 for figure in ("lookup_us", "lookup_wall_us", "first_pass_us"))
        assert len(own["bytes_per_token"]) == len(own["own_bytes_per_token"]) == 2


def start(contestant: str, python: str = sys.executable) -> ContestantProcess:
    return ContestantProcess("it", python, WORKER, {"contestant": contestant, **SMALL}, lambda: None)


def test_failures_are_told_with_the_contestants_own_words(tmp_path: Path):
    with pytest.raises(BenchmarkError, match="it: .*/nowhere cannot be started: No such file"):
        start(OURS, str(tmp_path / "nowhere"))
    process = start("nobody")
    with pytest.raises(BenchmarkError, match="it: ValueError: contestant 'nobody' is unknown; known are sagellm, "):
        process.about()
    process.close()
    process = start(OURS)
    process.about()
    with pytest.raises(BenchmarkError, match="it: TypeError: .*unexpected keyword argument 'colour'"):
        process.ask({"do": "insert", "colour": 1})
    with pytest.raises(BenchmarkError, match="it ended without an answer: "):
        process.ask({"do": "memory"})
    process.close()
    assert process._process.returncode == 0


def test_other_lookups_than_the_others_are_refused(tmp_path: Path):
    other = tmp_path / "python"
    seed = """$(echo "$3" | sed 's/"seed": 1/"seed": 2/')"""
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -m benchmarks.prefix.worker "{seed}"\n')
    other.chmod(0o755)
    entrants = [Entrant(OURS, sys.executable, OURS, 30), Entrant("other", str(other), OURS, 30)]
    with pytest.raises(BenchmarkError, match="other has other lookups than sagellm: .* NumPy"):
        measure(entrants, Plan(seed=1, block_size=64, num_lookups=16, rounds=1, starts=1))


ARGUMENTS = "--block-size 64 --sequences 30 --lookups 16 --rounds 2 --starts 1 --no-alone".split()


@pytest.mark.slow
def test_the_command_writes_json_and_markdown(tmp_path: Path):
    done = CliRunner().invoke(main, [*ARGUMENTS, "--twin", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "prefix_peers.json").read_text())
    contestants = result["peers"]["64"]
    assert list(contestants) == [OURS, LMDEPLOY, TWIN]
    assert len(contestants[TWIN]["rounds"]["lookup_us"]["lookup"]) == 2
    assert contestants[OURS]["times_ours"]["lookup_us"]["lookup"]["median"] == 1.0
    assert contestants[TWIN]["times_ours"]["lookup_us"]["lookup"]["median"] > 0
    assert (tmp_path / "prefix_peers.md").read_text() == markdown(result)
    for words in (f"| {LMDEPLOY} |", "## Blocks of 64 tokens", result["machine"]["processor"], "30 sequences inserted"):
        assert words in markdown(result)


def test_the_command_fails_where_a_contestant_is_refused(tmp_path: Path):
    python = wrong_python(tmp_path, "Found(0, found.block_ids)")
    done = CliRunner().invoke(main, [*ARGUMENTS, "--no-lmdeploy", "--sglang", python])
    assert done.exit_code == 1, done.output
    assert "| SGLang tree core (Rust) | refused: 16 wrong answers: lookup 0 found 0 tokens" in done.stdout
    (ours,) = [line for line in done.stdout.splitlines() if line.startswith(f"| {OURS} |")]
    assert "refused" not in ours


def test_the_command_tells_misuse(tmp_path: Path):
    done = CliRunner().invoke(main, [*ARGUMENTS, "--sglang", str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "cannot be started" in done.stderr
    done = CliRunner().invoke(main, ["--block-size", "1000", "--no-alone"])
    assert done.exit_code == 2 and "allowed are" in done.stderr


def test_a_native_program_that_fails_is_told(tmp_path: Path):
    workload = PrefixWorkload(**SMALL)
    with pytest.raises(BenchmarkError, match="nowhere cannot be started"):
        run_native(tmp_path / "nowhere", workload, 1)
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\n[ -s "$1" ] && [ "$2" = 3 ] && echo "no memory" >&2; exit 1\n')
    program.chmod(0o755)
    with pytest.raises(BenchmarkError, match="program ended with code 1: no memory"):
        run_native(program, workload, 3)
    program.write_text('#!/bin/sh\necho "{\\"lookup_ns\\": [1.5]}"\n')
    assert run_native(program, workload, 3) == {"lookup_ns": [1.5]}
