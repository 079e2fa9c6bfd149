"""The command line of the demo model: build it if need be and print its folder."""

import json
import sys
from pathlib import Path

import click

from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.errors import SageError
from sagellm.demo_model.base import DemoRecipe
from sagellm.demo_model.cache import build_at


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the model to this folder itself, instead of the user's cache.",
)
@click.option("--force", is_flag=True, help="Train again even if the model is there.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps; another number is another model.")
@click.option("--draft", is_flag=True, help="Build its draft model instead, for --speculative draft.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the folder.")
@click.pass_context
def demo_model(
    context: click.Context, out: Path | None, force: bool, steps: int | None, draft: bool, as_json: bool
) -> None:
    """Build the demo model (one to two minutes, once) and print its folder.

    Exit code 0: the folder is there; 1: it could not be built; 2: misuse.
    """
    # The context object is how a Python caller, such as a test, gives a recipe of its own.
    recipe = context.obj if isinstance(context.obj, DemoRecipe) else DemoRecipe()
    if steps:
        recipe = recipe.model_copy(update={"steps": steps})
    if draft:
        recipe = recipe.draft()
    folder = (out.expanduser() if out else default_cache_dir() / recipe.folder_name()).absolute()
    try:
        record, cached = build_at(folder, recipe, force=force)
    except SageError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"Error: {error}", err=not as_json)
        sys.exit(1)
    if not as_json:
        click.echo(str(folder))
        return
    answer = {
        "path": str(folder),
        "parameters": record.parameters,
        "seconds": record.seconds,
        "loss": record.loss,
        "cached": cached,
    }
    click.echo(json.dumps(answer))
