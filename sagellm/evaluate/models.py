"""Models that are evaluated: in this engine, in transformers, or in llama.cpp."""

import json
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.core.config import SageConfig
from sagellm.core.errors import EngineError

__all__ = ["CHUNK", "EngineModel", "LlamaCppModel", "ScoredModel", "TransformersModel"]

CHUNK = 512  # tokens of one piece of text, and of the longest prompt with its answer
BLOCK_SIZE = 64
BATCH = 8


class ScoredModel(ABC):
    """A loaded model that scores texts and continues prompts. Use it as a context manager.

    Attributes:
        name: of the report.
    """

    name: str

    @abstractmethod
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Score every next token after each token: [tokens, vocabulary], float32."""

    @abstractmethod
    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Continue prompts greedily by exactly `num_tokens` tokens each, whatever they are."""

    def sampled(self, prompts: Sequence[Sequence[int]], num_tokens: int, together: bool) -> list[list[int]] | None:
        """Continue prompts at temperature 1, each with a seed of its own, one by one or many at once; None: not measured."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free the model."""

    def __enter__(self) -> "ScoredModel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EngineModel(ScoredModel):
    """A model in LMDeploy's PyTorch engine, with whatever the configuration plugs in.

    Args:
        config: settings of the engine; its sizes are set here.
    """

    def __init__(self, name: str, config: SageConfig) -> None:
        from sagellm.engines.lmdeploy.engine import LMDeployEngine

        self.name = name
        sizes = {"max_prefill_tokens": CHUNK, "block_size": BLOCK_SIZE, "max_batch_size": BATCH}
        sizes["kv_blocks"] = 2 * BATCH * (CHUNK // BLOCK_SIZE + 1)
        self.engine = LMDeployEngine(config.model_copy(update=sizes))

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self.engine.prompt_logits(tokens)

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        from sagellm.engines.base import SamplingParams

        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        return [list(answer.token_ids) for answer in self.engine.generate(prompts, params)]

    def sampled(self, prompts: Sequence[Sequence[int]], num_tokens: int, together: bool) -> list[list[int]] | None:
        from sagellm.engines.base import SamplingParams

        params = [
            SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=number + 1)
            for number in range(len(prompts))
        ]
        if together:
            found = self.engine.generate(prompts, params)
        else:
            found = [self.engine.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
        return [list(answer.token_ids) for answer in found]

    def close(self) -> None:
        self.engine.close()


class TransformersModel(ScoredModel):
    """A Hugging Face folder in transformers.

    Args:
        dtype: name of a torch type.
    """

    def __init__(self, name: str, folder: Path, dtype: str, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.name, self._device = name, device
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(device).eval()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([list(tokens)], device=self._device)).logits[0].float().cpu().numpy()

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        import torch

        found = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=self._device)
            with torch.inference_mode():
                answer = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None,
                    pad_token_id=0,
                )  # fmt: skip
            found.append(answer[0, len(prompt) :].tolist())
        return found

    def close(self) -> None:
        self._model = None


# Runs in the environment of the peer, which has nothing of this package.
LLAMA_CODE = """
import json, sys
import llama_cpp, numpy
model = llama_cpp.Llama(sys.argv[1], n_ctx=int(sys.argv[3]), logits_all=True, verbose=False)
print(json.dumps(llama_cpp.__version__), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    model.reset()
    model.eval(asked["tokens"])
    if asked["new"] == 0:
        numpy.save(sys.argv[2], model.scores[: len(asked["tokens"])].astype(numpy.float32))
        print("[]", flush=True)
        continue
    found = []
    while len(found) < asked["new"]:
        found.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(found[-1:])
    print(json.dumps(found), flush=True)
"""


class LlamaCppModel(ScoredModel):
    """A GGUF file in llama.cpp, through llama-cpp-python in an environment of its own.

    Args:
        python: interpreter of that environment.

    Raises:
        EngineError: it cannot load the file; its last words.
    """

    def __init__(self, name: str, python: str, file: Path) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="llama-scores-")
        self._scores = Path(self._folder.name) / "scores.npy"
        command = [python, "-c", LLAMA_CODE, file, self._scores, str(CHUNK)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._read()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self._ask(tokens, 0)
        return np.load(self._scores)

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        return [self._ask(prompt, num_tokens) for prompt in prompts]

    def _ask(self, tokens: Sequence[int], num_new: int) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tokens": list(tokens), "new": num_new}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"llama.cpp ended with code {self._process.wait()}; its words are above.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()
