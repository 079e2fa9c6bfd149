"""A model with quantized weights, keys and values in the engine: what its answers lose, and how long its decode steps take."""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {
    "model": "demo", "method": "int8", "kv_schema": "int8", "tokens": 2048, "batch": 4, "prompt_tokens": 192,
    "new_tokens": 65, "bursts": 12,
}  # fmt: skip
DEFINITIONS = {
    "quantized_kl": Definition(
        unit="nat", better="lower",
        text=(
            "Mean over `tokens` of text of KL(p, q): p the next token's distribution of `model` in float32, q that with "
            "weights of `method` and keys and values of `kv_schema`. Both in this engine; weights are quantized for this run."
        ),
    ),
    "quantized_step_s": Definition(
        unit="s", better="lower",
        text=(
            "Processor seconds of an engine step with `batch` requests of the quantized model in bfloat16, one thread, prompts "
            "included: the least of `bursts` batches."
        ),
    ),
}  # fmt: skip


def run(
    seed: int, model: str, method: str, kv_schema: str, tokens: int, batch: int, prompt_tokens: int, new_tokens: int,
    bursts: int,
) -> dict[str, float]:  # fmt: skip
    from sagellm.accel.quantization.registry import make_quantizer
    from sagellm.core.config import SageConfig
    from sagellm.engines.base import SamplingParams
    from sagellm.evaluate.models import EngineModel
    from sagellm.evaluate.run import Options, evaluate
    from sagellm.models import find_model, prepare_model

    source = prepare_model(find_model(model))
    with tempfile.TemporaryDirectory(prefix="sagellm-quantized-") as scratch:
        folder = Path(scratch) / "model"
        make_quantizer(method).quantize(source, None, folder)
        settings = SageConfig(device="cpu", threads=1, prefix_caching=False, max_batch_size=batch)
        plain = settings.model_copy(update={"model": source, "dtype": "float32"})
        quantized = settings.model_copy(update={"model": folder, "dtype": "bfloat16", "kv_schema": kv_schema})
        prompts = [[(seed + 7 * row + column) % 250 + 1 for column in range(prompt_tokens)] for row in range(batch)]
        params, steps = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True), []
        with EngineModel("quantized", quantized) as contestant:
            for _ in range(bursts):  # before another engine is there
                start = time.process_time()
                contestant.engine.generate(prompts, params)
                steps.append((time.process_time() - start) / new_tokens)
            with EngineModel("float32", plain) as reference:
                report = evaluate(source.name, source, [reference, contestant], Options(tokens, answers=0))
    return {"quantized_kl": report.of("quantized").kl_mean, "quantized_step_s": min(steps)}
