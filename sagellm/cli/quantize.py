"""`sagellm quantize`: write a quantized copy of a model, or report what quantization cost."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from sagellm.cli.values import JSON_FLAG, read_options
from sagellm.core.devices import device_names
from sagellm.core.errors import SageError


@click.command()
@click.argument("model", required=False)
@click.option("--method", help="awq, gptq, fp8, int8, smoothquant, or module:Class; see `sagellm list quantizer`.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write. Default: the user's cache.")
@click.option("--options", "given", help="Options of the method, as JSON.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Text file. Default: Python's documentation and sources.")
@click.option("--pieces", type=click.IntRange(1), default=32, show_default=True, help="Pieces of text to calibrate with.")
@click.option("--length", type=click.IntRange(16), default=512, show_default=True, help="Tokens of a piece.")
@click.option("--report", type=click.Path(path_type=Path), help="Measure this quantized folder beside its original instead.")
@click.option(
    "--device", type=click.Choice(device_names()), default="auto", show_default=True, help="Device of --report's engine."
)
@click.option("--tokens", type=click.IntRange(1024), default=8_000, show_default=True, help="Tokens that --report scores.")
@click.option("--answers", type=click.IntRange(0), default=20, show_default=True, help="Greedy answers that --report compares.")
@JSON_FLAG
def quantize(
    model: str | None, method: str | None, out: Path | None, given: str | None, calibration: Path | None, pieces: int,
    length: int, report: Path | None, device: str, tokens: int, answers: int, as_json: bool,
) -> None:  # fmt: skip
    """Quantize MODEL, and print the folder that `--model` takes.

    MODEL is what `--model` takes: smollm2, demo, a folder, a .gguf file, or a hub id. Exit code 0: done; 2: misuse, or a
    model that cannot be quantized.
    """
    try:
        if report is not None:
            if model or method or out:
                raise click.UsageError("--report measures a folder that is there; it takes no MODEL, --method and --out.")
            _report(report, device, tokens, answers, as_json)
            return
        if model is None or method is None:
            raise click.UsageError("give the MODEL to quantize and its --method, or a folder with --report.")
        options = {} if given is None else read_options("--options", given, {"group_size": 64})
        with contextlib.redirect_stdout(sys.stderr):  # LMDeploy logs to where the answer goes
            folder, profile = _quantize(model, method, out, options, calibration, pieces, length)
    except SageError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(json.dumps({"folder": str(folder), "profile": profile.model_dump(mode="json")}) if as_json else str(folder))


def _quantize(
    model: str, method: str, out: Path | None, options: dict[str, Any], text: Path | None, pieces: int, length: int
) -> tuple[Path, Any]:
    from sagellm.accel.quantization import Calibration, QuantizationProfile, make_quantizer
    from sagellm.accel.quantization.cache import quantized_copy
    from sagellm.core.current_folder import look_in_current_folder
    from sagellm.models import find_model, prepare_model

    look_in_current_folder()
    quantizer = make_quantizer(method, **options)
    source = prepare_model(find_model(model))
    calibration = Calibration.from_file(text, pieces, length) if text is not None else Calibration.default(pieces, length)
    if out is None:
        folder = quantized_copy(source, quantizer, calibration)
        return folder, QuantizationProfile.read(folder)
    return out, quantizer.quantize(source, calibration, out)


def _report(folder: Path, device: str, tokens: int, answers: int, as_json: bool) -> None:
    from sagellm.accel.quantization.profile import QuantizationProfile
    from sagellm.evaluate.alignment import measure_alignment, page
    from sagellm.evaluate.run import Options

    source = Path(QuantizationProfile.read(folder).source)
    with contextlib.redirect_stdout(sys.stderr):  # LMDeploy logs to where the report goes
        found = measure_alignment(folder, source, Options(tokens, answers=answers), device)
    click.echo(found.model_dump_json(indent=1) if as_json else page(found))
