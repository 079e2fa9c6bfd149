"""The device object that LMDeploy finds under the entry point group `sagellm.devices`.

An object in that group has: `torch_device`, `max_batch_size`, `runtime`, and the methods of `CpuDevice` below. With
`decodes_ragged` it says that its decode steps take several tokens of a sequence, of each another number, as guesses are.
"""

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import is_dataclass
from typing import Any

import torch

from sagellm.core.config import HookConfig
from sagellm.core.errors import ConfigError
from sagellm.core.tasks import end_tasks
from sagellm.engines.lmdeploy.cpu.cache import KEY_GROUP, dtype_of
from sagellm.engines.lmdeploy.cpu.runtime import CpuRuntime, keep_freed_memory, memory_bytes
from sagellm.engines.lmdeploy.sparsity import tell_engine
from sagellm.models.quantized import container_of, quantization_of, to_container

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16")


class CpuDevice:
    """LMDeploy's PyTorch engine on the host's own cores."""

    torch_device = "cpu"
    max_batch_size = 64
    decodes_ragged = True

    def __init__(self) -> None:
        self.runtime = CpuRuntime()
        self._threads: int | None = None
        self._ranks = 1
        self._steppers: weakref.WeakKeyDictionary[Any, _StepThread] = weakref.WeakKeyDictionary()

    def validate(self, config: Any) -> None:
        """Check a `PytorchEngineConfig` whose device type is this device.

        Raises:
            ConfigError: a value this device cannot honour.
        """
        if config.dtype not in DTYPES:
            raise ConfigError(f"dtype {config.dtype!r} does not run on the CPU device; use one of {', '.join(DTYPES)}.")
        if config.quant_policy not in (0, 4, 8):
            raise ConfigError(f"quant_policy {config.quant_policy} is unknown; use 8 or 4 (bits of keys and values), or 0.")
        if config.block_size < 1 or config.block_size & (config.block_size - 1):
            raise ConfigError(f"block_size {config.block_size} is not a power of two; use 16, 32, 64 or 128.")
        if config.quant_policy and config.block_size % KEY_GROUP:
            raise ConfigError(
                f"block_size {config.block_size} is too small for keys of {config.quant_policy} bits; use 16, 32, 64 or 128."
            )
        for name in ("tp", "dp", "ep"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1.")
        for name in ("num_gpu_blocks", "num_cpu_blocks", "max_prefill_token_num"):
            if getattr(config, name) < 0:
                raise ConfigError(f"{name} is {getattr(config, name)}; it must not be negative.")
        if not 0 < config.cache_max_entry_count < 1:
            raise ConfigError(f"cache_max_entry_count {config.cache_max_entry_count} must lie between 0 and 1.")
        self._ranks = config.tp

    def activate(self) -> None:
        """Make this the device of the process."""
        from lmdeploy.pytorch.devices import DeviceContext, get_device_manager

        # The engine asks for its backend in places where no device context is set (sizing the cache, building process
        # groups), so the default context must be ours as well.
        get_device_manager().set_context(DeviceContext(device_type="cpu"))
        keep_freed_memory()
        # The step's thread does the parallel work. OpenMP keeps a pool for every thread that ever did any, and once all
        # pools together have more threads than there are cores it stops spinning between two operators, which makes a
        # forward pass up to half as long again. So the thread that builds the model stays serial.
        if self._threads is None:
            self.use_threads(torch.get_num_threads())
        torch.set_num_threads(1)

    def use_threads(self, threads: int) -> None:
        """Compute threads of the next engine in this process."""
        self._threads = threads

    def ops_backend(self) -> type:
        from sagellm.engines.lmdeploy.cpu.backend import CpuOpsBackend

        return CpuOpsBackend

    def dtype(self, name: str, hf_config: Any) -> str:
        """Resolve 'auto': float32 stays, everything of 16 bits becomes bfloat16 (the CPU has no fast float16)."""
        if name != "auto":
            return name
        stored = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
        return "float32" if str(stored).removeprefix("torch.") == "float32" else "bfloat16"

    def quantization(self, hf_config: Any) -> None:
        """Change `quantization_config` where LMDeploy has no linear layer for the weights; `weights` converts them.

        Raises:
            ModelError: weights that the device cannot compute from.
        """
        given = hf_config
        if "holds" in (getattr(given, "quantization_config", None) or {}):
            return
        found = quantization_of(vars(given))
        # Quantized experts are refused, with the name of the operator that is missing.
        if found is None or getattr(given, "num_local_experts", 0) or getattr(given, "num_experts", 0):
            return
        head_size = getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads
        heads = (given.num_attention_heads, getattr(given, "num_key_value_heads", None) or given.num_attention_heads)
        # Those that ranks share are split; LMDeploy checks whether they can be.
        shared = (given.intermediate_size, *(head_size * number for number in heads))
        sizes = (given.hidden_size, *(max(1, size // self._ranks) for size in shared))
        changed = container_of(found, sizes)
        if changed is not None:
            given.quantization_config = changed | {"original": given.quantization_config}

    def awq_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a model with AWQ weights is computed in, as `dtype` resolved it."""
        return getattr(torch, name)

    def weights(self, tensors: Iterable[tuple[str, torch.Tensor]], model: Any) -> Iterable[tuple[str, torch.Tensor]]:
        """Convert the tensors of a checkpoint for the linear layers that `quantization` chose."""
        config = getattr(getattr(model, "config", None), "quantization_config", None) or {}
        if "original" not in config:
            return tensors
        found = quantization_of({"quantization_config": config["original"]})
        model.sage_orders = getattr(model, "sage_orders", {})
        return to_container(found, config["group_size"], tensors, model.sage_orders)

    def kv_cache_dtype(self, cache_config: Any, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the cache's numbers, `dtype` in a model without a setting of its own."""
        spec = getattr(cache_config, "sage", None)
        wanted = HookConfig.model_validate_json(spec).kv_dtype if spec else ""
        if not wanted:  # an engine without our settings: LMDeploy's own quant_policy counts codes
            return torch.uint8 if cache_config.quant_policy else dtype
        return dtype_of(wanted)

    def as_bytes(self, caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """View floats of 8 bits as bytes: torch's copies by index do not know them."""
        return [one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one for one in caches]

    def window_size(self, size: int) -> int:
        """Keep every block of a model with a sliding window: the attention masks what lies outside.

        LMDeploy's window block manager counts blocks allocated ahead as if they held history and drops one too many, so
        tokens inside the window are lost; it also rules prefix caching out.
        """
        return -1

    def memory(self) -> tuple[int, int]:
        """(available, total) bytes."""
        return memory_bytes()

    def seed(self) -> int:
        """As `torch.seed`, of the host alone: LMDeploy draws one for every step, and torch spends a quarter of a millisecond on
        noting down, with a stack trace, what every kind of GPU would have to do if it were there."""
        return torch.default_generator.seed()

    def to_device(self, value: Any) -> Any:
        """Copy what the engine hands to its agent.

        A move to the CPU would alias the engine's tensors, and the agent advances its inputs in place.
        """
        if isinstance(value, torch.Tensor):
            return value.clone()
        if not is_dataclass(value):
            return value
        moved = copy.copy(value)
        for name, part in vars(value).items():
            if isinstance(part, torch.Tensor):
                setattr(moved, name, part.clone())
        return moved

    def apply_token_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor) -> None:
        """Forbid tokens in place. `logits`: [batch, vocab]; `bitmask`: [batch, ceil(vocab / 32)] int32.

        xgrammar's CPU kernel takes float32 only.
        """
        import xgrammar

        if logits.dtype == torch.float32:
            xgrammar.apply_token_bitmask_inplace(logits, bitmask)
            return
        wide = logits.float()
        xgrammar.apply_token_bitmask_inplace(wide, bitmask)
        logits.copy_(wide)

    async def run_step(self, step: Callable[..., Coroutine], agent: Any, args: tuple, kwargs: dict) -> None:
        """Run one step of a model agent on a thread of its own, so that the event loop keeps serving meanwhile."""
        stepper = self._steppers.get(agent)
        if stepper is None:
            stepper = self._steppers[agent] = _StepThread(asyncio.get_running_loop(), self._threads)
            weakref.finalize(agent, stepper.stop)
        await stepper.run(step, agent, args, kwargs)

    def sample(self, sampling_inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row, [batch], from `logits`, [batch, vocab], to which penalties are applied."""
        from sagellm.engines.lmdeploy.cpu.operators.sampling import sample

        return sample(logits, sampling_inputs)

    def end_steps(self, agent: Any) -> None:
        """The engine of the agent is closed: its thread ends now, not when garbage is collected. Its OpenMP workers would make
        every step of the next engine in this process take twice as long."""
        stepper = self._steppers.pop(agent, None)
        if stepper is not None:
            stepper.stop()
            stepper.join(timeout_s=5)

    def push(self, push: Callable[..., None], agent: Any, args: tuple, kwargs: dict) -> None:
        """Hand a step's output over on the event loop that waits for it."""
        tell_engine(agent.cache_config, *args, **kwargs)
        stepper = self._steppers.get(agent)
        if stepper is None or stepper.home is _running_loop():
            push(agent, *args, **kwargs)
        else:
            stepper.home.call_soon_threadsafe(lambda: push(agent, *args, **kwargs))


class _StepThread:
    """A daemon thread for the steps of one agent, one after the other.

    Rounds of decode steps run natively where they can. All else is LMDeploy's coroutine, on an event loop of this thread.
    """

    def __init__(self, home: asyncio.AbstractEventLoop, threads: int) -> None:
        self.home = home
        self._threads = threads
        self._loop = asyncio.new_event_loop()
        self._steps: queue.SimpleQueue[tuple[asyncio.Future, Callable, Any, tuple, dict] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="sagellm-cpu-step", daemon=True)
        self._thread.start()

    async def run(self, step: Callable[..., Coroutine], agent: Any, args: tuple, kwargs: dict) -> None:
        done = self.home.create_future()
        self._steps.put((done, step, agent, args, kwargs))
        await done

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed since
            self._loop.call_soon_threadsafe(self._loop.stop)  # in the middle of a coroutine
        self._steps.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        # Gradient mode is a property of the thread, and the agent set it on another one.
        with torch.inference_mode():
            while (given := self._steps.get()) is not None:
                self._run(*given)
                del given  # it would keep the agent alive
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()  # a stop that met no coroutine would end the next call
            self._loop.run_until_complete(end_tasks())
        self._loop.close()

    def _run(
        self, done: asyncio.Future, step: Callable[..., Coroutine], agent: Any, args: tuple, kwargs: dict
    ) -> None:  # fmt: skip
        from sagellm.engines.lmdeploy.cpu.decode_round import run_round

        rest, error = None, None
        try:
            rest = None if args else run_round(agent, self.home.call_soon_threadsafe, **kwargs)
            if rest is None:
                self._loop.run_until_complete(step(agent, *args, **kwargs))
        except Exception as raised:
            error = raised
        try:
            self.home.call_soon_threadsafe(_settle, done, error)
            if rest is not None:
                rest()
        except Exception as raised:
            if not self.home.is_closed():  # else the engine was closed in the middle of a step
                logger.warning("a step that ran ahead failed: %s", raised)


def _settle(done: asyncio.Future, error: Exception | None) -> None:
    if done.done():  # cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


CPU_DEVICE = CpuDevice()
