"""`sagellm evaluate`: perplexity, distance to a reference, greedy answers that stay the same."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from sagellm.core.config import DEVICES, DTYPES
from sagellm.core.errors import SageError


@click.command()
@click.argument("model")
@click.option("--against", help="Model to compare with, in this engine. Default: MODEL in transformers, in float32.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of MODEL's weights.")
@click.option(
    "--against-dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Type of the other's weights."
)
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True, help="Device of the engine.")
@click.option("--tokens", type=click.IntRange(1024), default=52_000, show_default=True, help="Tokens of text to score.")
@click.option("--answers", type=click.IntRange(0), default=50, show_default=True, help="Greedy answers to compare.")
@click.option("--answer-tokens", type=click.IntRange(1, 400), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for quality.json, .md and plots.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def evaluate(
    model: str, against: str | None, dtype: str, against_dtype: str, device: str, tokens: int, answers: int,
    answer_tokens: int, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure how well MODEL is computed, beside a reference.

    The text is English and code that come with Python. Exit code 0: measured; 2: misuse.
    """
    from sagellm.core.config import SageConfig
    from sagellm.evaluate.models import EngineModel, TransformersModel
    from sagellm.evaluate.report import markdown
    from sagellm.evaluate.run import Options
    from sagellm.evaluate.run import evaluate as measure
    from sagellm.models import find_model, prepare_model

    try:
        source = find_model(model)
        folder = prepare_model(source)
        with contextlib.ExitStack() as loaded:
            config = SageConfig(device=device)
            if against is None:
                reference = loaded.enter_context(TransformersModel("transformers float32", folder, "float32"))
            else:
                other = find_model(against)
                settings = config.model_copy(update={"model": prepare_model(other), "dtype": against_dtype})
                reference = loaded.enter_context(EngineModel(f"{other.name} {against_dtype}", settings))
            settings = config.model_copy(update={"model": folder, "dtype": dtype})
            contestant = loaded.enter_context(EngineModel(f"{source.name} {dtype}", settings))
            tick = loaded.enter_context(show_progress())
            options = Options(tokens=tokens, answers=answers, answer_tokens=answer_tokens)
            report = measure(source.name, folder, [reference, contestant], options, tick)
        if out is not None:
            report.write(out)
    except (SageError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(report.model_dump_json(indent=1) if as_json else markdown(report), nl=as_json)


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
