"""Tests of the inputs that the gate refuses to judge."""

from pathlib import Path

import pytest

from benchmarks.config import preset
from benchmarks.errors import BenchmarkError
from benchmarks.gate import judge
from benchmarks.gate.inputs import choose
from benchmarks.result import read_result
from tests.benchmarks.gate.made_up import MACHINE, steady

ONE = ("head",)
BASELINES = Path(__file__).parents[3] / "benchmarks" / "baselines"


def refused(match, *arguments, **options):
    with pytest.raises(BenchmarkError, match=match) as caught:
        judge(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "told"), [({"processor": "Other CPU"}, "Other CPU"), ({"cores": 64}, "64 cores")])
def test_a_baseline_from_another_machine(change, told):
    baseline = steady(names=ONE)
    baseline.environment["machine"] = {**MACHINE, **change}
    refused(f"another machine: .*{told}", steady(names=ONE, seed=1), baseline)


@pytest.mark.parametrize("machine", [None, {}, {"cores": 2}, "a laptop"])
def test_a_result_that_does_not_say_where_it_is_from(machine):
    current = steady(names=ONE)
    current.environment["machine"] = machine
    refused("current: the result does not say which machine", current, steady(names=ONE, seed=1))


def test_another_config():
    baseline = steady(names=ONE)
    baseline.config["workload"] = {"num_requests": 40}
    baseline.config["seed"] = 1
    refused("different configs.*seed: 1 and 0; workload", steady(names=ONE, seed=1), baseline)


def test_a_setting_that_is_newer_than_the_baseline_had_its_default():
    baseline, current = steady(names=ONE), steady(names=ONE, seed=1)
    current.config["client_cpu_limit"] = 0.8
    judge(current, baseline)
    current.config["client_cpu_limit"] = 0.7
    refused("different configs.*client_cpu_limit: 0.8 and 0.7", current, baseline)


def test_rounds_and_contestants_may_differ():
    baseline = steady(names=ONE)
    baseline.config["rounds"], baseline.config["contestants"] = 50, [{"name": "other"}]
    assert judge(steady(names=ONE, seed=1), baseline).exit_code == 0


@pytest.mark.parametrize("status", ["failed", "partial"])
@pytest.mark.parametrize("which", ["baseline", "current"])
def test_results_that_are_not_whole(status, which):
    results = {"current": steady(names=ONE, seed=1), "baseline": steady(names=ONE)}
    results[which].status, results[which].reason = status, "the server died"
    refused(rf"{which}: the result is {status} \(the server died\)", results["current"], results["baseline"])


def test_a_result_that_died_before_its_first_run():
    result = steady()
    result.status, result.reason, result.runs = "failed", "the server\ndid not start", []
    refused(r"current: the result is failed \(the server did not start\)", result)


def test_a_failed_run_in_a_whole_result():
    result = steady()
    result.runs[-1].status, result.runs[-1].reason = "failed", "connection lost"
    refused("'head' failed in round 5 of 'serve' .connection lost", result)


def test_a_side_without_valid_runs():
    result = steady()
    for run in result.runs:
        if run.contestant == "head":
            run.status, run.reason = "void", "the client was late"
    refused("'head' has no valid run of 'serve': 6 void .the client was late", result)


def test_a_scenario_that_one_side_did_not_run():
    current = steady(names=ONE, seed=1)
    current.runs += [run.model_copy(update={"scenario": "prefix_index"}) for run in current.runs]
    refused("baseline: 'head' has no valid run of 'prefix_index': none at all", current, steady(names=ONE))


def test_an_unknown_contestant_lists_the_known():
    refused(
        "current: no contestant 'tail'; the result has base, head: choose with --current-name",
        steady(),
        head_name="tail",
    )
    refused("no contestant 'base'; the result has a, b", steady(names=("a", "b")))


def test_a_contestant_against_itself():
    refused("both sides are the runs of 'head'", steady(names=ONE))
    refused("both sides are the runs of 'head'", steady(names=ONE), steady(names=ONE))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number(value):
    result = steady()
    result.runs[0].metrics["mfu"] = value
    refused("mfu of 'base' is (nan|inf) in round 0", result)


def test_a_start_is_not_judged_against_a_round():
    baseline, current = steady(names=ONE), steady(names=ONE, seed=1)
    for run in baseline.runs:
        run.launch = run.round // 2
    refused("baseline were started 3 times, those of current 1", current, baseline)
    for run in current.runs:
        run.launch = run.round // 3
    assert judge(current, baseline).num_launches == 2


@pytest.mark.parametrize("file", sorted(BASELINES.glob("*.json")), ids=lambda file: file.stem)
def test_committed_baselines_are_of_todays_config(file):
    """Or they must be renewed: nothing could be judged against them."""
    baseline = read_result(file)
    today = preset(baseline.name).model_dump(mode="json")
    current = baseline.model_copy(update={"config": today})
    sides = choose(current.model_copy(update={"started": "later"}), baseline, None, None)
    assert not sides.paired and all(run.status == "valid" for run in baseline.runs)
    assert not any(commit["changed"] for commit in baseline.environment["commits"].values())
