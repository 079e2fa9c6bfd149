"""Which weights and KV schemas of a model fit into some memory, and how long a decode step takes with each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sagellm.accel.quantization.registry import QUANTIZERS, make_quantizer
from sagellm.core.config import KV_SCHEMAS, SageConfig
from sagellm.core.errors import ConfigError, QuantizationError
from sagellm.engines.base import KVCacheSchema
from sagellm.engines.lmdeploy.architecture import cpu_support
from sagellm.engines.lmdeploy.cpu.step_time import DecoderSizes, StepTimer, WeightFormat
from sagellm.engines.lmdeploy.sizing import schema_of
from sagellm.models.folder import text_config

__all__ = ["PLAIN", "Choice", "choices", "time_choices"]

PLAIN = "bfloat16"  # weights that no method quantizes


@dataclass(frozen=True)
class Choice:
    """Weights and a KV schema.

    Attributes:
        method: quantization method of the weights, or PLAIN.
        weight_bytes, kv_bytes: of the weights, and of the blocks of all requests at their full length.
        step_s: seconds of a decode step of all requests at their full length, on this machine; None: not timed.
    """

    method: str
    schema: KVCacheSchema
    weight_bytes: int
    kv_bytes: int
    step_s: float | None = None
    form: WeightFormat = field(default=WeightFormat(), repr=False)

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def choices(model: Path, context: int, concurrency: int) -> list[Choice]:
    """Return every choice for a model in bfloat16 on the CPU device.

    Args:
        context: tokens of a request, its answer included.
        concurrency: requests that run at once.

    Raises:
        ConfigError: the model is too short, or no dense decoder that the native step knows.
    """
    config, text = SageConfig(device="cpu", dtype="bfloat16"), text_config(model)
    longest = int(text.get("max_position_embeddings", context))
    if context > longest:
        raise ConfigError(f"context {context} exceeds the {longest} tokens this model was made for.")
    support = cpu_support(model, "bfloat16")
    has_experts = text.get("num_local_experts") or text.get("num_experts")
    if support.missing or support.eager or has_experts or "quantization_config" in text:
        why = support.missing or support.eager or "it has experts"
        why = "it is quantized already" if "quantization_config" in text else why
        raise ConfigError(f"plan covers dense models in 16 bits that the CPU device runs natively, and here {why}.")
    sizes = DecoderSizes.read(text)
    found = []
    for method, form in {PLAIN: WeightFormat(), **_formats()}.items():
        for name in KV_SCHEMAS:
            if name in ("auto", "float32"):
                continue
            _, schema = schema_of(text, config.model_copy(update={"kv_schema": name}), "cpu")
            kv_bytes = concurrency * -(-context // schema.block_size) * schema.block_bytes
            found.append(Choice(method, schema, sizes.weight_bytes(form), kv_bytes, form=form))
    return found


def time_choices(model: Path, wanted: list[Choice], context: int, concurrency: int,
                 tick: Callable[[str], None] = lambda text: None) -> list[Choice]:  # fmt: skip
    """Return the choices with the time of their steps. Choices of one format and schema are timed once."""
    sizes, known = DecoderSizes.read(text_config(model)), {}
    for form in dict.fromkeys(choice.form for choice in wanted):
        timer = StepTimer(sizes, form)
        for schema in dict.fromkeys(choice.schema for choice in wanted if choice.form == form):
            tick(f"timing steps: weights of {form.bits} bits, keys and values in {schema.dtype}")
            known[form, schema] = timer.step_s(schema, concurrency, context)
    return [replace(choice, step_s=known[choice.form, choice.schema]) for choice in wanted]


def _formats() -> Mapping[str, WeightFormat]:
    """Formats of the methods, as their default options have them."""
    found = {}
    for name in QUANTIZERS.names():
        try:
            profile = make_quantizer(name).profile()
        except QuantizationError:  # a plug-in that needs options
            continue
        is_float = profile.method == "fp8"
        found[name] = WeightFormat(profile.weight_bits, profile.group_size, is_float, profile.head_bits)
    return found
