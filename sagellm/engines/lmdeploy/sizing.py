"""From a `SageConfig` and a model folder to sizes: dtype, context, batch, KV blocks. Refuses what cannot fit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sagellm.core.config import SageConfig
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.engines.base import KV_BITS, KVCacheSchema
from sagellm.engines.lmdeploy.speculative.draft_folder import check_draft
from sagellm.models.folder import text_config, weight_sizes

# On a CPU the pool comes out of the memory that everything else lives in, so the default takes a modest part of it.
DEFAULT_CPU_SHARE = 0.25
DEFAULT_CPU_BATCH = 32
DEFAULT_CPU_CONTEXT = 32768
MIN_BLOCKS = 16  # LMDeploy refuses fewer
DEFAULT_GPU_SHARE = 0.8  # LMDeploy's own, of what its weights leave


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of draft models: bytes of their weights, and of each KV block besides the target's."""

    weight_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the engine starts with. `num_blocks` 0 leaves the choice to LMDeploy (devices with their own memory).
    `draft`: None where no draft model is loaded."""

    dtype: str
    context_length: int
    max_batch_size: int | None
    schema: KVCacheSchema
    num_blocks: int
    num_host_blocks: int
    draft: DraftSizes | None = None

    @property
    def weights_dtype(self) -> str:
        """Type of the weights; on devices with their own memory the likely one, if LMDeploy chooses it."""
        return weights_dtype(self.dtype)

    @property
    def quant_policy(self) -> int:
        """LMDeploy's setting for keys and values with scales: 8 or 4, else 0. Floats of 8 bits are laid out like int8."""
        return KV_BITS[self.schema.dtype] if self.schema.scale_dtype else 0


def resolve_device(device: str) -> str:
    """'auto' is cuda where torch sees a GPU, else cpu.

    Raises:
        ConfigError: a device this machine does not have.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_cuda else "cpu"
    if device == "cuda" and not has_cuda:
        raise ConfigError("device cuda: torch sees no GPU here; use --device cpu, or see `sagellm doctor`.")
    return device


def size_engine(config: SageConfig, model: Path, device: str) -> Sizes:
    """
    Raises:
        CapacityError: with the numbers, when the pool and the models exceed the memory there is.
        SpeculationError: a draft model that cannot guess for this one.
    """
    text = text_config(model)
    dtype, schema = schema_of(text, config, device)
    longest = int(text.get("max_position_embeddings", DEFAULT_CPU_CONTEXT))
    context = config.context_length or (min(longest, DEFAULT_CPU_CONTEXT) if device == "cpu" else longest)
    if context > longest:
        raise ConfigError(f"context_length {context} exceeds the {longest} tokens this model was made for.")
    draft = _draft(config, model, weights_dtype(dtype), device)
    if device != "cpu":
        blocks = config.kv_blocks or 0
        return Sizes(dtype, context, config.max_batch_size, schema, blocks, config.host_kv_blocks, draft)
    batch = config.max_batch_size or DEFAULT_CPU_BATCH
    return _fit(config, model, Sizes(dtype, context, batch, schema, 0, config.host_kv_blocks, draft))


def gpu_share(wanted: float | None, sizes: Sizes) -> float:
    """Return the share of free memory for LMDeploy's pool, which is filled before a draft model is loaded. The draft
    model takes a part of the share: its keys and values in proportion to a block, its weights as they are."""
    share = DEFAULT_GPU_SHARE if wanted is None else wanted
    if sizes.draft is None:
        return share
    import torch

    weights = sizes.draft.weight_bytes / torch.cuda.mem_get_info()[0]
    block = sizes.schema.block_bytes
    left = (share - weights) * block / (block + sizes.draft.block_bytes)
    if left <= 0:
        raise CapacityError(
            f"the draft model's weights, {_mib(sizes.draft.weight_bytes)}, exceed the share {share} of the GPU's free memory; "
            "give a smaller draft model, or start without --speculative."
        )
    return left


def weights_dtype(dtype: str) -> str:
    return "bfloat16" if dtype == "auto" else dtype


def _draft(config: SageConfig, model: Path, dtype: str, device: str) -> DraftSizes | None:
    """Add up the models that the speculative strategy loads; they compute in the dtype of the target."""
    from sagellm.accel.speculative.registry import engine_method, make_speculator

    if config.speculative is None or engine_method(config.speculative) or config.engine != "pytorch":
        return None
    folders = make_speculator(config.speculative, **config.speculative_options).models
    if not folders:
        return None
    # Its keys and values have few bytes; they stay as the model computes them.
    config = config.model_copy(update={"kv_schema": "auto"})
    weights = block = 0
    for folder in folders:
        check_draft(folder, model)
        weights += weight_bytes(folder, dtype)
        block += _schema(text_config(folder), dtype, config, device).block_bytes
    return DraftSizes(weights, block)


def schema_of(text: dict[str, Any], config: SageConfig, device: str) -> tuple[str, KVCacheSchema]:
    """Return the type of the weights and the schema of KV blocks.

    Args:
        text: as `text_config` returns it.

    Raises:
        ConfigError: a type that the device or the heads do not have, heads that cannot be shared out, an incomplete
            config.json.
    """
    dtype = _dtype(config.dtype, text, device)
    return dtype, _schema(text, weights_dtype(dtype), config, device)


def _dtype(wanted: str, hf: dict[str, Any], device: str) -> str:
    if device != "cpu":
        if (hf.get("quantization_config") or {}).get("quant_method") != "smooth_quant" or wanted == "float16":
            return wanted
        if wanted != "auto":
            raise ConfigError(f"dtype is {wanted}; LMDeploy computes int8 weights of smooth_quant in float16 on {device}.")
        return "float16"
    if wanted == "float16":
        raise ConfigError("dtype float16 is not available on the CPU device; use float32, bfloat16 or auto.")
    if wanted != "auto":
        return wanted
    stored = hf.get("dtype") or hf.get("torch_dtype")
    return "float32" if stored == "float32" else "bfloat16"


def _schema(hf: dict[str, Any], dtype: str, config: SageConfig, device: str) -> KVCacheSchema:
    """`dtype`: of the model."""
    try:
        heads = int(hf["num_attention_heads"])
        kv_heads = int(hf.get("num_key_value_heads") or heads)
        _check_heads(heads, kv_heads, config.tensor_parallel)
        head_dim, v_head_dim = int(hf.get("head_dim") or hf["hidden_size"] // heads), None
        if hf.get("kv_lora_rank"):  # latent attention: one key for all heads, which holds the value too
            kv_heads, head_dim, v_head_dim = 1, int(hf["kv_lora_rank"]) + int(hf["qk_rope_head_dim"]), 0
        kv_dtype = _kv_dtype(config.kv_schema, dtype, head_dim, v_head_dim, device)
        has_scales = kv_dtype in ("fp8", "int8", "int4")
        return KVCacheSchema(
            block_size=config.block_size,
            num_layers=int(hf["num_hidden_layers"]),
            num_kv_heads=-(-kv_heads // config.tensor_parallel),
            head_dim=head_dim,
            dtype=kv_dtype,
            v_head_dim=v_head_dim,
            scale_dtype=dtype if has_scales else "",
            layout="key_groups" if has_scales and kv_dtype != "fp8" and device == "cpu" else "rows",
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}; is this a language model that LMDeploy knows?") from None


def _kv_dtype(wanted: str, dtype: str, head_dim: int, v_head_dim: int | None, device: str) -> str:
    if wanted in ("auto", dtype):
        return dtype
    if v_head_dim is not None:
        raise ConfigError(f"kv_schema {wanted}: latent attention keeps keys and values in one; leave kv_schema at auto.")
    if device != "cpu" and wanted not in ("int8", "int4"):
        raise ConfigError(
            f"kv_schema {wanted} is not available on {device}: LMDeploy stores keys and values in the model's type, here "
            f"{dtype}, or as int8 or int4. Use one of these, or auto."
        )
    words = {"int8": 4, "int4": 8}.get(wanted, 1)
    if head_dim % words:
        raise ConfigError(f"kv_schema {wanted} needs heads of a multiple of {words} numbers; this model's have {head_dim}.")
    return wanted


def _check_heads(heads: int, kv_heads: int, num_workers: int) -> None:
    """Check what LMDeploy's `ModelConfig.from_hf_config` asserts without a visible message.

    Raises:
        ConfigError: the heads cannot be shared out evenly.
    """
    shared = heads % num_workers == 0
    # Fewer heads of keys and values than workers: each is given to several of them.
    if not shared or (kv_heads % num_workers and num_workers % kv_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"tensor_parallel {num_workers} does not divide this model: it has {heads} attention heads and {kv_heads} "
            f"heads of keys and values. Possible are {', '.join(map(str, fitting))}."
        )


def _fit(config: SageConfig, model: Path, sizes: Sizes) -> Sizes:
    from sagellm.engines.lmdeploy.cpu import operators
    from sagellm.engines.lmdeploy.cpu.runtime import memory_bytes

    available, total = memory_bytes()
    weights = weight_bytes(model, sizes.weights_dtype) + (sizes.draft.weight_bytes if sizes.draft else 0)
    extra = operators.extra_bytes(text_config(model), sizes.weights_dtype, sizes.context_length)
    room = available - weights - extra
    # With tensor parallelism each of the workers on this machine holds its part of every block.
    host_block = sizes.schema.block_bytes * config.tensor_parallel
    block = host_block + (sizes.draft.block_bytes if sizes.draft else 0)
    per_context = -(-sizes.context_length // config.block_size)
    if config.kv_blocks is not None:
        blocks = config.kv_blocks
    elif config.kv_memory_share is not None:
        blocks = int(available * config.kv_memory_share) // block
    else:
        affordable = max(int(available * DEFAULT_CPU_SHARE) // block, per_context + 1)
        blocks = min(sizes.max_batch_size * per_context, affordable)
    blocks = max(blocks, MIN_BLOCKS)
    need = blocks * block + sizes.num_host_blocks * host_block
    if need > room:
        raise CapacityError(
            f"{blocks} KV blocks and {sizes.num_host_blocks} host blocks of {_mib(block)} need {_mib(need)}, the weights "
            f"{_mib(weights)}, the operators {_mib(extra)}; of {_mib(total)} there are {_mib(available)} free. "
            f"Ask for at most {max(0, room // block)} blocks in all, or a shorter --context-length."
        )
    return replace(sizes, num_blocks=blocks)


def weight_bytes(model: Path, dtype: str) -> int:
    """Return the bytes of the weights in `dtype`, whatever type they are stored in. Quantized ones stay as they are."""
    width = 4 if dtype == "float32" else 2
    sizes = weight_sizes(model)
    if sizes is not None:
        return width * sizes[0] + sizes[1]
    stored = sum(file.stat().st_size for file in model.glob("pytorch_model*.bin"))
    return 2 * stored if width == 4 else stored


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
