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
from sagellm.engines.lmdeploy.speculative.draft_folder import check_folder
from sagellm.models.folder import text_config

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
        self.has_float32 = device == "cpu"  # LMDeploy refuses it on its own devices
        self._folder = Path(tempfile.mkdtemp(prefix="sagellm-check-"))
        self._references: dict[Path, Any] = {}
        self._plain: dict[tuple, list[tuple[int, ...]]] = {}

    def __enter__(self) -> "EngineTrial":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_new: int, *, guesser: Guesser | None, dtype: str = "float32",
        decode_round: int = 1, seeds: Sequence[int] | None = None, model: Path | None = None,
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Raises SpeculationError: the guesser did something wrong. EngineError: the engine stopped."""
        model = self._model(dtype) if model is None else model
        key = (str(prompts), num_new, dtype, decode_round, str(seeds), model)
        if guesser is None and key in self._plain:
            return self._plain[key]
        found, fault = self._run(prompts, num_new, guesser, dtype, decode_round, seeds, model)
        if fault:
            raise SpeculationError(fault)
        if guesser is None:
            self._plain[key] = found
        return found

    def logits(self, texts: Sequence[Sequence[int]], dtype: str = "float32", model: Path | None = None) -> np.ndarray:
        """By transformers, in the type of the weights and scored in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        model = self._model(dtype) if model is None else model
        if model not in self._references:
            kind = getattr(torch, dtype)
            self._references[model] = AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        with torch.inference_mode():
            return self._references[model](torch.tensor(texts)).logits.float().numpy()

    def fellow(self, draft: Path, dtype: str = "float32") -> Path:
        """Raises SpeculationError: `draft` is no folder of a model. ConfigError: its tokenizer does not fit it."""
        check_folder(draft)
        tokenizer = draft if (draft / "tokenizer.json").is_file() else None
        vocab_size = text_config(draft)["vocab_size"]
        return self._model(dtype, f"{draft.name}-{vocab_size}", vocab_size=vocab_size, tokenizer_from=tokenizer)

    def _run(
        self, prompts: Sequence[Sequence[int]], num_new: int, guesser: Guesser | None, dtype: str, decode_round: int,
        seeds: Sequence[int] | None, model: Path,
    ) -> tuple[list[tuple[int, ...]], str]:  # fmt: skip
        from sagellm.engines.lmdeploy.engine import LMDeployEngine

        guessing = {} if guesser is None else dict(speculative=guesser.name, speculative_options=guesser.options)
        config = SageConfig(
            device=self._device, threads=1, block_size=16, kv_blocks=512, max_batch_size=128, decode_round=decode_round,
            model=model, dtype=dtype, **guessing,
        )  # fmt: skip
        greedy = [SamplingParams(num_new, ignore_eos=True)] * len(prompts)
        drawn = [SamplingParams(num_new, temperature=1.0, seed=seed, ignore_eos=True) for seed in seeds or ()]
        with LMDeployEngine(config) as engine:
            found = [each.token_ids for each in engine.generate(prompts, drawn or greedy)]
            speculation = engine.hooks.report()["speculation"]
        return found, "" if speculation is None else speculation["first_fault"]

    def _model(self, dtype: str, name: str = "own", **shape: Any) -> Path:
        from sagellm.demo_model.random_model import write_random_model

        path = self._folder / f"{name}-{dtype}"
        if not path.exists():
            write_random_model(path, dtype=dtype, **SHAPE | shape)
        return path
