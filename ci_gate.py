"""The performance gate.

    python ci_gate.py --baseline baseline.json --current output.json
    python ci_gate.py --current comparison.json --base-name base --head-name head
    python ci_gate.py --ab origin/main --preset ci --out DIR

Exit code 0: pass; 1: a regression; 2: misuse; 3: cannot tell.
"""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import click

from benchmarks.config import BenchmarkConfig, load_config, preset
from benchmarks.errors import BenchmarkError
from benchmarks.gate import DEFAULT_RULES, Judgement, judge, load_rules, markdown
from benchmarks.gate.base import MISUSED, UNDECIDED
from benchmarks.output import json_text
from benchmarks.result import Result, read_result
from sagellm.core.cached_folder import write_whole
from sagellm.core.errors import SageError

FILE = click.Path(path_type=Path)


class Incomplete(BenchmarkError):
    """Measuring both sides did not come to its end."""


@click.command()
@click.option("--current", type=FILE, help="Result to judge; it may hold base and head both.")
@click.option("--baseline", type=FILE, help="Result of the baseline.")
@click.option(
    "--baseline-name", "--base-name", "base_name", help="Name of the base contestant; default: the only one, or base."
)
@click.option(
    "--current-name", "--head-name", "head_name", help="Name of the head contestant; default: the only one, or head."
)
@click.option("--ab", "base_rev", metavar="REV", help="Build and run this revision and the checkout, interleaved.")
@click.option("--preset", "preset_name", help="Preset that --ab runs; default: ci.")
@click.option("--config", "config_file", type=FILE, help="Config file that --ab runs instead of a preset.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of each launch of --ab; default: the config's.")
@click.option(
    "--launches", type=click.IntRange(min=1),
    help="Times that --ab starts the servers; default: the config's.",
)
@click.option("--out", type=FILE, help="Folder for the result of --ab; default: benchmark-ab.")
@click.option("--rules", "rules_file", type=FILE, help="YAML that changes thresholds or leaves metrics ungated.")
@click.option("--markdown", "markdown_file", type=FILE, help="Write the Markdown summary to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON.")
def main(
    current: Path | None, baseline: Path | None, base_name: str | None, head_name: str | None, base_rev: str | None,
    preset_name: str | None, config_file: Path | None, rounds: int | None, launches: int | None, out: Path | None,
    rules_file: Path | None, markdown_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Say whether a benchmark shows a regression.

    Exit code 0: pass; 1: a regression; 2: misuse; 3: cannot tell, or the machine is too noisy.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is called off leaves no server behind
    ab_only = {
        "--preset": preset_name, "--config": config_file, "--rounds": rounds, "--launches": launches, "--out": out,
    }  # fmt: skip
    _check_options(current, baseline, base_rev, ab_only)
    try:
        # Before any measuring: a mistake must not cost a benchmark.
        if markdown_file is not None and not os.access(markdown_file.absolute().parent, os.W_OK):
            raise BenchmarkError(f"cannot write {markdown_file}: its folder is missing or may not be written to")
        rules = load_rules(rules_file) if rules_file else DEFAULT_RULES
        if base_rev is not None:
            config = _config(preset_name, config_file, rounds, launches)
            found, older = _compare(base_rev, config, out or Path("benchmark-ab")), None
        else:
            found, older = read_result(current), read_result(baseline) if baseline else None
        judgement = judge(found, older, rules, base_name, head_name)
        _report(judgement, markdown_file, as_json)
    except SageError as error:
        _end(str(error), UNDECIDED if isinstance(error, Incomplete) else MISUSED)
    except KeyboardInterrupt:
        _end("interrupted; nothing was judged", UNDECIDED)
    except Exception as error:  # exit code 1 is for regressions alone
        traceback.print_exc()
        _end(f"the gate itself failed: {error!r}", UNDECIDED)
    sys.exit(judgement.exit_code)


def _end(message: str, code: int) -> NoReturn:
    for line in message.splitlines():
        click.echo(f"error: {line}", err=True)
    sys.exit(code)


def _check_options(current: Path | None, baseline: Path | None, base_rev: str | None, ab_only: dict) -> None:
    if base_rev is None:
        given = [name for name, value in ab_only.items() if value is not None]
        if given:
            raise click.UsageError(f"{', '.join(given)} goes with --ab")
        if current is None:
            raise click.UsageError("give --current with --baseline, --current with both contestants in it, or --ab REV")
    elif current is not None or baseline is not None:
        raise click.UsageError("--ab measures both sides itself; leave out --baseline and --current")
    elif ab_only["--preset"] and ab_only["--config"]:
        raise click.UsageError("--preset and --config exclude each other")


def _config(
    preset_name: str | None, config_file: Path | None, rounds: int | None, launches: int | None
) -> BenchmarkConfig:
    config = load_config(config_file) if config_file else preset(preset_name or "ci")
    asked = {"rounds": rounds, "launches": launches}
    return config.model_copy(update={name: value for name, value in asked.items() if value is not None})


def _compare(base_rev: str, config: BenchmarkConfig, out: Path) -> Result:
    # Late: it brings servers and checkouts, which judging two files needs nothing of.
    from benchmarks.ab import run_ab

    found = run_ab(base_rev, config, out)
    if found.status != "complete":
        raise Incomplete(f"the comparison is {found.status} ({found.reason}); what was measured is in {out}")
    return found


def _report(judgement: Judgement, file: Path | None, as_json: bool) -> None:
    text = markdown(judgement)
    if file is not None:
        try:
            write_whole(file, text)
        except OSError as error:
            raise BenchmarkError(f"cannot write {file}: {error.strerror}") from None
    click.echo(json_text(judgement.as_dict()) if as_json else text)


if __name__ == "__main__":
    main()
