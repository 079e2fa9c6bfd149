"""LMDeploy's strategies of decoding, with guesses: what `build_strategy_factory` gives when a speculative strategy is wanted.

A sequence carries no guesses: they are added in the agent right before a step, and what is right of them comes back as further
tokens of the step. So scheduling, preemption and the prefix cache see accepted tokens alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lmdeploy.pytorch.messages import MessageStatus
from lmdeploy.pytorch.strategies.ar import ARStrategyFactory
from lmdeploy.pytorch.strategies.ar.engine import AREngineStrategy
from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from sagellm.accel.speculative.statistics import RequestGuesses
from sagellm.core.config import SpeculativeSpec
from sagellm.engines.lmdeploy.sparse_workers import hand_over
from sagellm.engines.lmdeploy.speculative.exchange import SpecExtraOutputs, extra_inputs_of
from sagellm.engines.lmdeploy.speculative.reserve import Reserve
from sagellm.engines.lmdeploy.speculative.speculator import Speculator
from sagellm.engines.lmdeploy.speculative.stopping import SpecStoppingCriteria
from sagellm.engines.lmdeploy.speculative.verify import with_tails

__all__ = ["SpecFactory"]

NO_GUESSES = RequestGuesses()


class SpecFactory(ARStrategyFactory):
    """Asked by the model agent and by the engine, each for strategies of its own: the speculator of the agent's is the one that
    guesses."""

    def __init__(self, model_config: Any, spec: SpeculativeSpec) -> None:
        super().__init__(model_config)
        self._spec = spec
        self._latest: dict[str, Any] = {}  # report of the workers' speculator

    def build_model_agent_strategy(self) -> "SpecAgentStrategy":
        from sagellm.accel.speculative.registry import make_speculator

        strategy = make_speculator(self._spec.name, **self._spec.options)
        return SpecAgentStrategy(Speculator(strategy, self.model_config.vocab_size))

    def build_engine_strategy(self, cache_config: Any, scheduler_config: Any) -> "SpecEngineStrategy":
        strategy = SpecEngineStrategy(scheduler_config, cache_config)
        strategy.latest = self._latest
        return strategy

    def build_sequence_strategy(self) -> "SpecSequenceStrategy":
        return SpecSequenceStrategy(self._latest)


class SpecAgentStrategy(ARModelAgentStrategy):
    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self.choice: Any = None  # in the engine: the `StepChoice` that bounds the guesses of a step
        self._heard: torch.Tensor | None = None  # tokens of the last step of a round, from worker 0

    def slice_outputs(self, inputs: torch.Tensor, seq_length: torch.Tensor) -> torch.Tensor:
        """Every row of a step with guesses counts, of other steps the last one of each sequence."""
        return inputs if self.speculator.is_verifying else super().slice_outputs(inputs, seq_length)

    def make_extra_inputs(self, seqs: list[Any]) -> Any:
        return extra_inputs_of(seqs, self.choice.draft_tokens if self.choice is not None else {})

    def make_extra_outputs(self, extra_inputs: Any, **kwargs: Any) -> SpecExtraOutputs:
        report = None if self.speculator.sharing is None else self.speculator.report()
        return SpecExtraOutputs(num_drafted=self.speculator.num_drafted(), report=report)

    @contextmanager
    def broadcast_next_token(self, next_token_ids: torch.Tensor, extra_inputs: Any, dist_ctx: Any) -> Iterator[None]:
        """Tell the other workers which tokens each sequence has got; `update_inputs_for_next_step` takes them there."""
        sharing = self.speculator.sharing
        if sharing.rank == 0:
            sharing.tell(next_token_ids.reshape(len(next_token_ids), -1).tolist())
        else:
            rows = torch.tensor(sharing.hear())
            self._heard = rows if self.speculator.is_verifying else rows.view(-1)
        yield

    def make_stopping_criteria(self, seqs: list[Any]) -> SpecStoppingCriteria:
        return SpecStoppingCriteria(super().make_stopping_criteria(seqs).num_appendable_ids)

    def update_inputs_for_next_step(
        self, model_inputs: Any, sampling_inputs: Any, next_token_ids: torch.Tensor, model_metas: Any, extra_inputs: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The next decode step of a round: `next_token_ids` is [sequences, longest], padded with -1, behind a step with
        guesses."""
        if self._heard is not None:
            next_token_ids, self._heard = self._heard, None
        if next_token_ids.dim() == 1:
            return super().update_inputs_for_next_step(
                model_inputs, sampling_inputs, next_token_ids, model_metas, extra_inputs, **kwargs
            )
        counts = (next_token_ids >= 0).sum(1)
        last = next_token_ids.gather(1, counts[:, None] - 1)
        model_inputs.model_metas = model_metas
        model_inputs.history_lengths = model_inputs.history_lengths + counts
        model_inputs.input_ids = last.view(1, -1)
        model_inputs.is_decoding = True  # also where the step with guesses went as one of prompts
        model_inputs.seq_length = torch.ones_like(counts)
        num_kv = model_inputs.history_lengths + 1
        model_inputs.max_q_seqlen = 1
        model_inputs.max_kv_seqlen, model_inputs.sum_kv_seqlen = int(num_kv.max()), int(num_kv.sum())
        if sampling_inputs.num_ignore_eos is not None:
            sampling_inputs.num_ignore_eos = sampling_inputs.num_ignore_eos - counts
        if sampling_inputs.random_offsets is not None:
            sampling_inputs.random_offsets = sampling_inputs.random_offsets + counts
        if sampling_inputs.all_ids is not None:
            tails = [tokens[tokens >= 0].tolist() for tokens in next_token_ids]
            sampling_inputs.all_ids = with_tails(sampling_inputs.all_ids, tails)
        return model_inputs, extra_inputs


class SpecEngineStrategy(AREngineStrategy):
    """`reserve`: decides how much room guesses get; None until the engine is built. `latest`: last report of the workers."""

    reserve: Reserve | None = None
    latest: dict[str, Any]

    def get_prealloc_size(self, is_decoding: bool) -> int:
        size = super().get_prealloc_size(is_decoding)
        return size if self.reserve is None or not is_decoding else self.reserve.size(size)


class SpecSequenceStrategy(ARSequenceStrategy):
    """A step gives a sequence several tokens, of which all but the last have their keys and values."""

    def __init__(self, latest: dict[str, Any]) -> None:
        self._latest = latest

    def update_running(self, running: list[Any], batched_outputs: Any, is_decoding: bool) -> None:
        hand_over(running, batched_outputs)
        is_run = [seq.status == MessageStatus.LOCKED for seq in running]
        if (report := batched_outputs.extra_outputs.report) is not None:
            self._latest.update(report)
        if is_decoding and batched_outputs.all_routed_experts is None:
            _append(running, is_run, batched_outputs)
        else:
            super().update_running(running, batched_outputs, is_decoding)
            for seq in running:
                seq.sage_step = 0, 1
        for seq, has_run in zip(running, is_run, strict=True):
            # The agent also has tokens of a sequence that stopped running; they are dropped.
            seq.sage_known = seq.num_valid_ids if has_run else -1


def _append(running: list[Any], is_run: list[bool], outputs: Any) -> None:
    """Tokens of a decode step. LMDeploy's own way believes that all tokens but the last were there before."""
    stopped, stop_pos, table = outputs.stopped.tolist(), outputs.stop_pos.tolist(), outputs.next_token_ids.numpy()
    metas = outputs.model_metas or [None] * len(running)
    drafted = outputs.extra_outputs.num_drafted
    if drafted is None:
        table, counts, drafted = table[:, None], [1] * len(running), [0] * len(running)
    else:
        counts, drafted = (table >= 0).sum(1).tolist(), drafted.tolist()
    for number, seq in enumerate(running):
        count = stop_pos[number] + 1 if stopped[number] else counts[number]
        seq.sage_step = drafted[number], count
        if not is_run[number]:
            continue
        seq.history_cache.append(table[number, :count])
        seq._num_history_ids += seq._num_token_ids + count - 1
        seq._num_token_ids = 1
        seq.num_new_tokens += count
        if num_drafted := drafted[number]:
            seq.sage_guesses = getattr(seq, "sage_guesses", NO_GUESSES).plus(num_drafted, min(count - 1, num_drafted))
        if metas[number] is not None:
            seq.model_meta = metas[number]
        if stopped[number]:
            seq.status = MessageStatus.TO_BE_MIGRATED if seq.preserve_cache else MessageStatus.STOPPED
