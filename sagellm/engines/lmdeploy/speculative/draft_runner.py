"""A draft model on the device of the engine's own: LMDeploy's model, its runner, and keys and values in blocks of the
target's numbers; the target's allocator owns them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.backends import get_backend
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.distributed import DistContext, get_dist_manager
from lmdeploy.pytorch.engine.cache_engine import CacheEngine
from lmdeploy.pytorch.engine.model_agent import model_forward
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.models.patch import build_patched_model, update_custom_module_map
from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

from sagellm.core.config import HookConfig
from sagellm.core.errors import SageError, SpeculationError

__all__ = ["DraftRunner"]


class DraftRunner:
    """A `ModelRunner` that computes in the dtype of the target.

    Args:
        agent: LMDeploy's model agent, with its model and cache built.
        folder: of the model; its tokenizer has been checked.

    Raises:
        SpeculationError: the device or LMDeploy cannot run the model.
    """

    def __init__(self, agent: Any, folder: Path) -> None:
        self._agent = agent
        self._ranks = DistContext.build() if agent.world_size > 1 else agent.dist_ctx
        try:
            with self._context():
                self._build(folder)
        except SageError:
            raise
        except Exception as error:
            raise SpeculationError(
                f"the draft model {folder} cannot be run on {agent.cache_config.device_type} beside the target: {error}"
            ) from error
        self.vocab_size = self._config.vocab_size
        # Either model may be padded beyond the tokenizer that they share: neither is asked about tokens that it has not.
        self._num_guessable = min(self.vocab_size, agent.model_config.vocab_size)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The whole model is in one worker, whatever the target's are."""
        with self._agent.all_context(), get_dist_manager().context(self._ranks):
            yield

    def _build(self, folder: Path) -> None:
        agent = self._agent
        dtype = str(agent.model_config.dtype).removeprefix("torch.")
        self._config = config = ModelConfig.from_pretrained(str(folder), trust_remote_code=True, dtype=dtype)
        if config.states_shapes:
            raise SpeculationError(f"the draft model {folder} keeps states that cannot be taken back; give a transformer.")
        if config.custom_module_map is not None:
            update_custom_module_map(config.custom_module_map)
        model = build_patched_model(config, device=agent.device, build_model_ctx=agent.build_model_ctx)
        load_model_weights(model, str(folder), device=agent.device)
        # The host tier holds blocks of the target alone: what the draft model has of them is computed again. Its own keys and
        # values are of its own type.
        hooks = HookConfig.model_validate_json(agent.cache_config.sage).model_copy(update={"kv_dtype": ""})
        cache_config = replace(agent.cache_config, num_cpu_blocks=0, quant_policy=0, sage=hooks.model_dump_json())
        self._model = get_backend().build_graph_runner(
            model, model_config=config, cache_config=cache_config, backend_config=agent.backend_config, device=agent.device
        )
        self._num_blocks, self._block_size = cache_config.num_gpu_blocks, cache_config.block_size
        self._cache = CacheEngine(cache_config, config, cache_stream=agent.cache_stream)

    def forward(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> np.ndarray:
        return self._logits(token_ids, num_before, blocks).argmax(-1).cpu().numpy()

    def forward_scored(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, best = self.forward_top(token_ids, num_before, blocks, 1)
        return tokens[:, 0], best[:, 0]

    def forward_top(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        best, tokens = self._logits(token_ids, num_before, blocks).float().softmax(-1).topk(count)
        return tokens.cpu().numpy(), best.cpu().numpy()

    @torch.inference_mode()
    def _logits(self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]) -> torch.Tensor:
        """[sequences, tokens that both models have] behind the last token of each."""
        inputs = self._inputs(token_ids, num_before, blocks)
        agent = self._agent
        with self._context():
            output = model_forward(self._model, inputs, self._cache, agent.state_cache_engine)
        hidden = output["hidden_states"][0]
        if len(token_ids) != len(hidden):
            hidden = hidden[inputs.seq_length.cumsum(0) - 1]
        return self._model.get_logits(hidden[None])[0, :, : self._num_guessable]

    def _refuse(self, what: str, least: int, most: int, bound: int) -> None:
        """A number out of range would write to other memory on a device that does not check."""
        if least < 0 or most >= bound:
            raise SpeculationError(f"{what} {least if least < 0 else most} for the draft model; there are 0 to {bound - 1}.")

    def _inputs(self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]) -> ModelInputs:
        device = self._agent.device
        lengths = [len(tokens) for tokens in token_ids]
        num_kv = [before + length for before, length in zip(num_before, lengths, strict=True)]
        tables = np.zeros((len(blocks), max(map(len, blocks))), blocks[0].dtype)
        for row, table in zip(tables, blocks, strict=True):
            row[: len(table)] = table
        tokens = np.concatenate(token_ids)
        self._refuse("token", tokens.min(), tokens.max(), self.vocab_size)
        self._refuse("block", tables.min(), tables.max(), self._num_blocks)
        for before, end, table in zip(num_before, num_kv, blocks, strict=True):
            if before < 0 or end > len(table) * self._block_size:
                raise SpeculationError(
                    f"tokens {before} to {end - 1} of a text in {len(table)} blocks of {self._block_size}; they do not fit."
                )
        return ModelInputs(
            input_ids=torch.from_numpy(tokens[None]).to(device),
            seq_length=torch.tensor(lengths).to(device),
            history_lengths=torch.tensor(num_before).to(device),
            block_offsets=torch.from_numpy(tables).to(device),
            is_decoding=max(lengths) == 1,
            num_ignored_history=torch.zeros(len(lengths), dtype=torch.int64).to(device),
            max_q_seqlen=max(lengths),
            max_kv_seqlen=max(num_kv),
            sum_kv_seqlen=sum(num_kv),
            model_metas=[None] * len(lengths),
        )
