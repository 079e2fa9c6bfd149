"""Quality of the default model in this engine, in transformers and in llama.cpp, on text that comes with Python.

    python -m benchmarks.runner quality [--llama PYTHON] [--out FOLDER]

The reference is transformers in float32. PYTHON is the interpreter of an environment that has llama-cpp-python;
`benchmarks/models/README.md` says how to make one. With --generated the reference generates its answers instead of checking
those of the others.
"""

import contextlib
import sys
from pathlib import Path

import click

from benchmarks.output import csv_text
from sagellm.cli.evaluate import show_progress
from sagellm.core.cached_folder import write_whole
from sagellm.core.config import SageConfig
from sagellm.core.errors import SageError
from sagellm.evaluate.models import EngineModel, LlamaCppModel, TransformersModel
from sagellm.evaluate.report import QualityReport, markdown
from sagellm.evaluate.run import Options, evaluate
from sagellm.models import find_model, prepare_model

DTYPES = ("float32", "bfloat16")


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Name, folder or .gguf file of the model.")
@click.option("--llama", help="Python interpreter with llama-cpp-python; needs a model from a .gguf file.")
@click.option("--tokens", type=click.IntRange(1024), default=52_000, show_default=True, help="Tokens of text to score.")
@click.option("--answers", type=click.IntRange(0), default=200, show_default=True, help="Greedy answers to compare.")
@click.option("--answer-tokens", type=click.IntRange(1, 400), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--generated", is_flag=True, help="Let the reference generate its answers.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for quality.json, .md and plots.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(
    model: str, llama: str | None, tokens: int, answers: int, answer_tokens: int, generated: bool, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Evaluate, print the report, and write it."""
    try:
        report = compare(model, llama, Options(tokens, answers=answers, answer_tokens=answer_tokens, generated=generated))
        if out is not None:
            report.write(out)
            write_whole(out / "quality.csv", csv_text(report.model_dump()))
    except SageError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(report.model_dump_json(indent=1) if as_json else markdown(report), nl=as_json)


def compare(model: str, llama: str | None, options: Options) -> QualityReport:
    """Evaluate the model in all engines.

    Raises:
        SageError: a model that cannot be loaded.
    """
    source = find_model(model)
    folder = prepare_model(source)
    with contextlib.ExitStack() as loaded:
        models = [loaded.enter_context(TransformersModel(f"transformers {dtype}", folder, dtype)) for dtype in DTYPES]
        for dtype in DTYPES:
            config = SageConfig(model=folder, dtype=dtype, device="cpu")
            models.append(loaded.enter_context(EngineModel(f"sagellm {dtype}", config)))
        if llama is not None:
            packed = SageConfig(model=folder, dtype="bfloat16", weights="packed", device="cpu")
            models.append(loaded.enter_context(EngineModel("sagellm bfloat16, packed weights", packed)))
            models.append(loaded.enter_context(LlamaCppModel("llama.cpp", llama, Path(source.where))))
        return evaluate(source.name, folder, models, options, loaded.enter_context(show_progress()))


if __name__ == "__main__":
    main()
