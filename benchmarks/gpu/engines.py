"""Engines of the kit: ours, LMDeploy's with nothing of ours around it, and transformers to compare with."""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.place import Place
from benchmarks.hook_overhead import close_bare

__all__ = ["Engine", "bare_engine", "gaps", "rounded_twin", "shipped_engine", "transformers_answers"]


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

    def step_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds of a decode step, in the mean: by how much longer answers of `num_tokens` take than those of one token.

        Arrivals of tokens do not tell: LMDeploy holds answers back while it launches the next steps.
        """
        last_s = [max(each.token_s[-1] for each in self._generate(prompts, count)) for count in (1, num_tokens)]
        return (last_s[1] - last_s[0]) / (num_tokens - 1)

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
    theirs = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, ours, strict=True):
            ids = torch.tensor([prompt], device=place.device)
            found = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=len(answer), eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            theirs.append(found[0, len(prompt) :].tolist())

        def scores(tokens: list[int]) -> np.ndarray:
            return loaded(torch.tensor([tokens], device=place.device)).logits[0].float().cpu().numpy()

        return theirs, float(gaps(scores, prompts, ours).max())


def gaps(
    scores: Callable[[list[int]], np.ndarray], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> np.ndarray:
    """How far each token of greedy answers lies under the best logit.

    Args:
        scores: logits [tokens, vocabulary] of a text, those after each token.
    """
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = scores([*prompt, *answer])[len(prompt) - 1 : -1]
        found.append(logits.max(1) - logits[range(len(answer)), list(answer)])
    return np.concatenate(found)


def rounded_twin(model: Path, folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Logits of a quantized folder in transformers, in float32, whose linear layers round their inputs as LMDeploy's on a GPU.

    Args:
        model: the folder that was quantized.
        folder: INT8 weights in the layout `smooth_quant`, or FP8 ones in blocks of 128 x 128.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")

    def rounded(x: torch.Tensor, most: float, kind: torch.dtype) -> torch.Tensor:
        scales = x.abs().amax(-1, keepdim=True) / most
        scaled = x / scales
        return (scaled.round() if kind == torch.int8 else scaled.to(kind).float()) * scales

    def in_int8(linear: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return rounded(inputs[0], 127, torch.int8)

    def in_fp8(linear: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return rounded(inputs[0].unflatten(-1, (-1, 128)), 448, torch.float8_e4m3fn).flatten(-2)

    for name, module in loaded.named_modules():
        if not hasattr(module, "weight"):
            continue
        weight = tensors.get(f"{name}.weight")
        if weight is None:  # an output layer tied to the embeddings
            continue
        if (scale := tensors.get(f"{name}.scale")) is not None:
            weight = weight.float() * scale
            module.register_forward_pre_hook(in_int8)
        elif (scale := tensors.get(f"{name}.weight_scale_inv")) is not None:
            weight = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            module.register_forward_pre_hook(in_fp8)
        module.weight.data = weight.float()

    def scores(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return loaded(torch.tensor([tokens])).logits[0].numpy()

    return scores


def shipped_engine(device: str, model: str, dtype: str, tree: str) -> Any:
    """LMDeploy's engine of a folder `tree`; answers pairs of prompts and a number of tokens with greedy tokens."""
    engine = _Bare(device, model, dtype, 16, tree)

    def answer(request: tuple[Sequence[Sequence[int]], int]) -> list[list[int]]:
        return [tokens for tokens, _ in engine.batch(*request)]

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


def bare_engine(device: str, model: str, dtype: str, most: int, tree: str | None, plugin: str | None) -> Any:
    """LMDeploy's engine with random weights and nothing of ours around it; answers the seconds of a round.

    Args:
        most: sequences at once.
        tree: folder of the LMDeploy to use in place of the patched one.
        plugin: name of a plug-in of the patched one.
    """
    options = {}
    if plugin is not None:
        from sagellm.core.config import HookConfig, PluginSpec

        options["sage"] = HookConfig(plugins=(PluginSpec(name=plugin),)).model_dump_json()
    engine, numbers = _Bare(device, model, dtype, most, tree, has_weights=False, **options), itertools.count()

    def batch(size: int, length: int, new: int) -> list[list[float]]:
        prompts = [[(7 * next(numbers) + 3 * place) % 400 + 50 for place in range(length)] for _ in range(size)]
        return [times for _, times in engine.batch(prompts, new)]

    def answer(batches: Sequence[int]) -> dict[str, float]:
        start_s = time.perf_counter()
        found = {"first_token_1024": batch(1, 1024, 1)[0][0] - start_s}
        for size in batches:
            every = batch(size, 64, 97)
            begin_s, end_s = max(each[0] for each in every), max(each[-1] for each in every)
            found[f"step_{size}"] = (end_s - begin_s) / 96
        return found

    answer.close = engine.close  # type: ignore[attr-defined]
    return answer


class _Bare:
    """LMDeploy's engine, driven by its own interface.

    Args:
        tree: folder for `sys.path` of another LMDeploy than the installed one.
        has_weights: else they are random.
    """

    def __init__(
        self, device: str, model: str, dtype: str, most: int, tree: str | None, has_weights: bool = True, **options: Any
    ) -> None:
        if tree is not None:
            sys.path.insert(0, tree)
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        from lmdeploy.messages import PytorchEngineConfig
        from lmdeploy.pytorch.engine import Engine, model_agent

        def fill(model: Any, *_: Any, **__: Any) -> None:
            torch.manual_seed(1)
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)

        if not has_weights:
            model_agent.load_model_weights = fill  # 15 GB on a disk would take most of the kit's time
        config = PytorchEngineConfig(
            device_type=device, dtype=dtype, block_size=64, num_gpu_blocks=1024, max_batch_size=most, session_len=4096,
            enable_prefix_caching=False, **options,
        )  # fmt: skip
        self._loop, self._sessions = asyncio.new_event_loop(), itertools.count()

        async def start() -> Any:
            engine = Engine.from_pretrained(model, engine_config=config)
            engine.start_loop()
            return engine

        self._engine = self._loop.run_until_complete(start())

    def batch(self, prompts: Sequence[Sequence[int]], new: int) -> list[tuple[list[int], list[float]]]:
        """Greedy tokens of each prompt, and when each was there."""

        async def every() -> list[tuple[list[int], list[float]]]:
            return await asyncio.gather(*(self._one(list(prompt), new) for prompt in prompts))

        return self._loop.run_until_complete(every())

    async def _one(self, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
        from lmdeploy.messages import GenerationConfig

        session, instance, tokens, times = next(self._sessions), self._engine.create_instance(), [], []
        sampling = GenerationConfig(max_new_tokens=new, top_k=1, ignore_eos=True, stop_token_ids=[])
        async for output in instance.async_stream_infer(session, prompt, gen_config=sampling):
            tokens += output.token_ids
            times += [time.perf_counter()] * len(output.token_ids)
        await instance.async_end(session)
        return tokens, times

    def close(self) -> None:
        close_bare(self._engine, self._loop)
