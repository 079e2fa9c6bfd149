"""The engine scenario on a real server with a real client: what makes a run count, and what voids it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from benchmarks.config import BenchmarkConfig, make_config
from benchmarks.errors import BenchmarkError, ServerDied
from benchmarks.load.samples import read_samples
from benchmarks.metrics.definitions import DEFINITIONS
from benchmarks.metrics.guesses import place_definitions
from benchmarks.result import Run, read_result
from benchmarks.runner import main
from benchmarks.scenarios import serve
from benchmarks.scenarios.serve import ServeScenario, Subject
from benchmarks.server import Server

pytestmark = pytest.mark.slow  # `test_scenarios.py` and `load/` have what needs no server

BLOCK, BLOCKS, OUTPUT = 16, 128, 60  # tokens enough for several chunks also where the machine is busy
# A token at a time: a round in which every answer came in one chunk would not count.
SERVER = {
    "device": "cpu", "threads": 1, "block_size": BLOCK, "kv_blocks": BLOCKS, "max_batch_size": 4, "decode_round": 1,
    "speculative": "ngram", "speculative_options": {"lookahead": 2},
}  # fmt: skip
WORKLOAD = {
    "arrivals": {"kind": "closed", "concurrency": 1},
    "num_requests": 5,
    "prompt_tokens": {"kind": "constant", "value": 80},
    "output_tokens": {"kind": "constant", "value": OUTPUT},
    "reuse": 0.6,  # 48 tokens, three blocks
    "warmup_requests": 0,
}


@pytest.fixture(scope="module")
def subject(model_folder: Callable[[str], Path]) -> Iterator[Subject]:
    """One server for all tests here. Each test has rounds of its own, since a round's prompts are new only once."""
    model = model_folder("llama")
    config = make_config({"name": "test", "server": SERVER | {"model": str(model)}, "workload": WORKLOAD})
    server = Server(config.sage_config(config.contestants[0]))
    try:
        yield Subject(config.contestants[0], server, server.ready(), model, BLOCK, 1, 1e12)
    finally:
        server.close()


@pytest.fixture
def run(subject: Subject, tmp_path: Path) -> Callable[..., Run]:
    """`run(round, name=..., workload keys ..., config={...})`. However late the client is on a busy machine, it is fine
    unless the test says otherwise."""
    (tmp_path / "samples").mkdir()

    def once(number: int, name: str = "serve", config: dict[str, Any] | None = None, **workload: Any) -> Run:
        whole = scenario_config(subject.model, config or {}, workload)
        scenario = ServeScenario(whole, whole.workload, name, tmp_path / "samples")
        return scenario.run(subject, number, lambda done, of: None)

    return once


def scenario_config(model: Path, config: dict[str, Any], workload: dict[str, Any]) -> BenchmarkConfig:
    values = {"name": "test", "client_lag_limit": 1e6, "client_cpu_limit": 1e6, "price": {"per_device_hour": 2.0}} | config
    return make_config(values | {"server": SERVER | {"model": str(model)}, "workload": WORKLOAD | workload})


def test_a_cold_round_counts_and_says_everything(run: Callable[..., Run], tmp_path: Path):
    result = run(0)
    assert (result.status, result.reason) == ("valid", "")
    assert (result.contestant, result.scenario, result.round, result.seed) == ("head", "serve", 0, 0)
    assert not result.metrics.keys() & result.absent.keys()
    by_place = place_definitions(result.metrics)
    assert result.metrics.keys() | result.absent.keys() == DEFINITIONS.keys() | by_place.keys()
    assert result.absent.keys() == {"kv_hit_rate_retries"}
    assert result.metrics["failed_requests"] == result.metrics["comm_share"] == 0
    assert 0 < result.metrics["mfu"] < 1
    decoded, per_step = 5 * (OUTPUT - 1), result.metrics["spec_tokens_per_step"]
    assert 1 <= per_step <= 1 + 2 and decoded / per_step == pytest.approx(round(decoded / per_step)), "steps are whole"
    assert 0 <= result.metrics["spec_acceptance"] <= 1 and 0 <= result.metrics["spec_mean_accepted"] <= 2
    assert list(by_place) == ["spec_acceptance_at.1", "spec_acceptance_at.2"]
    first, second = (result.metrics[name] for name in by_place)
    assert 1 >= first >= result.metrics["spec_acceptance"] >= second >= 0
    assert 0 < result.metrics["ttft_p50_s"] < result.metrics["e2e_p50_s"]

    samples = read_samples(tmp_path / result.samples)
    assert samples.ok.all() and not any(samples.errors)
    assert samples.prompt_tokens.tolist() == [80] * 5 and samples.output_tokens.tolist() == [OUTPUT] * 5
    assert samples.chunk_tokens.sum() == 5 * OUTPUT
    with np.load(tmp_path / "samples" / "head-serve-0-hits.npz") as hits:  # from nothing to everything, however short
        assert (hits["time_s"][0], hits["query_tokens"][0], hits["hit_tokens"][0]) == (0, 0, 0)
        assert (hits["query_tokens"][-1], hits["hit_tokens"][-1]) == (5 * 80, 4 * 48)

    # One user: each prompt but the first finds the three blocks that all share.
    assert result.cache == {"hit_tokens": 4 * 48, "cold_limit_tokens": 4 * 48, "warm_limit_tokens": 5 * 64}
    assert result.metrics["kv_hit_rate_tokens"] == 4 * 48 / (5 * 80)
    assert result.metrics["kv_hit_rate_blocks"] == 4 * 3 / (5 * 5)


def test_a_mixed_round_is_told_apart(run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A target that every request meets, and one that none can, for the same server."""
    plans, drive = [], serve._drive
    monkeypatch.setattr(serve, "_drive", lambda plan, *rest: (plans.append(plan), drive(plan, *rest))[1])
    chat, document = (
        {"name": name, "prompt_tokens": {"kind": "constant", "value": size}, "output_tokens": WORKLOAD["output_tokens"]}
        for name, size in (("chat", 32), ("document", 200))
    )
    classes = [
        chat | {"share": 3, "service": {"priority": -5, "tenant": "chat", "ttft_slo_ms": 3_600_000}},
        document | {"service": {"ttft_slo_ms": 0.001}},
    ]
    patient = {"slo": {"ttft_s": 3600, "tpot_s": 3600}}
    lengths = {"prompt_tokens": None, "output_tokens": None, "reuse": 0.0}
    result = run(5, config=patient, classes=classes, num_requests=8, warmup_requests=2, **lengths)
    assert (result.status, result.reason) == ("valid", "")
    warm_up, plan = [[request.service for request in plan.requests] for plan in plans]
    assert warm_up == [None, None]
    assert [service.priority for service in plan] == [-5 if len(r.prompt_ids) == 32 else 0 for r in plans[1].requests]
    samples = read_samples(tmp_path / result.samples)
    assert sorted(samples.prompt_tokens.tolist()) == [32] * 6 + [200] * 2
    metrics = result.metrics
    assert metrics["chat.requests_per_s"] == pytest.approx(3 * metrics["document.requests_per_s"])
    assert metrics["chat.goodput_rps"] == metrics["chat.requests_per_s"] > 0
    assert metrics["document.goodput_rps"] == 0
    assert metrics["goodput_rps"] == pytest.approx(metrics["chat.goodput_rps"])


def test_the_same_round_again_is_contaminated(run: Callable[..., Run]):
    assert run(3).status == "valid"
    again = run(3)
    assert again.status == "void"
    assert "contaminated" in again.reason and "320 tokens" in again.reason and "192" in again.reason


def test_the_same_round_of_another_seed_is_not_contaminated(run: Callable[..., Run]):
    other = run(0, config={"seed": 1}, reuse=0.0)
    assert (other.status, other.reason, other.seed) == ("valid", "", 1000)
    assert other.cache["hit_tokens"] == other.cache["cold_limit_tokens"] == 0


def test_a_warm_round_finds_its_own_prompts(run: Callable[..., Run]):
    result = run(6, cache="warm", reuse=0.0)
    assert (result.status, result.reason) == ("valid", "")
    assert result.cache == {"hit_tokens": 5 * 64, "cold_limit_tokens": 0, "warm_limit_tokens": 5 * 64}


def test_a_pool_that_is_too_small_is_not_warm(run: Callable[..., Run]):
    lengths = {"kind": "constant", "value": 3 * BLOCK * BLOCKS // 12}  # 12 of them are three times the pool
    result = run(7, cache="warm", reuse=0.0, num_requests=12, prompt_tokens=lengths)
    assert result.status == "void"
    assert "the KV pool is too small" in result.reason
    assert result.cache["hit_tokens"] < 0.9 * result.cache["warm_limit_tokens"]


@pytest.mark.parametrize(
    ("number", "arrivals", "of"),
    [
        (8, WORKLOAD["arrivals"], "the time to the first token"),
        (9, {"kind": "poisson", "rate": 50}, "the gap between sends"),
    ],
    ids=["closed", "poisson"],
)
def test_a_late_client_voids_the_run(run: Callable[..., Run], number: int, arrivals: dict[str, Any], of: str):
    result = run(number, config={"client_lag_limit": 1e-9}, arrivals=arrivals)
    assert result.status == "void"
    assert result.reason.startswith("the client was late by") and of in result.reason
    assert result.metrics["failed_requests"] == 0


def test_a_busy_client_voids_the_run(run: Callable[..., Run]):
    result = run(16, config={"client_cpu_limit": 1e-9})
    assert result.status == "void" and result.reason.startswith("the client used ")
    assert result.metrics["failed_requests"] == 0


def test_poisson_arrivals_do_not_wait(run: Callable[..., Run], tmp_path: Path):
    result = run(10, arrivals={"kind": "poisson", "rate": 40})
    assert result.status == "valid", result.reason
    samples = read_samples(tmp_path / result.samples)
    assert samples.scheduled_s[0] == 0 and (np.diff(samples.scheduled_s) > 0).all()
    assert (samples.sent_s >= samples.scheduled_s).all()
    assert result.client.keys() == {"lag_mean_s", "lag_p99_s", "lag_share", "cpu_share"}
    assert result.cache["hit_tokens"] <= result.cache["cold_limit_tokens"]


@pytest.mark.parametrize(("number", "endpoint"), [(11, "completions"), (12, "chat")])
def test_text_endpoints(run: Callable[..., Run], tmp_path: Path, number: int, endpoint: str):
    result = run(number, endpoint=endpoint)
    assert result.status == "valid", result.reason
    again = run(number, endpoint=endpoint, name="again")
    assert again.status == "void" and "contaminated" in again.reason
    samples = read_samples(tmp_path / result.samples)
    assert samples.ok.all() and samples.output_tokens.tolist() == [OUTPUT] * 5
    assert (samples.prompt_tokens > 0).all()
    assert result.metrics.keys() | result.absent.keys() == DEFINITIONS.keys() | place_definitions(result.metrics).keys()


def test_requests_that_warm_up_leave_a_cold_cache(run: Callable[..., Run]):
    result = run(15, warmup_requests=3)
    assert result.status == "valid", result.reason
    assert result.cache["hit_tokens"] == result.cache["cold_limit_tokens"] == 4 * 48


def test_requests_longer_than_the_context_are_refused(run: Callable[..., Run], subject: Subject, tmp_path: Path):
    context = subject.facts["context_length"]
    with pytest.raises(BenchmarkError, match=f"take {context + 1} tokens; the server's context has {context}"):
        run(14, prompt_tokens={"kind": "constant", "value": context + 1 - OUTPUT}, reuse=0.0)
    assert not list((tmp_path / "samples").iterdir())


class UpAlready:
    """The server of these tests in the place of one that a runner would start, and end."""

    num_started = num_closed = 0

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        UpAlready.num_started += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject.server, name)

    def ready(self) -> dict[str, Any]:
        return self._subject.facts

    def close(self) -> None:
        UpAlready.num_closed += 1


@pytest.fixture
def benchmark(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`benchmark(seed=..., workload keys ...)`: the command line on that server, --out tmp_path/out."""
    monkeypatch.setattr("benchmarks.runner.Server", lambda config, checkout: UpAlready(subject))

    def once(seed: int, config: dict[str, Any] | None = None, **workload: Any) -> Result:
        values = {"launches": 2, "rounds": 1, "seed": seed, "peak_tflops": 1.0} | (config or {})
        config = scenario_config(subject.model, values, workload)
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        return CliRunner().invoke(main, ["--config", str(file), "--out", str(tmp_path / "out")])

    return once


def test_a_benchmark_that_is_complete(benchmark: Callable[..., Result], tmp_path: Path):
    before = UpAlready.num_started
    done = benchmark(seed=2)
    assert done.exit_code == 0, done.output
    assert UpAlready.num_started == UpAlready.num_closed == before + 2, "each launch has a server of its own"
    result = read_result(tmp_path / "out" / "result.json")
    assert (result.status, result.reason) == ("complete", "")
    runs = [(run.launch, run.round, run.seed, run.status) for run in result.runs]
    assert runs == [(0, 0, 2000, "valid"), (1, 1, 2001, "valid")]
    assert done.stdout == (tmp_path / "out" / "report.md").read_text() + "\n"


    (tmp_path / "out").rename(tmp_path / "before")
    assert benchmark(seed=2).exit_code == 1, "no run is valid: all prompts are in the server's cache"
    result = read_result(tmp_path / "out" / "result.json")
    assert (result.status, [run.status for run in result.runs]) == ("complete", ["void", "void"])


def test_contestants_take_turns_and_are_asked_the_same(benchmark: Callable[..., Result], tmp_path: Path):
    """The one server that both share has the prompts of the first in its cache, so the second's runs do not count."""
    sides = {"launches": 1, "rounds": 2, "contestants": [{"name": "base"}, {"name": "head"}]}
    lengths = {"kind": "uniform", "low": 40, "high": 90}
    assert benchmark(seed=5, config=sides, num_requests=3, prompt_tokens=lengths).exit_code == 0
    runs = read_result(tmp_path / "out" / "result.json").runs
    assert [(run.contestant, run.round, run.seed, run.status) for run in runs] == [
        ("base", 0, 5000, "valid"), ("head", 0, 5000, "void"), ("head", 1, 5001, "valid"), ("base", 1, 5001, "void"),
    ]  # fmt: skip
    asked = [read_samples(tmp_path / "out" / run.samples).prompt_tokens.tolist() for run in runs]
    assert asked[0] == asked[1] != asked[2] == asked[3]


def test_misuse_that_only_a_server_shows(benchmark: Callable[..., Result], tmp_path: Path):
    """More tokens than the model's own context, of which the config says nothing."""
    done = benchmark(seed=4, prompt_tokens={"kind": "constant", "value": 4000})
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith(f"error: a prompt and its answer take {4000 + OUTPUT} tokens; the server's context has ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_server_that_has_ended_is_no_run(model_folder: Callable[[str], Path], tmp_path: Path):
    """It ends at once, because its model is no folder."""
    config = scenario_config(tmp_path / "nothing", {}, {})
    server = Server(config.sage_config(config.contestants[0]))
    try:
        with pytest.raises(ServerDied, match="did not become ready.*nothing: there is no such folder or file"):
            server.ready()
        facts = {"model": "llama", "context_length": 2048}
        subject = Subject(config.contestants[0], server, facts, model_folder("llama"), BLOCK, 1, 1e12)
        with pytest.raises(ServerDied, match="the server ended with code"):
            ServeScenario(config, config.workload, "serve", tmp_path).run(subject, 0, lambda done, of: None)
    finally:
        server.close()
