"""`sagellm evaluate`: perplexity, distance to a reference, greedy answers that stay the same."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from sagellm.cli.tables import show_rows
from sagellm.core.config import COMPUTES, DTYPES, KV_SCHEMAS
from sagellm.core.devices import device_names
from sagellm.core.errors import SageError

if TYPE_CHECKING:
    from sagellm.evaluate.report import QualityReport
    from sagellm.evaluate.run import Options


@click.command()
@click.argument("model", required=False)
@click.option("--against", help="Model to compare with, in this engine. Default: MODEL in transformers, in float32.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of MODEL's weights.")
@click.option(
    "--against-dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Type of the other's weights."
)
@click.option(
    "--compute", type=click.Choice(COMPUTES), default="auto", show_default=True, help="Type of MODEL's products on a CPU."
)
@click.option(
    "--kv-schema", type=click.Choice(KV_SCHEMAS), default="auto", show_default=True, help="Type of MODEL's keys and values."
)
@click.option("--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of the engine.")
@click.option("--tokens", type=click.IntRange(1024), default=52_000, show_default=True, help="Tokens of text to score.")
@click.option("--answers", type=click.IntRange(0), default=50, show_default=True, help="Greedy answers to compare.")
@click.option("--answer-tokens", type=click.IntRange(1, 400), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for quality.json, .md and plots.")
@click.option(
    "--compare", nargs=2, type=click.Path(exists=True, path_type=Path), help="Compare two reports instead: folders of --out."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def evaluate(
    context: click.Context, model: str | None, against: str | None, dtype: str, against_dtype: str, compute: str,
    kv_schema: str, device: str, tokens: int, answers: int, answer_tokens: int, out: Path | None,
    compare: tuple[Path, Path] | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure how well MODEL is computed, beside a reference.

    The text is English and code that come with Python. Exit code 0: measured; 2: misuse.
    """
    if compare is not None:
        others = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if set(others) - {"compare", "as_json"}:
            raise click.UsageError("--compare reads two reports and measures nothing; it takes no MODEL and only --json.")
        _compare(*compare, as_json)
        return
    if model is None:
        raise click.UsageError("give the MODEL to measure, or two reports with --compare.")
    from sagellm.evaluate.report import markdown
    from sagellm.evaluate.run import Options

    try:
        options = Options(tokens=tokens, answers=answers, answer_tokens=answer_tokens)
        wanted = {"dtype": dtype, "compute": compute, "kv_schema": kv_schema}
        with contextlib.redirect_stdout(sys.stderr):  # LMDeploy logs to where the report goes
            report = _measure(model, wanted, None if against is None else (against, against_dtype), device, options)
        if out is not None:
            report.write(out)
    except (SageError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(report.model_dump_json(indent=1) if as_json else markdown(report), nl=as_json)


def _measure(
    model: str, wanted: dict[str, str], against: tuple[str, str] | None, device: str, options: "Options"
) -> "QualityReport":
    """Evaluate a model with some settings against another, or itself in transformers in float32.

    Args:
        wanted: settings of `SageConfig`, `dtype` first.
        against: the other's name and dtype.
    """
    from sagellm.core.config import SageConfig
    from sagellm.evaluate.models import EngineModel, TransformersModel
    from sagellm.evaluate.run import evaluate as measure
    from sagellm.models import find_model, prepare_model
    from sagellm.models.texts import check_same_tokens

    source = find_model(model)
    folder = prepare_model(source)
    special = [f", {name.replace('_', ' ')} {value}" for name, value in wanted.items() if name != "dtype" and value != "auto"]
    name, config = f"{source.name} {wanted['dtype']}" + "".join(special), SageConfig(device=device)
    with contextlib.ExitStack() as loaded:
        if against is None:
            reference_name = _other_than(name, "transformers float32")
            reference = loaded.enter_context(TransformersModel(reference_name, folder, "float32"))
        else:
            other = find_model(against[0])
            other_folder = prepare_model(other)
            check_same_tokens(folder, other_folder)
            settings = config.model_copy(update={"model": other_folder, "dtype": against[1]})
            reference = loaded.enter_context(EngineModel(_other_than(name, f"{other.name} {against[1]}"), settings))
        settings = config.model_copy(update={"model": folder, **wanted})
        contestant = loaded.enter_context(EngineModel(name, settings))
        tick = loaded.enter_context(show_progress())
        return measure(source.name, folder, [reference, contestant], options, tick)


def _other_than(name: str, reference: str) -> str:
    """Return the name of the reference in a report, marked if it is that of the model too."""
    return f"{reference} (reference)" if reference == name else reference


def _compare(one: Path, other: Path, as_json: bool) -> None:
    from sagellm.evaluate.report import QualityReport, compare_reports

    try:
        found = compare_reports(QualityReport.read(one), QualityReport.read(other))
    except SageError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    rows = [{"model": model, "figure": figure, "one": value, "other": after} for model, figure, value, after in found]
    if not as_json:
        rows = [row | {"one": f"{row['one']:.6g}", "other": f"{row['other']:.6g}"} for row in rows]
    show_rows(rows, {"model": "model", "figure": "figure", str(one): "one", str(other): "other"}, as_json)


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is being done, on a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield status.update
