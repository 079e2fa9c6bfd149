"""Tests of plots: they are written for the data there is, and for nothing else. Their look is left to a person's eyes."""

from pathlib import Path

import pytest

from benchmarks.load.samples import Samples, read_samples
from benchmarks.report.plots import write_plots
from benchmarks.result import Result, Run

PNG = b"\x89PNG\r\n\x1a\n"


def names(files: list[Path]) -> set[str]:
    assert all(file.read_bytes().startswith(PNG) for file in files)
    return {file.stem for file in files}


@pytest.mark.slow
def test_all_kinds(outcome: tuple[Result, Path], tmp_path: Path):
    result, folder = outcome

    def samples_of(run: Run) -> Samples | None:
        return read_samples(folder / run.samples) if run.samples else None

    files = write_plots(result, tmp_path, samples_of, folder)
    assert {file.parent for file in files} == {tmp_path}
    assert names(files) == {
        *(f"{kind}-serve-{users}" for kind in ("latency", "hit-rate", "ratio") for users in (4, 16)),
        "ratio-lookup",
        "throughput-serve",
    }


def test_lost_samples_leave_their_plots_out(outcome: tuple[Result, Path], tmp_path: Path):
    files = write_plots(outcome[0], tmp_path, lambda run: None)
    assert names(files) == {"ratio-serve-4", "ratio-serve-16", "ratio-lookup", "throughput-serve"}


@pytest.mark.parametrize("status", ["void", "failed"])
def test_runs_that_do_not_count_are_not_drawn(outcome: tuple[Result, Path], tmp_path: Path, status: str):
    result, folder = outcome
    runs = [run.model_copy(update={"status": status}) for run in result.runs]
    assert write_plots(result.model_copy(update={"runs": runs}), tmp_path, lambda run: None, folder) == []


def test_one_contestant_at_one_concurrency(outcome: tuple[Result, Path], tmp_path: Path):
    result, folder = outcome
    runs = [run for run in result.runs if (run.contestant, run.scenario) == ("head", "serve@4")]
    alone = result.model_copy(update={"runs": runs})
    files = write_plots(alone, tmp_path, lambda run: read_samples(folder / run.samples), folder)
    assert names(files) == {"latency-serve-4", "hit-rate-serve-4"}
