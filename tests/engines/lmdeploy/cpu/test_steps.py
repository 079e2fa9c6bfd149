"""Steps run on a thread of their own, draw their own seeds, and end with their engine."""

import asyncio
import threading

import torch
from lmdeploy import sage_device

from sagellm.core.config import SageConfig
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.cpu.device import CPU_DEVICE
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from tests.engines.lmdeploy.pd.pair import wait_until
from tests.reference import make_prompts


def test_an_engine_is_closed_in_the_middle_of_a_step(model_folder):
    """A step that only stopped would be destroyed when garbage is collected, with a complaint, while something else runs."""
    engine = LMDeployEngine(SageConfig(model=model_folder("llama"), device="cpu", threads=1, block_size=16, kv_blocks=64))
    agent = engine.engine.executor.model_agent
    forward, seen = agent._async_model_forward, []

    async def in_the_middle(*args, **kwargs):
        seen.append(threading.current_thread().name)
        try:
            await asyncio.sleep(1000)
            return await forward(*args, **kwargs)
        finally:  # an end that takes a while
            try:
                await asyncio.sleep(0.5)
            finally:
                seen.append("ended")

    agent._async_model_forward = in_the_middle
    answer = asyncio.run_coroutine_threadsafe(_ask(engine), engine._loop)
    wait_until(lambda: seen)
    thread = next(each for each in threading.enumerate() if each.name == seen[0])
    answer.cancel()  # as if its client had left: the engine is not to wait for it
    engine.close()
    assert seen == ["sagellm-cpu-step", "ended"]
    assert not thread.is_alive()


async def _ask(engine):
    instance = engine.engine.create_instance()
    async for _ in instance.async_stream_infer(next(engine._sessions), make_prompts((8,))[0]):
        pass


def test_a_step_seeds_no_device_that_is_not_there(model_folder, monkeypatch):
    """torch would note down for each of them, with a stack trace, what it is to do when it comes."""
    asked = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    torch.seed()
    assert len(asked) == 1
    config = SageConfig(model=model_folder("llama"), device="cpu", threads=1, block_size=16, kv_blocks=64)
    with LMDeployEngine(config) as engine:
        answers = engine.generate(make_prompts((8, 20)), SamplingParams(max_new_tokens=6, temperature=1.0, ignore_eos=True))
    assert [len(each.token_ids) for each in answers] == [6, 6]
    assert len(asked) == 1


def test_seeds_differ_and_a_device_of_lmdeploys_own_takes_those_of_torch(monkeypatch):
    name_space = sage_device.with_runtime(torch)
    monkeypatch.setattr(sage_device, "active", CPU_DEVICE)
    seeds = {name_space.seed() for _ in range(8)}
    assert len(seeds) == 8
    assert torch.initial_seed() in seeds
    monkeypatch.setattr(sage_device, "active", None)
    monkeypatch.setattr(torch, "seed", lambda: 17)
    assert name_space.seed() == 17
