"""LMDeploy's PyTorch engine in this process, with its hooks and plug-ins."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.comm_backend.config import RENDEZVOUS
from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.collectives import GROUP
from sagellm.core.config import HookConfig, PDHooks, PluginSpec, SageConfig
from sagellm.core.errors import ConfigError, EngineError, PatchError
from sagellm.core.registry import find_plugin
from sagellm.core.running import Branches, Request, Watch
from sagellm.core.tasks import end_tasks
from sagellm.engines.base import BaseEngine, EngineInfo, Generation, SamplingParams
from sagellm.engines.lmdeploy import patch_state
from sagellm.engines.lmdeploy.architecture import check_architecture
from sagellm.engines.lmdeploy.capabilities import pytorch_capabilities
from sagellm.engines.lmdeploy.device_settings import (
    check_comm_backend,
    check_compute,
    check_prefix_attention,
    executor_of,
    packed_weights_of,
    set_threads,
)
from sagellm.engines.lmdeploy.kv_tiers import check_sizes
from sagellm.engines.lmdeploy.layout import layout_of, weights_of
from sagellm.engines.lmdeploy.pooling import POOLINGS, PoolingKind, embed_prompt
from sagellm.engines.lmdeploy.ray_workers import check_ray, set_ray
from sagellm.engines.lmdeploy.running import RunningRequests, check_params, finish_reason
from sagellm.engines.lmdeploy.settings_plugins import (
    all_plugins,
    check_no_window,
    check_settings_plugins,
    check_workers_policy,
    sparsity_spec,
    speculative_spec,
)
from sagellm.engines.lmdeploy.sizing import Sizes, gpu_share, resolve_device, size_engine
from sagellm.engines.lmdeploy.speculative.methods import speculative_config
from sagellm.engines.lmdeploy.worker_processes import load_early
from sagellm.engines.lmdeploy.workers import building, failure_of
from sagellm.models import find_model, prepare_model

if TYPE_CHECKING:
    import numpy as np

    from sagellm.accel.quantization.base import BaseQuantizer
    from sagellm.scheduler_ir.plan import ExecutorAPI

# One decode step of a CPU takes long enough that scheduling between steps costs nothing, and a new request must not wait
# for a whole round of steps; on a GPU LMDeploy's own value stays.
CPU_DECODE_ROUND = 1
DECODE_ROUND = 16  # LMDeploy's own default

# More prompt tokens at once only help until the cores are busy. On a CPU they are at a few hundred; beyond, activations
# leave the caches and each layer's product runs slower, and the first request of a batch waits for the last.
PREFILL_TOKENS, CPU_PREFILL_TOKENS = 4096, 512

FEED = "sagellm.engines.lmdeploy.pd.feed:Feed"  # measures steps for the proxy of a prefill/decode group


def require_patched() -> None:
    """Raises PatchError, naming the command that mends it, unless every patch is applied."""
    state = patch_state()
    if state.state != "applied":
        raise PatchError(f"LMDeploy in {state.target} is {state.state}. Run: {state.command}")


def hook_config(config: SageConfig, run_dir: Path | None = None, pd: PDHooks | None = None) -> HookConfig:
    feed = () if pd is None or pd.role is None else (PluginSpec(name=FEED),)
    return HookConfig(
        plugins=(*all_plugins(config), *feed), time_limit_s=config.plugin_time_limit_s,
        hold_limit_s=config.hold_limit_s, record=config.record, run_dir=run_dir,
        comm_metrics=config.comm_metrics, speculative=speculative_spec(config),
        sparsity=sparsity_spec(config), pd=pd, compute=config.compute, prefix_attention=config.prefix_attention,
        comm_backend=None if config.comm_backend == GROUP else config.comm_backend, comm_options=config.comm_options,
    )


def build_engine_config(
    config: SageConfig, sizes: Sizes, device: str, hooks: HookConfig, model: Path | None = None
) -> Any:
    """LMDeploy's `PytorchEngineConfig`. `model`: what blocks are computed with, for those who keep their bytes."""
    from lmdeploy.messages import PytorchEngineConfig

    for spec in hooks.plugins:  # a wrong name must fail here, not in the engine process
        find_plugin(spec.name)
    check_sizes(config, sizes)
    check_comm_backend(config, device)
    check_ray(config)
    known: dict[str, Any] = {
        "block_bytes": sizes.schema.block_bytes, "kv_dtype": sizes.schema.dtype, "comm_device": device
    }  # fmt: skip
    if model is not None:
        check_architecture(model, device, sizes.weights_dtype)
        check_compute(config, device, sizes.weights_dtype)
        check_prefix_attention(config, device)
        check_no_window(config, model)
        check_workers_policy(config, model, device, sizes.weights_dtype, sizes.schema.head_dim)
        if config.weights == "packed":
            known["packed_weights"] = packed_weights_of(config, model, device)
        known["model"] = config.model_name or model.resolve().name
        folder = config.kv.disk if config.kv is not None else None
        if folder is not None or config.plugins:  # no other setting keeps bytes, and reading all weights takes a while
            known["layout"] = layout_of(model, config, sizes, device, folder or default_cache_dir())
        if hooks.pd is not None and hooks.pd.role is not None:
            weights = weights_of(model, config, sizes, folder or default_cache_dir())
            known["pd"] = hooks.pd.model_copy(update={"weights": weights})
    hooks = hooks.model_copy(update=known)
    default_round = CPU_DECODE_ROUND if device == "cpu" else DECODE_ROUND
    options: dict[str, Any] = {"prefill_interval": config.decode_round or default_round}
    if device != "cpu" and (config.kv_memory_share is not None or sizes.draft is not None):
        options["cache_max_entry_count"] = gpu_share(config.kv_memory_share, sizes)
    if hooks.pd is not None and hooks.pd.role is not None:
        from lmdeploy.pytorch.disagg.config import EngineRole

        options["role"] = EngineRole[hooks.pd.role.capitalize()]
    return PytorchEngineConfig(
        dtype=sizes.dtype,
        tp=config.tensor_parallel,
        session_len=sizes.context_length,
        max_batch_size=sizes.max_batch_size,
        block_size=config.block_size,
        num_gpu_blocks=sizes.num_blocks,
        num_cpu_blocks=sizes.num_host_blocks,
        max_prefill_token_num=config.max_prefill_tokens or (CPU_PREFILL_TOKENS if device == "cpu" else PREFILL_TOKENS),
        enable_prefix_caching=config.prefix_caching,
        quant_policy=sizes.quant_policy,
        device_type=device,
        distributed_executor_backend=executor_of(config, device),
        logprobs_mode="raw_logprobs",
        sage=hooks.model_dump_json(),
        **options,
    )


def check_engine(config: SageConfig) -> None:
    """Raise what `LMDeployEngine` raises before it loads weights. With `quantization` the quantized copy is made."""
    require_patched()
    check_settings_plugins(config)
    check_quantization(config)
    device = resolve_device(config.device)
    model = prepare_weights(config, prepare_model(find_model(config.model)))
    sizes = size_engine(config, model, device)
    build_engine_config(config, sizes, device, hook_config(config), model)


def check_quantization(config: SageConfig) -> "BaseQuantizer | None":
    """Return the method that weights are quantized by, or None.

    Raises:
        ConfigError, QuantizationError: it is unknown, its options are invalid, or other settings contradict it.
    """
    if config.quantization is None:
        if config.quantization_options:
            raise ConfigError("quantization_options needs quantization; name a method.")
        return None
    from sagellm.accel.quantization.registry import make_quantizer

    if config.weights == "packed":
        raise ConfigError("weights packed keeps a GGUF file's own quantization; leave out weights, or quantization.")
    if config.engine == "turbomind":
        raise ConfigError("quantization is a setting of the PyTorch engine; give TurboMind a folder of `sagellm quantize`.")
    return make_quantizer(config.quantization, **config.quantization_options)


def prepare_weights(config: SageConfig, model: Path) -> Path:
    """Return the folder to load: the model's, or with `quantization` a quantized copy of it, made by the first call.

    Raises:
        QuantizationError: the method cannot quantize the model.
    """
    quantizer = check_quantization(config)
    if quantizer is None:
        return model
    from sagellm.accel.quantization.cache import quantized_copy

    return quantized_copy(model, quantizer)


class LMDeployEngine(BaseEngine):
    """One engine on a thread with an event loop of its own. `pd`: what it is of a prefill/decode group.

    Raises:
        PatchError, ConfigError, CapacityError, PluginError, PolicyError, TierError, SpeculationError: at construction,
            before anything is loaded.
    """

    def __init__(self, config: SageConfig, model: Path | None = None, pd: PDHooks | None = None) -> None:
        require_patched()
        check_settings_plugins(config)
        device = resolve_device(config.device)
        model = prepare_weights(config, prepare_model(find_model(model or config.model)))
        sizes = size_engine(config, model, device)
        set_threads(config, device)
        if device == "cpu" and executor_of(config, device) == "mp":
            load_early()
        set_ray(config)
        run_dir = None
        if config.tensor_parallel > 1:  # workers leave their counters there; they can be read after the end of the engine
            run_dir = Path(tempfile.mkdtemp(prefix="sagellm-"))
            weakref.finalize(self, shutil.rmtree, run_dir, ignore_errors=True)
        engine_config = build_engine_config(config, sizes, device, hook_config(config, run_dir, pd), model)
        logging.getLogger("lmdeploy").setLevel(config.log_level)
        self._model, self._device = model, device
        self._sessions = itertools.count()
        # Built here, not on the loop's thread: with several workers LMDeploy installs a signal handler, which Python
        # allows on the main thread only.
        self.engine = _build(model, engine_config, speculative_config(config))
        grammars = own_grammars(self.engine)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sagellm-engine", daemon=True)
        self._thread.start()
        self._running = RunningRequests(
            self.engine, self._on_loop, lambda: next(self._sessions), Watch(self._check_loop), self.engine.max_session_len - 1,
            grammars=grammars, guessing=lambda: self.hooks.speculation,
        )  # fmt: skip
        self._on_loop(self._start())
        self.info = _engine_info(device, sizes, self.engine, model)

    @property
    def hooks(self) -> Any:
        """The scheduler's `SchedulerHooks`."""
        return self.engine.scheduler.sage

    @property
    def executor(self) -> "ExecutorAPI":
        """Executor of this engine: takes plans from any thread, and carries out the decisions of the strategy.

        Raises:
            ConfigError: the engine has no strategy, so that LMDeploy's own scheduler decides alone.
        """
        from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin

        for _, plugin in self.hooks._host.plugins:
            if isinstance(plugin, StrategyPlugin):
                return plugin
        raise ConfigError("this engine has no executor; build it with a strategy, for example strategy='fifo'.")

    def exchange_policy(self, policy: str, tier: str = "gpu", **options: Any) -> str:
        """Let another eviction policy choose on a tier from now on, between two steps; requests go on.

        Args:
            policy: a name, or `module:Class`.
            tier: gpu, cpu or nvme.
            options: of the policy.

        Returns:
            Name of the former policy.

        Raises:
            PolicyError: no such tier or policy, or invalid options; nothing has changed.
            PluginError: the engine was built without `kv`.
        """

        async def exchange() -> str:
            return self.hooks.exchange_policy(tier, policy, options)

        return self._on_loop(exchange())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        delays_s: Sequence[float] | None = None,
    ) -> list[Generation]:
        every = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        delays = list(delays_s) if delays_s is not None else [0.0] * len(prompts)
        check_params(every)
        return self._on_loop(self._generate(prompts, every, delays))

    def start(self, prompt: Sequence[int], params: SamplingParams | None = None, keep: bool = False) -> Request:
        return self._running.start(prompt, params, keep)

    def fork(
        self, request: Request, prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None, num_tokens: int | None = None,
    ) -> Branches:  # fmt: skip
        return self._running.fork(request, prompts, params, num_tokens)

    @property
    def group_address(self) -> str:
        """Address of the control connections of this engine, host:port; it must be one of a group.

        Raises:
            EngineError: it takes none; its log says why.
        """
        while not self.hooks.pd.address:  # they come with the first turn of its loop
            self._check_loop()
            time.sleep(0.01)
        return self.hooks.pd.address

    def connect_peer(self, engine_id: str, address: str) -> None:
        """Connect to an engine that this one reads keys and values from.

        Raises:
            PeerError: it cannot be reached, or does not fit.
        """
        self._on_loop(self.hooks.pd.connect_peer(engine_id, address))

    def progress(self) -> float:
        """Return the seconds that steps have taken so far. From any thread, without a wait.

        Raises:
            EngineError: the engine works no more.
        """
        self._check_loop()
        return self.hooks.step_s

    def prompt_logits(self, prompt: Sequence[int]) -> "np.ndarray":
        longest = self.engine.max_session_len - 1
        if not 0 < len(prompt) <= longest:
            raise EngineError(f"prompt_logits got {len(prompt)} tokens; allowed are 1 to {longest}.")
        return self._on_loop(self._prompt_logits(list(prompt))).float().numpy()

    def embed(
        self, prompts: Sequence[Sequence[int]], pooling: PoolingKind = "mean", normalize: bool = True
    ) -> "np.ndarray":
        import numpy as np

        if pooling not in POOLINGS:
            raise EngineError(f"pooling {pooling!r}; allowed are {', '.join(POOLINGS)}.")
        longest = self.engine.max_session_len - 1
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= longest:
                raise EngineError(f"prompts[{number}] has {len(prompt)} tokens; allowed are 1 to {longest}.")
        return np.stack(self._on_loop(self._embed(prompts, pooling, normalize)))

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> str:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._model)
        prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        params = params or SamplingParams()
        if not params.stop_token_ids and tokenizer.eos_token_id is not None:
            params = SamplingParams(**{**_fields(params), "stop_token_ids": (tokenizer.eos_token_id,)})
        answer = self.generate([prompt], params)[0].token_ids
        return tokenizer.decode(answer, skip_special_tokens=True)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if self.hooks is not None:
            self.hooks.close()
        self._loop.call_soon_threadsafe(self.engine.close)
        # That LMDeploy's loop ends is no fault now.
        asyncio.run_coroutine_threadsafe(end_tasks(grace_s=5.0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        end_steps(self.engine, self._device)

    async def _start(self) -> None:
        self.engine.start_loop()

    async def _generate(self, prompts: Any, params: list[SamplingParams], delays: list[float]) -> list[Generation]:
        start = time.perf_counter()
        tasks = [self._one(p, q, d, start) for p, q, d in zip(prompts, params, delays, strict=True)]
        return await asyncio.gather(*tasks)

    async def _one(self, prompt: Any, params: SamplingParams, delay_s: float, start: float) -> Generation:
        if delay_s:
            await asyncio.sleep(delay_s)
        start += delay_s
        tokens: list[int] = []
        times: list[float] = []
        async for found, _ in self._running.stream(next(self._sessions), prompt, params):
            tokens.extend(found)
            times.extend([time.perf_counter() - start] * len(found))
        return Generation(tuple(tokens), finish_reason(tokens, params), tuple(times))

    async def _prompt_logits(self, prompt: list[int]) -> Any:
        from lmdeploy.messages import GenerationConfig

        session, instance, logits = next(self._sessions), self.engine.create_instance(), None
        # Sampling works on the last row in place: any other temperature would scale it.
        config = GenerationConfig(max_new_tokens=0, output_logits="all", temperature=1.0, top_k=1)
        try:
            async for output in instance.async_stream_infer(session, prompt, gen_config=config):
                logits = output.logits if output.logits is not None else logits
        finally:
            await instance.async_end(session)
        if logits is None:
            raise EngineError("the engine gave no scores for this prompt; its log says why.")
        return logits

    async def _embed(self, prompts: Any, pooling: PoolingKind, normalize: bool) -> "list[np.ndarray]":
        tasks = [embed_prompt(self.engine, next(self._sessions), list(each), pooling, normalize) for each in prompts]
        return await asyncio.gather(*tasks)

    def _on_loop(self, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while True:
            try:
                return future.result(timeout=1.0)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                try:
                    self._check_loop()
                except EngineError:
                    future.cancel()
                    raise

    def _check_loop(self) -> None:
        """Raises EngineError: LMDeploy's loop has ended."""
        loop_task = getattr(getattr(self, "engine", None), "_loop_main", None)
        if loop_task is not None and loop_task.done():
            why = failure_of(self.engine.executor) or "the engine loop has stopped"
            raise EngineError(f"{why}; its log says why.") from None


def own_grammars(engine: Any) -> Any:
    """Give an engine states of grammars of its own, and return their keeper; None if its workers keep them.

    LMDeploy keeps one dictionary for all engines of a process, by request numbers that they share.
    """
    grammars = getattr(_agent_of(engine), "guided_decoding_manager", None)
    if grammars is not None:
        grammars.processors = {}
    return grammars


def end_steps(engine: Any, device: str) -> None:
    """End the thread that computes the steps of an engine which is closed."""
    from lmdeploy import sage_device

    found, agent = sage_device.find(device), _agent_of(engine)
    if found is not None and agent is not None:
        found.end_steps(agent)


def _agent_of(engine: Any) -> Any:
    """Return LMDeploy's model agent of an engine without workers."""
    return getattr(engine.executor, "model_agent", None)


def _build(model: Path, engine_config: Any, speculative: Any = None) -> Any:
    from lmdeploy.pytorch.engine import Engine

    if engine_config.tp > 1 and threading.current_thread() is not threading.main_thread():
        raise EngineError("tensor_parallel above 1 needs the main thread; build the engine there.")
    with _own_rendezvous(), building():
        return Engine.from_pretrained(str(model), engine_config=engine_config, speculative_config=speculative)


@contextlib.contextmanager
def _own_rendezvous() -> Iterator[None]:
    """Let LMDeploy choose the address at which the workers meet, and take it out of the environment again.

    LMDeploy keeps an address that it finds there, and leaves the one that it chose. Two engines that start from one
    environment would meet at one address and wait for each other.
    """
    kept = {name: os.environ.pop(name) for name in RENDEZVOUS if name in os.environ}
    try:
        yield
    finally:
        for name in RENDEZVOUS:
            os.environ.pop(name, None)
        os.environ.update(kept)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}


def _engine_info(device: str, sizes: Sizes, engine: Any, model: Path) -> EngineInfo:
    import lmdeploy

    from sagellm.accel.quantization.profile import PROFILE_NAME, QuantizationProfile

    capabilities = pytorch_capabilities(device)
    blocks = engine.cache_config.num_gpu_blocks
    profile = QuantizationProfile.read(model) if (model / PROFILE_NAME).is_file() else None
    return EngineInfo("lmdeploy.pytorch", lmdeploy.__version__, device, sizes.schema, blocks, capabilities, profile)
