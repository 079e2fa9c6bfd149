"""A contestant: the real engine under one strategy, or under none, in a process of its own."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.models.real_text import model_folder
from benchmarks.scheduling.workloads import Job

STRATEGY = "sagellm.scheduler_ir.strategy_plugin:StrategyPlugin"
ENGINE = "engine"  # LMDeploy's own scheduler, nothing asked
MODEL_THREAD = "sagellm-cpu-step"


def write_shape(folder: Path, shape: str) -> Path:
    """Return a model: random weights in bfloat16 of a Qwen2 of 0.5B parameters, or of 72 million, or the one of that name."""
    from benchmarks.cpu_engine import write_half_billion
    from sagellm.demo_model.random_model import write_random_model

    if shape == "0.5B":
        return write_half_billion(folder)
    if shape != "small":
        return model_folder(shape)
    return write_random_model(
        folder / "qwen2-small", architecture="qwen2", hidden_size=640, num_layers=12, num_heads=10, num_kv_heads=2,
        intermediate_size=1728, vocab_size=32000, tie_embeddings=True, dtype="bfloat16", max_position_embeddings=32768,
    )  # fmt: skip


def build(model: str, threads: int, strategy: str, options: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Answers {"jobs": [...], "record": path} with the times of every token, CPU seconds and the number of steps."""
    from sagellm.core.config import PluginSpec, SageConfig
    from sagellm.core.service import ServiceRequest
    from sagellm.engines.base import SamplingParams
    from sagellm.engines.lmdeploy.engine import LMDeployEngine

    spec = PluginSpec(name=STRATEGY, options={"strategy": strategy, "options": options})
    sizes = {"context_length": 8192, "max_batch_size": 16, "block_size": 64, "kv_blocks": 640, "prefix_caching": False}
    plugins = () if strategy == ENGINE else (spec,)
    switch_s = settings.pop("switch_s", 0.0)
    config = SageConfig(device="cpu", threads=threads, dtype="bfloat16", plugins=plugins, **sizes | settings)
    engine = LMDeployEngine(config, Path(model))
    if switch_s:
        switching(engine.engine, switch_s)
    warm_up = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for length in (16, 64, 512, 2048):
        engine.generate([[5] * length], warm_up)

    def answer(jobs: list[list[Any]]) -> dict[str, Any]:
        wanted = [Job(*job) for job in jobs]
        params = [
            SamplingParams(
                max_new_tokens=job.new_tokens, ignore_eos=True, service=ServiceRequest(**job.service), adapter=job.adapter
            )
            for job in wanted
        ]
        before_s, model_s, start_s = time.process_time(), _model_cpu_s(), time.perf_counter()
        found = engine.generate([job.prompt for job in wanted], params, [job.arrival_s for job in wanted])
        report, cpu_s = engine.hooks.report(), time.process_time() - before_s
        return {
            "host_cpu_s": cpu_s - (_model_cpu_s() - model_s),
            "token_s": [one.token_s for one in found], "tokens": [one.token_ids for one in found],
            "cpu_s": cpu_s, "wall_s": time.perf_counter() - start_s,
            "faults": report["faults"], "preempted": report["preempted"], "chunks": report["chunks"],
        }  # fmt: skip

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


def switching(engine: Any, switch_s: float) -> None:
    """Let each step of LMDeploy's engine wait as if the device had room for the weights of one model.

    Args:
        switch_s: seconds to load the weights of a model that a step needs and that is not there.
    """
    create, loaded = engine.create_model_inputs, [""]

    def after_loading(messages: Any, is_prefill: bool) -> Any:
        needed = {message.adapter_name for message in messages if message.adapter_name}
        missing = sorted(needed - {loaded[0]})
        if missing:
            loaded[0] = missing[-1]
            time.sleep(switch_s * len(missing))
        return create(messages, is_prefill)

    engine.create_model_inputs = after_loading


def _model_cpu_s() -> float:
    """CPU time of the thread that computes the steps, which scatters far more than choosing them takes."""
    (number,) = [thread.native_id for thread in threading.enumerate() if thread.name == MODEL_THREAD]
    return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id == number)
