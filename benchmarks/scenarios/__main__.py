"""One measurement of a component scenario: `python -m benchmarks.scenarios NAME --seed N --options JSON` prints its metrics.

The runner starts it, with the Python of the checkout that is measured.
"""

import json
from typing import Any

import click

from benchmarks.errors import BenchmarkError
from benchmarks.scenarios import component


def _options(context: click.Context, option: click.Parameter, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"no JSON: {error}") from None
    if not isinstance(values, dict):
        raise click.BadParameter(f"an object is needed, got {text}")
    return values


@click.command()
@click.argument("name")
@click.option("--seed", type=int, required=True)
@click.option("--options", callback=_options, default="{}", help="A JSON object.")
def main(name: str, seed: int, options: dict[str, Any]) -> None:
    """Measure NAME once and print its metrics as one line of JSON."""
    try:
        module = component(name, options)
    except BenchmarkError as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(module.run(seed, **{**module.OPTIONS, **options})))


if __name__ == "__main__":
    main()
