"""How often the gate catches a slower first token and how often it blames identical code, on the noise of a real result.

    python -m benchmarks.gate_power --result FILE [--regression 0.10] [--trials 1000] [--rounds 3-15] [--noise 0.01,0.02]

Noise model: a value is its contestant's level, times what its round did to all contestants, times a residual. Both effects
are drawn from those observed, all metrics of a run together, so that what moves together still does. Half of each draw's
variance is normal: a dozen observed effects, drawn as they are, would have no tails.
"""

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.gate.base import Rule, Verdict
from benchmarks.gate.judge import Series, judge_series, noise_check
from benchmarks.gate.rules import DEFAULT_RULES, Rules, load_rules
from benchmarks.output import json_text
from benchmarks.result import Result, read_result

# control: base, control and head interleaved, which --ab runs; paired: without a control; unpaired: two files.
DESIGNS = ("control", "paired", "unpaired")
TARGET_CAUGHT, TARGET_FAILED = 0.95, 0.01
REFERENCE = "ttft_p50_s"


class Noise(NamedTuple):
    """Noise of runs. Effects are on the scale of comparison: natural logarithms where `ratio` holds.

    level: float[num_rules], of the first contestant; ratio: bool[num_rules]; shared: float[num_rounds, num_rules], by
    round; residual: float[num_runs, num_rules]; unit: what counts as a round here, a round or a launch of several.
    """

    rules: Rules
    level: np.ndarray
    ratio: np.ndarray
    shared: np.ndarray
    residual: np.ndarray
    unit: str = "round"

    def paired_sd(self, metric: str) -> float:
        """Standard deviation of head / base (its logarithm) in one round; two residuals differ by sqrt(2) of one."""
        index = [rule.metric for rule in self.rules].index(metric)
        return float(math.sqrt(2 * np.mean(self.residual[:, index] ** 2)))

    def scaled(self, factor: float) -> "Noise":
        return self._replace(shared=self.shared * factor, residual=self.residual * factor)


class Rates(NamedTuple):
    """Counts of `trials` benchmarks with the planted regression and of as many with identical code."""

    design: str
    rounds: int
    trials: int
    caught: int
    failed: int
    undecided: int

    @property
    def reached(self) -> bool:
        return self.caught >= TARGET_CAUGHT * self.trials and self.failed <= TARGET_FAILED * self.trials


def observe(result: Result, rules: Rules = DEFAULT_RULES) -> Noise:
    """Takes a result's runs apart. Raises BenchmarkError when there are too few of them.

    One contestant alone cannot tell its rounds from its residuals: then all of it counts as residual, which makes the
    paired designs look worse than they are.
    """
    names = result.contestants()
    if not names:
        raise BenchmarkError(f"the result is {result.status} and holds no runs")
    rules = tuple(rule for rule in rules if rule.gated and _everywhere(result, rule, names))
    if REFERENCE not in [rule.metric for rule in rules]:
        raise BenchmarkError(f"the result has no {REFERENCE} for every contestant; give one of an engine scenario")
    tables = [result.independent(names, rule.scenario, rule.metric) for rule in rules]
    rounds = min(map(len, tables))
    if rounds < 4 or rounds < max(map(len, tables)):
        raise BenchmarkError(f"{rounds} rounds have every metric of every contestant; at least 4 are needed")
    cube = np.stack(tables, axis=2)
    ratio = np.array([rule.scale == "ratio" for rule in rules]) & (cube > 0).all(axis=(0, 1))
    cube = np.where(ratio, np.log(np.where(ratio, cube, 1.0)), cube)
    level = cube[:, 0].mean(axis=0)
    cube = cube - cube.mean(axis=0)
    if len(names) == 1:
        shared, kept = np.zeros((1, len(rules))), cube
    else:
        shared = cube.mean(axis=1)
        kept = cube - shared[:, None]
        shared = _unshrink(shared, rounds, rounds - 1)
    freedom = (rounds - 1) * max(1, len(names) - 1)
    residual = _unshrink(kept.reshape(-1, len(rules)), rounds * len(names), freedom)
    launches = {run.launch for run in result.runs if run.scenario == rules[0].scenario}
    return Noise(rules, level, ratio, shared, residual, "launch" if len(launches) > 1 else "round")


def simulate(noise: Noise, design: str, rounds: int, regression: float, rng: np.random.Generator) -> dict[Rule, Series]:
    """One benchmark. `regression` multiplies the head's TTFT by 1 + itself."""
    num_sides = 3 if design == "control" else 2
    shared = _draw(noise.shared, (rounds, 1), rng)
    if design == "unpaired":
        shared = np.concatenate([shared, _draw(noise.shared, (rounds, 1), rng)], axis=1)
    table = noise.level + shared + _draw(noise.residual, (rounds, num_sides), rng)
    values = np.where(noise.ratio, np.exp(np.where(noise.ratio, table, 0.0)), table)
    slower = np.array([1 + regression if rule.metric.startswith("ttft") else 1.0 for rule in noise.rules])
    values[:, -1] *= slower
    paired = design != "unpaired"
    control = values[:, 1] if design == "control" else None
    return {
        rule: Series(values[:, 0, i], values[:, -1, i], None if control is None else control[:, i], paired)
        for i, rule in enumerate(noise.rules)
    }


def gate(series: dict[Rule, Series]) -> Verdict:
    """The verdict of the whole gate, its A/A check included."""
    if any(finding.problem for finding in noise_check(series)):
        return Verdict.CANNOT_TELL
    verdicts = {metric.verdict for metric in judge_series(series).values()}
    return next((each for each in (Verdict.REGRESSION, Verdict.CANNOT_TELL) if each in verdicts), Verdict.PASS)


def rates(noise: Noise, design: str, rounds: int, regression: float, trials: int, seed: int = 0) -> Rates:
    rng = np.random.default_rng((seed, DESIGNS.index(design), rounds))
    planted = [gate(simulate(noise, design, rounds, regression, rng)) for _ in range(trials)]
    identical = [gate(simulate(noise, design, rounds, 0.0, rng)) for _ in range(trials)]
    caught, failed = planted.count(Verdict.REGRESSION), identical.count(Verdict.REGRESSION)
    return Rates(design, rounds, trials, caught, failed, identical.count(Verdict.CANNOT_TELL))


def enough_rounds(found: list[Rates], design: str) -> int | None:
    """The fewest rounds from which on both targets hold; None when even the most do not reach them."""
    enough = None
    for each in sorted((each for each in found if each.design == design), key=lambda each: -each.rounds):
        if not each.reached:
            break
        enough = each.rounds
    return enough


def wilson(count: int, trials: int) -> tuple[float, float]:
    """95% interval of a rate. Source: Wilson, 1927."""
    z, rate = 1.959964, count / trials
    middle = rate + z * z / (2 * trials)
    reach = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def _everywhere(result: Result, rule: Rule, names: list[str]) -> bool:
    return all(result.of(name, rule.scenario, rule.metric) for name in names)


def _unshrink(effects: np.ndarray, count: int, freedom: int) -> np.ndarray:
    """Effects around fitted means are smaller than those they estimate."""
    return effects * math.sqrt(count / freedom)


def _draw(effects: np.ndarray, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """float[*shape, num_rules] with the covariance of `effects`, float[num_effects, num_rules]."""
    observed = effects[rng.integers(0, len(effects), shape)]
    # Normal weights over all effects have their covariance without a decomposition that a constant metric would break.
    normal = rng.normal(size=(*shape, len(effects))) @ effects / math.sqrt(len(effects))
    return (observed + normal) / math.sqrt(2)


@click.command()
@click.option(
    "--result", "file", type=click.Path(path_type=Path), required=True,
    help="Benchmark result with several rounds, whose noise is used.",
)
@click.option(
    "--regression", type=click.FloatRange(min=0, min_open=True), default=0.10, show_default=True,
    help="Planted slowdown of TTFT, as a share.",
)
@click.option(
    "--trials", type=click.IntRange(min=1), default=1000, show_default=True,
    help="Simulated benchmarks of each cell.",
)
@click.option(
    "--rounds", "span", default="3-15", show_default=True,
    help="Rounds, or launches if the result has several: a number, or first-last.",
)
@click.option(
    "--design", "designs", type=click.Choice(DESIGNS), multiple=True,
    help="Design to simulate; default: all.",
)
@click.option("--noise", "levels", help=f"Standard deviations to scale the noise of {REFERENCE} to, comma-separated.")
@click.option(
    "--rules", "rules_file", type=click.Path(path_type=Path),
    help="YAML file that changes thresholds or leaves metrics ungated.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the workload.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(
    file: Path, regression: float, trials: int, span: str, designs: tuple[str, ...], levels: str | None,
    rules_file: Path | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Detection and false alarms of the gate, by design and number of rounds."""
    try:
        noise = observe(read_result(file), load_rules(rules_file) if rules_file else DEFAULT_RULES)
        observed = noise.paired_sd(REFERENCE)
        wanted = [_number(part) for part in levels.split(",")] if levels else [observed]
        if wanted != [observed] and observed == 0:
            raise BenchmarkError(f"{REFERENCE} does not vary in {file}; there is no noise to scale")
        plan = [(sd, design, rounds) for sd in wanted for design in designs or DESIGNS for rounds in _span(span)]
    except BenchmarkError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    found: dict[float, list[Rates]] = {sd: [] for sd in wanted}
    terminal = sys.stderr.isatty()
    with click.progressbar(plan, label="simulating", file=sys.stderr) if terminal else nullcontext(plan) as steps:
        for sd, design, rounds in steps:
            scaled = noise if sd == observed else noise.scaled(sd / observed)
            found[sd].append(rates(scaled, design, rounds, regression, trials, seed))
    if as_json:
        rows = [{"noise": sd, **each._asdict()} for sd, several in found.items() for each in several]
        click.echo(json_text({"result": str(file), "regression": regression, "rates": rows}), nl=False)
    else:
        click.echo("\n\n".join(_table(noise.unit, sd, several, regression) for sd, several in found.items()))


def _table(unit: str, sd: float, found: list[Rates], regression: float) -> str:
    plural = {"round": "rounds", "launch": "launches"}[unit]
    lines = [
        f"Noise: {sd:.2%} between base and head in a {unit} ({REFERENCE}); planted: TTFT +{regression:.0%}.",
        "",
        f"| design | {plural} | caught | identical code fails | identical code: cannot tell |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in found:
        shown = " | ".join(_rate(count, each.trials) for count in (each.caught, each.failed, each.undecided))
        lines.append(f"| {each.design} | {each.rounds} | {shown} |")
    for design in dict.fromkeys(each.design for each in found):
        enough = enough_rounds(found, design)
        lines.append(
            f"\n{design}: {f'{enough} {plural} are enough' if enough else f'no number of {plural} tried is enough'}."
        )
    if any(each.design == "unpaired" for each in found):
        lines.append("\nunpaired: a drift of the machine between the two files is not in these figures.")
    return "\n".join(lines)


def _rate(count: int, trials: int) -> str:
    low, high = wilson(count, trials)
    return f"{count / trials:.1%} [{low:.1%}, {high:.1%}]"


def _span(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and (last or first).isdigit()) or not 1 <= int(first) <= int(last or first):
        raise BenchmarkError(f"--rounds is a number or first-last, such as 3-15; got {text!r}")
    return range(int(first), int(last or first) + 1)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise BenchmarkError(f"--noise takes fractions between 0 and 1, such as 0.01,0.02; got {text!r}")
    return value


if __name__ == "__main__":
    main()
