"""`sagellm plan`: weights and KV schemas for some memory, or engines that keep to latency targets under a load.

`plan_sla.py` has the second part.
"""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sagellm.cli.evaluate import show_progress
from sagellm.cli.plan_sla import plan_sla, sla_options
from sagellm.cli.tables import show_rows
from sagellm.cli.values import Bytes
from sagellm.core.errors import SageError

if TYPE_CHECKING:
    from sagellm.engines.lmdeploy.plan import Choice

COLUMNS = {
    "weights": "weights", "keys and values": "kv_schema", "MiB": "mib", "fits": "fits", "step ms": "step_ms",
    "tokens/s": "tokens_per_s", "KL to float32": "kl", "perplexity": "perplexity",
}  # fmt: skip
UNKNOWN = "-"  # not timed, or not measured


@click.command()
@click.argument("model")
@click.option("--memory", type=Bytes(), help="Memory for weights and KV blocks, such as 2GiB; with --profile: of a device.")
@click.option("--context", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of a request.")
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True, help="Requests that run at once.")
@click.option("--threads", type=click.IntRange(1), help="Compute threads. Default: all cores.")
@click.option("--measure", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Measure the loss of the N fastest that fit, minutes each.")  # fmt: skip
@sla_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: str, memory: int | None, context: int, concurrency: int, threads: int | None, measure: int, as_json: bool,
    **sla: Any,
) -> None:  # fmt: skip
    """Plan for some memory, or for latency targets.

    With --memory: list weights and KV schemas of MODEL for the CPU device, with size, time of a decode step and loss.
    Steps are timed for all requests at their full length. Losses come from earlier measurements.

    With --profile: choose engines of MODEL that keep to --ttft-ms and --itl-ms under each --load with the fewest devices.
    The load runs on a virtual clock with the measured times of the profile.

    Exit code 0: something fits; 1: nothing does; 2: misuse.
    """
    if sla["profile"] is not None:
        plan_sla(model, memory, as_json, **sla)
        return
    if memory is None:
        raise click.UsageError("give --memory to plan weights and KV schemas, or --profile to plan engines for a load.")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # LMDeploy logs to where the table goes
            rows = _rows(model, memory, context, concurrency, threads, measure)
    except (SageError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    show_rows(rows, COLUMNS, as_json)
    if not any(row["fits"] for row in rows):
        least = min(row["mib"] for row in rows)
        click.echo(f"nothing fits into {memory / 2**20:,.0f} MiB; the smallest choice needs {least:,.0f} MiB.", err=True)
        sys.exit(1)


def _rows(model: str, memory: int, context: int, concurrency: int, threads: int | None, measure: int) -> list[dict[str, Any]]:
    import torch

    from sagellm.engines.lmdeploy.plan import choices, time_choices
    from sagellm.models import find_model, prepare_model

    folder, threads = prepare_model(find_model(model)), threads or torch.get_num_threads()
    found = choices(folder, context, concurrency)
    torch.set_num_threads(threads)  # to look at a model's operators leaves one
    fitting = [choice for choice in found if choice.num_bytes <= memory]
    with show_progress() as tick:
        timed = sorted(time_choices(folder, fitting, context, concurrency, tick), key=lambda choice: choice.step_s)
        rows = []
        for number, choice in enumerate(timed):
            tick(f"loss of {choice.method} with keys and values in {choice.schema.dtype}")
            rows.append(_row(choice, True, concurrency) | _loss(folder, choice, number < measure))
    others = sorted((choice for choice in found if choice.num_bytes > memory), key=lambda choice: choice.num_bytes)
    return rows + [_row(choice, False, concurrency) | _loss(folder, choice, False) for choice in others]


def _row(choice: "Choice", fits: bool, concurrency: int) -> dict[str, Any]:
    step_s = choice.step_s
    return {
        "weights": choice.method, "kv_schema": choice.schema.dtype, "mib": round(choice.num_bytes / 2**20, 1),
        "weight_bytes": choice.weight_bytes, "kv_bytes": choice.kv_bytes, "fits": fits,
        "step_ms": UNKNOWN if step_s is None else round(1e3 * step_s, 2),
        "tokens_per_s": UNKNOWN if step_s is None else round(concurrency / step_s, 1),
    }  # fmt: skip


def _loss(source: Path, choice: "Choice", may_measure: bool) -> dict[str, Any]:
    from sagellm.accel.quantization.cache import cached_copy, quantized_copy
    from sagellm.accel.quantization.profile import PROFILE_NAME
    from sagellm.accel.quantization.registry import make_quantizer
    from sagellm.engines.lmdeploy.plan import PLAIN
    from sagellm.evaluate.losses import known_loss, measure_loss

    folder, schema = source, choice.schema.dtype
    if choice.method != PLAIN:
        quantizer = make_quantizer(choice.method)
        folder = quantized_copy(source, quantizer) if may_measure else cached_copy(source, quantizer)
    is_there = choice.method == PLAIN or (folder / PROFILE_NAME).is_file()
    report = known_loss(folder, schema) if is_there else None
    if report is None and may_measure:
        report = measure_loss(folder, source, schema)
    if report is None:
        return {"kl": UNKNOWN, "perplexity": UNKNOWN}
    reference, measured = report.models
    changes = [100 * (measured.perplexity[part] / reference.perplexity[part] - 1) for part in reference.perplexity]
    return {"kl": round(measured.kl_mean, 5), "perplexity": " / ".join(f"{change:+.2f}%" for change in changes)}
