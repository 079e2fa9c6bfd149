"""LMDeploy's PyTorch engine on tiny random models, for checks that guesses change nothing."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.accel.speculative.contract.exactness import Guesser
from sagellm.core.config import SageConfig
from sagellm.core.errors import SpeculationError
from sagellm.engines.base import SamplingParams

__all__ = ["EngineTrial"]

SHAPE = dict(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=320)


class EngineTrial:
    """Use it as a context manager: leaving it removes its models. Answers without guesses are computed once.

    Args:
        device: cpu or cuda.
    """

    vocab_size = SHAPE["vocab_size"]

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._folder = Path(tempfile.mkdtemp(prefix="sagellm-check-"))
        self._references: dict[str, Any] = {}
        self._plain: dict[tuple, list[tuple[int, ...]]] = {}

    def __enter__(self) -> "EngineTrial":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_new: int, *, guesser: Guesser | None, dtype: str = "float32",
        decode_round: int = 1, seeds: Sequence[int] | None = None,
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Raises SpeculationError: the guesser did something wrong. EngineError: the engine stopped."""
        key = (str(prompts), num_new, dtype, decode_round, str(seeds))
        if guesser is None and key in self._plain:
            return self._plain[key]
        found, fault = self._run(prompts, num_new, guesser, dtype, decode_round, seeds)
        if fault:
            raise SpeculationError(fault)
        if guesser is None:
            self._plain[key] = found
        return found

    def logits(self, texts: Sequence[Sequence[int]], dtype: str = "float32") -> np.ndarray:
        """By transformers, in the type of the weights and scored in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        if dtype not in self._references:
            kind = getattr(torch, dtype)
            self._references[dtype] = AutoModelForCausalLM.from_pretrained(self._model(dtype), dtype=kind).eval()
        with torch.inference_mode():
            return self._references[dtype](torch.tensor(texts)).logits.float().numpy()

    def _run(
        self, prompts: Sequence[Sequence[int]], num_new: int, guesser: Guesser | None, dtype: str, decode_round: int,
        seeds: Sequence[int] | None,
    ) -> tuple[list[tuple[int, ...]], str]:  # fmt: skip
        from sagellm.engines.lmdeploy.engine import LMDeployEngine

        guessing = {} if guesser is None else dict(speculative=guesser.name, speculative_options=guesser.options)
        config = SageConfig(
            device=self._device, threads=1, block_size=16, kv_blocks=512, max_batch_size=128, decode_round=decode_round,
            model=self._model(dtype), **guessing,
        )  # fmt: skip
        greedy = [SamplingParams(num_new, ignore_eos=True)] * len(prompts)
        drawn = [SamplingParams(num_new, temperature=1.0, seed=seed, ignore_eos=True) for seed in seeds or ()]
        with LMDeployEngine(config) as engine:
            found = [each.token_ids for each in engine.generate(prompts, drawn or greedy)]
            speculation = engine.hooks.report()["speculation"]
        return found, "" if speculation is None else speculation["first_fault"]

    def _model(self, dtype: str) -> Path:
        from sagellm.demo_model.random_model import write_random_model

        path = self._folder / dtype
        if not path.exists():
            write_random_model(path, dtype=dtype, **SHAPE)
        return path
