"""The figures that the gate must reach, on made-up noise, and the program that measures them on real noise."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import gate_power
from benchmarks.errors import BenchmarkError
from benchmarks.gate_power import Rates, enough_rounds, observe, rates, simulate, wilson
from tests.benchmarks.gate.made_up import make_result, noisy_runs, steady
from tests.sweeps import slow_but


def noisy(sd, rounds=40, round_sd=0.03, names=("base", "control", "head")):
    changes = {name: {} for name in names}
    return make_result(noisy_runs(rounds, sd, np.random.default_rng(5), changes, round_sd))


@pytest.mark.parametrize(("sd", "rounds"), slow_but([(0.02, 5), (0.03, 6), (0.04, 7)], (0.03, 6)))
def test_a_slower_first_token_is_caught_and_identical_code_is_not_blamed(sd, rounds):
    found = rates(observe(noisy(sd)), "control", rounds, 0.10, 300)
    assert found.caught >= 0.95 * 300 and found.failed <= 0.01 * 300
    assert found.undecided <= 0.1 * 300


@pytest.mark.parametrize("design", gate_power.DESIGNS)
def test_noise_beyond_what_the_rounds_resolve_is_neither_caught_nor_blamed(design):
    found = rates(observe(noisy(0.2)), design, 5, 0.10, 60)
    assert found.failed <= 1 and found.undecided >= 50


def test_noise_is_taken_apart():
    noise = observe(noisy(0.02, rounds=200, round_sd=0.05))
    names = [rule.metric for rule in noise.rules]
    first = names.index("ttft_p50_s")
    assert noise.paired_sd("ttft_p50_s") == pytest.approx(0.02, rel=0.15)
    assert noise.shared[:, first].std() == pytest.approx(0.05, rel=0.15)
    assert noise.residual[:, names.index("comm_share")].any() == np.False_
    assert noise.scaled(2).paired_sd("ttft_p50_s") == pytest.approx(2 * noise.paired_sd("ttft_p50_s"))


def test_one_contestant_counts_all_its_noise_as_residual():
    noise = observe(noisy(0.02, rounds=100, names=("head",)))
    assert not noise.shared.any()
    assert noise.paired_sd("ttft_p50_s") == pytest.approx(np.sqrt(0.02**2 + 2 * 0.03**2), rel=0.2)


def test_simulated_runs_have_the_noise_that_was_observed():
    noise, rng = observe(noisy(0.03, rounds=60)), np.random.default_rng(0)
    rule = next(rule for rule in noise.rules if rule.metric == "ttft_p50_s")
    ratios, spreads = [], []
    for _ in range(300):
        values = simulate(noise, "control", 5, 0.10, rng)[rule]
        ratios += np.log(values.head / values.base).tolist()
        spreads += np.log(values.control).tolist()
    assert np.mean(ratios) == pytest.approx(np.log(1.1), abs=0.004)
    assert np.std(ratios) == pytest.approx(noise.paired_sd("ttft_p50_s"), rel=0.1)
    assert np.std(spreads) == pytest.approx(np.hypot(0.03, 0.03 / np.sqrt(2)), rel=0.25)


def test_unpaired_sides_share_no_rounds():
    noise, rng = observe(noisy(0.001, round_sd=0.05)), np.random.default_rng(0)
    (rule,) = (rule for rule in noise.rules if rule.metric == "ttft_p50_s")
    values = simulate(noise, "unpaired", 200, 0.0, rng)[rule]
    assert not values.paired and values.control is None
    assert abs(np.corrcoef(np.log(values.base), np.log(values.head))[0, 1]) < 0.3


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0, 0.0038), (950, 0.9347, 0.9619), (1000, 0.9962, 1)])
def test_intervals_of_rates(count, low, high):
    assert wilson(count, 1000) == pytest.approx((low, high), abs=1e-4)


def test_enough_rounds_are_those_after_which_no_number_fails():
    counts = {3: (80, 0), 4: (96, 0), 5: (94, 0), 6: (97, 1), 7: (99, 0)}
    found = [Rates("paired", rounds, 100, caught, failed, 0) for rounds, (caught, failed) in counts.items()]
    assert enough_rounds(found, "paired") == 6
    assert enough_rounds(found[:3], "paired") is None and enough_rounds(found, "control") is None


def test_results_without_noise_to_learn_from():
    with pytest.raises(BenchmarkError, match="3 rounds have every metric"):
        observe(steady(rounds=3))
    result = steady()
    for run in result.runs:
        del run.metrics["ttft_p50_s"]
    with pytest.raises(BenchmarkError, match="no ttft_p50_s"):
        observe(result)
    result.runs = []
    with pytest.raises(BenchmarkError, match="holds no runs"):
        observe(result)


def run(*arguments):
    return CliRunner().invoke(gate_power.main, [str(argument) for argument in arguments])


def test_command(tmp_path):
    file = tmp_path / "result.json"
    noisy(0.02).write(file)
    common = ("--result", file, "--trials", 20, "--rounds", "6-7")
    done = run(*common)
    assert done.exit_code == 0 and "control: 6 rounds are enough." in done.stdout
    assert done.stdout.count("\n| control | ") == 2 and done.stderr == ""
    printed = json.loads(run(*common, "--design", "paired", "--noise", "0.01,0.04", "--json").stdout)
    assert [(row["noise"], row["rounds"]) for row in printed["rates"]] == [(0.01, 6), (0.01, 7), (0.04, 6), (0.04, 7)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--rounds", "7-3"), "--rounds is"), (("--noise", "much"), "--noise takes"), ((), "cannot read")],
)
def test_command_misused(tmp_path, arguments, told):
    file = tmp_path / "result.json"
    if arguments:
        noisy(0.02).write(file)
    done = run("--result", file, *arguments)
    assert done.exit_code == 2 and done.stderr.startswith("error: ") and told in done.stderr
