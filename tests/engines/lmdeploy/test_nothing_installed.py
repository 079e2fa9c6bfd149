"""A patched LMDeploy whose configuration asks for nothing behaves as if the patches were not there."""

import asyncio
import subprocess
import sys

from tests.engines.lmdeploy.test_exactness import CROWD, answers

PROGRAM = """
import sys
import lmdeploy.pytorch.engine
from lmdeploy.messages import PytorchEngineConfig
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.paging.scheduler import Scheduler

def ours():
    return sorted(name for name in sys.modules if name.startswith("sagellm"))

assert PytorchEngineConfig().sage is None
print(ours())
cache = CacheConfig(max_batches=4, block_size=16, num_cpu_blocks=4, num_gpu_blocks=16)
scheduler = Scheduler(SchedulerConfig(max_batches=4, max_session_len=128), cache)
assert scheduler.sage is None and scheduler.block_trie.sage is None
assert scheduler.block_manager.allocator.sage is None
assert scheduler.schedule_metrics.sage is None
print(ours())
"""

def test_neither_lmdeploy_alone_nor_a_scheduler_without_hooks_imports_sagellm():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-2:] == ["[]", "[]"]


def test_an_engine_without_hooks_gives_the_same_output(start_engine, reference, model_folder):
    from lmdeploy.messages import GenerationConfig, PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine

    async def run():
        config = PytorchEngineConfig(
            device_type="cpu", dtype="float32", block_size=16, num_gpu_blocks=30, max_batch_size=8, prefill_interval=1,
            enable_prefix_caching=True, sage=None,
        )  # fmt: skip
        engine = Engine.from_pretrained(str(model_folder("llama")), engine_config=config)
        engine.start_loop()
        assert engine.scheduler.sage is None
        assert engine.scheduler.block_trie.sage is None

        async def one(session, prompt):
            instance, tokens = engine.create_instance(), []
            settings = GenerationConfig(max_new_tokens=40, top_k=1, ignore_eos=True)
            async for out in instance.async_stream_infer(session, prompt, gen_config=settings):
                tokens.extend(out.token_ids)
            await instance.async_end(session)
            return tuple(tokens)

        result = await asyncio.gather(*[one(session, prompt) for session, prompt in enumerate(CROWD)])
        metrics = engine.scheduler.schedule_metrics
        engine.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(rest, timeout=10)
        return result, metrics

    result, metrics = asyncio.run(run())
    assert metrics.sage is None
    assert result == reference(CROWD, 40) == answers(start_engine(kv_blocks=30), CROWD)
