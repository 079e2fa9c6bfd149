"""Engines of the kit: ours, LMDeploy's with nothing of ours around it, and transformers to compare with."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import Place
from benchmarks.hook_overhead import close_bare

__all__ = ["Engine", "bare_engine", "transformers_answers"]


class Engine:
    """Our engine of a part, closed at the end."""

    def __init__(self, place: Place, model: Path, **settings: Any) -> None:
        from sagellm.core.config import SageConfig
        from sagellm.engines.lmdeploy.engine import LMDeployEngine

        sizes = {"kv_blocks": 256, "max_batch_size": 16, "context_length": 1024}
        known = {"device": place.device, "dtype": place.dtypes[0]} | sizes
        self._engine = LMDeployEngine(SageConfig(**known | settings), model)

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        return [list(each.token_ids) for each in self._generate(prompts, num_tokens)]

    def timed(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[list[int]], float]:
        """Answers, and seconds to the first token of the first one."""
        found = self._generate(prompts, num_tokens)
        return [list(each.token_ids) for each in found], found[0].token_s[0]

    def report(self) -> dict[str, Any]:
        return self._engine.hooks.report()

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Any:
        from sagellm.engines.base import SamplingParams

        return self._engine.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()


def transformers_answers(
    place: Place, dtype: str, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], model: Path | None = None
) -> tuple[list[list[int]], float]:
    """Greedy answers of transformers, and how far the worst token of `ours` lies under the best logit there."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model or place.model, dtype=getattr(torch, dtype)).to(place.device)
    theirs, gap = [], 0.0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, ours, strict=True):
            ids, new = torch.tensor([prompt], device=place.device), len(answer)
            found = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            theirs.append(found[0, len(prompt) :].tolist())
            logits = loaded(torch.tensor([[*prompt, *answer]], device=place.device)).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(answer, device=place.device)[:, None])[:, 0]
            gap = max(gap, float((logits.amax(1) - chosen).max()))
    return theirs, gap


def bare_engine(device: str, model: str, dtype: str, most: int, tree: str | None, plugin: str | None) -> Any:
    """LMDeploy's engine with random weights and nothing of ours around it; answers the seconds of a round.

    Args:
        most: sequences at once.
        tree: folder of the LMDeploy to use in place of the patched one.
        plugin: name of a plug-in of the patched one.
    """
    if tree is not None:
        sys.path.insert(0, tree)
    os.environ["OMP_NUM_THREADS"] = "2"
    import torch
    from lmdeploy.messages import GenerationConfig, PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine, model_agent

    def fill(model: Any, *_: Any, **__: Any) -> None:
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)

    model_agent.load_model_weights = fill  # 15 GB on a disk would take most of the kit's time
    options = {}
    if plugin is not None:
        from sagellm.core.config import HookConfig, PluginSpec

        options["sage"] = HookConfig(plugins=(PluginSpec(name=plugin),)).model_dump_json()
    config = PytorchEngineConfig(
        device_type=device, dtype=dtype, block_size=64, num_gpu_blocks=1024, max_batch_size=most, session_len=4096,
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        engine = Engine.from_pretrained(model, engine_config=config)
        engine.start_loop()
        return engine

    engine, sessions = loop.run_until_complete(start()), iter(range(10**9))

    async def one(length: int, new: int) -> list[float]:
        """Times of the tokens of one request."""
        session, instance, times = next(sessions), engine.create_instance(), []
        prompt = [(7 * session + 3 * place) % 400 + 50 for place in range(length)]
        sampling = GenerationConfig(max_new_tokens=new, top_k=1, ignore_eos=True, stop_token_ids=[])
        async for output in instance.async_stream_infer(session, prompt, gen_config=sampling):
            times += [time.perf_counter()] * len(output.token_ids)
        await instance.async_end(session)
        return times

    async def batch(size: int, length: int, new: int) -> list[list[float]]:
        return await asyncio.gather(*(one(length, new) for _ in range(size)))

    def answer(batches: Sequence[int]) -> dict[str, float]:
        start_s = time.perf_counter()
        found = {"first_token_1024": loop.run_until_complete(batch(1, 1024, 1))[0][0] - start_s}
        for size in batches:
            every = loop.run_until_complete(batch(size, 64, 97))
            begin_s, end_s = max(each[0] for each in every), max(each[-1] for each in every)
            found[f"step_{size}"] = (end_s - begin_s) / 96
        return found

    answer.close = lambda: close_bare(engine, loop)  # type: ignore[attr-defined]
    return answer
