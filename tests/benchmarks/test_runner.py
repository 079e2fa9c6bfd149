"""Whole benchmarks: real servers side by side, one that dies, and a user who has seen enough."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
import pytest
import yaml
from click.testing import CliRunner

from benchmarks.load.samples import read_samples
from benchmarks.metrics.definitions import DEFINITIONS
from benchmarks.processes import wait_until
from benchmarks.result import Result, Run, read_result
from benchmarks.runner import main

pytestmark = pytest.mark.timeout(240)  # a server that hangs is ended by the fixtures
DEADLINE_S = 90.0
MARK = "SAGELLM_TESTS_MARK"
SERVER = {
    "device": "cpu", "threads": 1, "block_size": 16, "kv_blocks": 128, "max_batch_size": 4, "decode_round": 1,
}  # fmt: skip
WORKLOAD = {
    "arrivals": {"kind": "closed", "concurrency": 1},
    "num_requests": 3,
    "prompt_tokens": {"kind": "uniform", "low": 40, "high": 90},
    "output_tokens": {"kind": "constant", "value": 100},  # so many take longer than a busy machine keeps the client waiting
    "reuse": 0.5,
    "warmup_requests": 1,
}


@pytest.fixture(scope="module")
def config(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`config(key=...)`: the file of a small benchmark on a tiny model. However late the client is, it is fine."""

    def write(**changes: Any) -> Path:
        values = {"name": "test", "client_lag_limit": 1e6, "client_cpu_limit": 1e6, "peak_tflops": 1.0, "seed": 7} | changes
        values["server"] = SERVER | {"model": str(model_folder("llama"))}
        values["workload"] = WORKLOAD
        file = tmp_path_factory.mktemp("config") / "config.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    return write


@contextlib.contextmanager
def family() -> Iterator[Callable[[], list[psutil.Process]]]:
    """Inside, a function tells what was started, by however many parents, and is still there; nothing is at the end."""
    mark = uuid4().hex

    def marked() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == mark]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        try:
            yield lambda: psutil.wait_procs(marked(), timeout=5)[1]
        finally:
            for process in marked():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture
def left_behind() -> Iterator[Callable[[], list[psutil.Process]]]:
    with family() as processes:
        yield processes


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes started here take SIGINT as from a terminal, also where this one was told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Comparison(NamedTuple):
    out: Path
    code: int
    stdout: str
    left_behind: list[psutil.Process]

    @property
    def result(self) -> Result:
        return read_result(self.out / "result.json")


def dies_at(number: int) -> dict[str, Any]:
    """The engine is killed at that request. A round is three requests, the first round has one more to warm up."""
    return {"name": "tests.benchmarks.plugins:Dies", "options": {"at": number}}


def compare(sides: list[dict[str, Any]], config: Callable[..., Path], out: Path) -> Comparison:
    with family() as left_behind:
        done = CliRunner().invoke(main, ["--config", str(config(contestants=sides, rounds=4)), "--out", str(out)])
        assert isinstance(done.exception, SystemExit), done.output
        return Comparison(out, done.exit_code, done.stdout, left_behind())


@pytest.fixture(scope="module")
def comparison(config: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two contestants, the second on two ranks, which wait for each other. It dies in the third round, which it begins."""
    late = {"name": "tests.benchmarks.plugins:Straggles", "options": {"late_s": 0.01}}
    sides = [{"name": "one"}, {"name": "two", "server": {"tensor_parallel": 2, "plugins": [dies_at(4 + 3 + 2), late]}}]
    return compare(sides, config, tmp_path_factory.mktemp("comparison") / "out")


def assert_whole(out: Path, result: Result) -> None:
    """Everything that a result speaks of is there and can be read."""
    for run in result.runs:
        samples = read_samples(out / run.samples)
        assert samples.ok.all(), run
        told = run.metrics.keys() | run.absent.keys()
        assert told >= DEFINITIONS.keys() and all(name.startswith("comm.") for name in told - DEFINITIONS.keys())
        assert run.metrics.keys() <= result.definitions.keys()
    assert not list(out.rglob("*.tmp*"))
    assert result.name in (out / "report.md").read_text()
    plots = list((out / "plots").iterdir())
    assert plots and all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert result.environment["machine"]["cores"] >= 1 and result.environment["machine"]["processor"]
    assert {"lmdeploy", "torch", "sagellm"} <= result.environment["versions"].keys()
    assert result.environment["patches"]["state"]
    sides = [side["name"] for side in result.config["contestants"]]
    assert list(result.environment["commits"]) == list(result.environment["peak"]) == sides
    for commit in result.environment["commits"].values():
        assert len(commit["commit"]) == 40 and commit["changed"] in (True, False)


def assert_died(comparison: Comparison) -> None:
    assert comparison.code == 1
    assert not comparison.left_behind
    result = comparison.result
    assert (result.name, result.status) == ("test", "failed")
    assert result.reason.startswith(("the server ended with code ", "no answer from "))
    assert f"**failed**: {result.reason[:20]}" in comparison.stdout
    assert comparison.stdout == (comparison.out / "report.md").read_text() + "\n"
    assert_whole(comparison.out, result)


@pytest.mark.slow
def test_a_server_that_dies_ends_the_benchmark(config: Callable[..., Path], tmp_path: Path):
    comparison = compare([{"name": "one", "server": {"plugins": [dies_at(4 + 2)]}}], config, tmp_path / "out")
    assert_died(comparison)
    assert [(run.round, run.status) for run in comparison.result.runs] == [(0, "valid")]
    lines = (comparison.out / "result.csv").read_text().splitlines()
    assert len(lines) == 1 + len(comparison.result.runs[0].metrics) and lines[1].startswith("one,serve,0,0,7000,valid,")


@pytest.mark.slow
def test_a_contestant_that_dies_ends_the_benchmark(comparison: Comparison):
    assert_died(comparison)


@pytest.mark.slow
def test_contestants_take_turns(comparison: Comparison):
    rows = [(run.contestant, run.scenario, run.round, run.status) for run in comparison.result.runs]
    assert rows == [
        ("one", "serve", 0, "valid"), ("two", "serve", 0, "valid"),
        ("two", "serve", 1, "valid"), ("one", "serve", 1, "valid"),
    ]  # fmt: skip


@pytest.mark.slow
def test_contestants_are_asked_the_same(comparison: Comparison):
    asked = {(run.contestant, run.round): (run.seed, lengths(comparison.out, run)) for run in comparison.result.runs}
    assert [asked["one", number][0] for number in range(2)] == [7000, 7001]
    assert asked["one", 0] == asked["two", 0] and asked["one", 1] == asked["two", 1]
    assert asked["one", 0][1] != asked["one", 1][1]


def lengths(out: Path, run: Run) -> list[int]:
    return read_samples(out / run.samples).prompt_tokens.tolist()


@pytest.mark.slow
def test_ranks_wait_for_each_other(comparison: Comparison):
    assert comparison.result.of("one", "serve", "comm_share") == {0: 0.0, 1: 0.0}
    shares = comparison.result.of("two", "serve", "comm_share")
    assert shares.keys() == {0, 1} and all(0.5 < share < 1 for share in shares.values()), "of both rounds, to their ends"


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("stop", "rounds", "launches"), [(signal.SIGINT, 500, 1), (signal.SIGTERM, 1, 500)],
)
def test_a_user_who_has_seen_enough(
    stop: int, rounds: int, launches: int, config: Callable[..., Path], left_behind: Callable, tmp_path: Path
):
    """In one case, a user stops a sweep. Its points run on one server, one after the other, each with prompts that are new to
    the server. In the other case, a user stops launches while the server of the second one starts."""
    sides, enough = [{"name": "head"}], 4 if launches == 1 else 2
    file, out = config(rounds=rounds, launches=launches, sweep=[1, 2], contestants=sides), tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.runner", "--config", file, "--out", out, "--json"]
    with (tmp_path / "stdout").open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
        runner = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
    try:

        def has_enough() -> bool:
            assert runner.poll() is None, (tmp_path / "stderr").read_text()
            return (out / "result.json").exists() and len(read_result(out / "result.json").runs) >= enough

        wait_until("enough runs", has_enough, DEADLINE_S)
        assert read_result(out / "result.json").status == "partial"
        os.kill(runner.pid, stop)
        code = runner.wait(DEADLINE_S)
    finally:
        runner.kill()
        runner.wait()
    assert not left_behind()
    assert (code, (tmp_path / "stderr").read_text()) == (1, ""), "no traceback of whatever was interrupted"

    result = read_result(out / "result.json")
    assert (result.status, result.reason) == ("partial", "stopped by its user")
    assert enough <= len(result.runs) < 1000
    for index, run in enumerate(result.runs):
        assert (run.round, run.scenario) == (index // 2, ("serve@1", "serve@2")[index % 2])
        assert run.launch == run.round // rounds
        assert (run.status, run.reason) == ("valid", "")
    assert_whole(out, result)
    assert Result.model_validate_json((tmp_path / "stdout").read_text()) == result
