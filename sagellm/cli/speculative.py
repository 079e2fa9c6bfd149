"""`sagellm speculative`: list and check strategies, measure what guesses cost here, and recommend a setting."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from sagellm.cli.kinds import old_commands
from sagellm.cli.lazy import LazyGroup
from sagellm.cli.tables import show_rows
from sagellm.cli.values import JSON_FLAG, Counts, Finite, answering
from sagellm.core.config import DTYPES
from sagellm.core.devices import device_names
from sagellm.core.errors import SageError

MAX_GUESSES = 64
MAX_BATCH = 4096


@click.command()
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file to write the table to."
)
@click.option(
    "--model", type=click.Path(path_type=Path), help="Model: name, folder, .gguf file or hub id. Default: smollm2."
)
@click.option("--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of the engine.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of weights and KV cache."
)
@click.option("--threads", type=click.IntRange(1), help="Compute threads of the CPU device [all cores].")
@click.option(
    "--lookaheads", type=Counts(0, MAX_GUESSES), default="0,1,2,4,8", show_default=True,
    help="Numbers of guesses to try.",
)
@click.option(
    "--batches", type=Counts(1, MAX_BATCH), default="1,4,16", show_default=True,
    help="Numbers of sequences in a step to try.",
)
@click.option(
    "--context", type=click.IntRange(1), default=256, show_default=True, help="Length of each prompt in tokens."
)
@click.option(
    "--steps", type=click.IntRange(1), default=12, show_default=True,
    help="Least number of steps to measure for each setting.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON document.")
def profile(out: Path, as_json: bool, **given: Any) -> None:
    """Measure decode steps with guesses on this machine and model, and write them as a table.

    `sagellm speculative recommend` reads the table, and so does --speculative dynamic:NAME by its option `table`.
    Exit code 0: written; 1: it could not be measured; 2: misuse.
    """
    with answering(as_json):
        table = _measure(given)
        table.write(out)
    if as_json:
        click.echo(json.dumps(table.to_dict(), indent=1))
        return
    columns = {"sequences": "batch", **{f"{each} guesses": str(each) for each in table.lookaheads}}
    rows = [
        {"batch": batch, **{str(k): f"{1e3 * s:.3g} ms" for k, s in zip(table.lookaheads, seconds, strict=True)}}
        for batch, seconds in zip(table.batches, table.seconds, strict=True)
    ]
    show_rows(rows, columns, False)
    click.echo(f"wrote {out}")


@click.command()
@click.argument("table", type=click.Path(path_type=Path))
@click.option(
    "--acceptance", type=click.FloatRange(0, 1), required=True,
    help="Chance that a guess is right if those before it were: accepted / drafted of place 1 in /metrics.",
)  # fmt: skip
@click.option("--target-ms", type=Finite(), help="Longest mean time between two tokens of a stream, in ms [any].")
@click.option("--batch", type=click.IntRange(1), help="Number of sequences in a step [the best].")
@JSON_FLAG
def recommend(table: Path, acceptance: float, target_ms: float | None, batch: int | None, as_json: bool) -> None:
    """Name the lookahead of most tokens a second, from a measured table and an acceptance rate.

    Exit code 0: it meets the target; 1: nothing does, and the shortest latency is shown; 2: misuse, an invalid table, or a
    table of one batch size and a --batch other than that.
    """
    from sagellm.accel.speculative.planning.recommend import recommend as best_setting
    from sagellm.accel.speculative.planning.table import read_table

    target_s = None if target_ms is None else target_ms / 1e3
    try:
        measured = read_table(table)
        found = best_setting(measured, acceptance, target_s=target_s, batch=batch)
    except SageError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(found._asdict(), indent=1))
    else:
        batches = f"{measured.batches[0]} to {measured.batches[-1]} sequences"
        beyond = f"; beyond what was measured, {batches}, so only a guess" if found.is_extrapolated else ""
        click.echo(
            f"lookahead {found.lookahead} with {found.batch} sequences: {found.tokens_per_s:.4g} tokens/s "
            f"({found.speedup:.3g} times that without guesses), {1e3 * found.token_s:.3g} ms a token, "
            f"steps of {1e3 * found.step_s:.3g} ms{beyond}."
        )
        if not found.meets_target:
            click.echo(f"Nothing keeps to {target_ms:g} ms a token; this is the shortest.")
    sys.exit(0 if found.meets_target else 1)


def _measure(given: dict[str, Any]) -> Any:
    from sagellm.accel.speculative.planning import profile as planning
    from sagellm.core.config import SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine
    from sagellm.models import find_model, prepare_model

    model = prepare_model(find_model(given["model"]))
    batches, context = given["batches"], given["context"]
    axis = sorted({0, *given["lookaheads"]})
    num_tokens = planning.tokens_needed(axis, given["steps"])
    block_size = 64
    num_blocks = batches[-1] * (-(-(context + num_tokens + axis[-1]) // block_size) + 1) + 16
    config = SageConfig(
        model=model, device=given["device"], dtype=given["dtype"], threads=given["threads"], block_size=block_size,
        kv_blocks=num_blocks, max_batch_size=batches[-1], prefix_caching=False, decode_round=1,
        speculative=planning.PROBE, speculative_options={"lookaheads": axis},
    )  # fmt: skip
    tell = (lambda what: click.echo(f"\r\033[K{what} ", nl=False, err=True)) if sys.stderr.isatty() else None
    with LMDeployEngine(config) as engine:
        info = engine.info
        facts = {
            **planning.machine_facts(), "model": str(model), "device": info.device, "dtype": info.kv_schema.dtype,
            "threads": given["threads"], "block_size": block_size,
        }  # fmt: skip

        def generate(prompts: list[list[int]], num_new: int) -> None:
            engine.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True))

        table = planning.profile(
            generate, lambda: engine.hooks.report()["speculation"]["own"], batches=batches, lookaheads=axis,
            vocab_size=engine.engine.executor.model_agent.model_config.vocab_size, steps=given["steps"], context=context,
            facts=facts, progress=tell,
        )  # fmt: skip
    if tell is not None:
        click.echo("\r\033[K", nl=False, err=True)
    return table


speculative = LazyGroup(
    {
        **old_commands("speculative"),
        "profile": (lambda: profile, "Measure decode steps with guesses on this machine."),
        "recommend": (lambda: recommend, "Name the lookahead of most tokens a second."),
    },
    name="speculative", help="List, check, measure and plan strategies that guess tokens.",
)  # fmt: skip
