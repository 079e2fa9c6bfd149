"""Decode steps without LMDeploy's modules in between: each is one native call, from the last tokens to the next ones.

Guesses are computed and sampled in the same call. Tokens of a step are handed over when the next step begins, so the engine
looks at them beside the native code. After a round the next step may run ahead (`RunAhead`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.engine.model_agent import BatchedLogProbs, BatchedOutputs, cache_swapping
from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy, ARStoppingCriteria

from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner
from sagellm.engines.lmdeploy.cpu.operators.sampling import Sampled, draws_of
from sagellm.engines.lmdeploy.cpu.run_ahead import RunAhead
from sagellm.engines.lmdeploy.sparsity import reading, steps_of

__all__ = ["run_round"]


def run_round(
    agent: Any, post: Callable[..., Any], inputs: Any, loop_count: int, swap_in_map: dict | None = None,
    swap_out_map: dict | None = None, sampling_inputs: Any = None, stopping_criteria: Any = None, extra_inputs: Any = None,
    **more: bool,
) -> Callable[[], None] | None:  # fmt: skip
    """Run a round of decode steps as LMDeploy's agent does. Returns None, with nothing done, if it is not a plain one.

    A round is plain if its model runs natively, and no request wants logits, a response format or a processor of its own.
    With guesses the model is in one process.

    Args:
        post: calls a function on the engine's event loop.

    Returns:
        A function to call once the engine knows that the round is over. It hands over the last tokens.
    """
    ahead: RunAhead | None = getattr(agent, "sage_ahead", None)
    if any(more.values()) or not _is_plain(agent, inputs, sampling_inputs):
        if ahead is not None:
            ahead.forget()
        return None
    for session in sampling_inputs.session_to_cleanup or ():
        if agent.guided_decoding_manager:
            agent.guided_decoding_manager.remove_processor(session)
    cache_swapping(agent.cache_engine, swap_in_map=swap_in_map, swap_out_map=swap_out_map)
    if _is_steady(agent, sampling_inputs, stopping_criteria):
        return _steady_steps(agent, post, inputs, loop_count, sampling_inputs, stopping_criteria, ahead)
    if ahead is not None:
        ahead.forget()
    return _steps(agent, inputs, loop_count, sampling_inputs, stopping_criteria, extra_inputs)


def _steady_steps(
    agent: Any, post: Callable[..., Any], inputs: Any, loop_count: int, sampling: Any, criteria: ARStoppingCriteria,
    ahead: RunAhead | None,
) -> Callable[[], None]:  # fmt: skip
    """Run steps each of which follows from the tokens of the one before, without tensors made for it."""
    runner, cache = agent.patched_model, agent.cache_engine
    stops = _Stops(criteria, sampling.stop_words)
    step = runner.prepare(cache.gpu_cache, inputs, sampling)
    drawn = None if ahead is None else ahead.take(runner, step, cache.cache_config.block_size)
    hand_over, has_logprobs = _nothing, sampling.max_num_logprobs >= 0
    for number in range(loop_count):
        if number:
            runner.follow(step, drawn)
        if number or drawn is None:
            drawn = runner.run(step, hand_over)
        stopped = stops.step(drawn)
        if agent.need_output:  # every worker draws the tokens, one tells them
            hand_over = partial(post, _push, agent, drawn, stopped, has_logprobs, number == loop_count - 1)
    if ahead is None or any(stopped):
        return hand_over
    ahead.expect(step, drawn)
    if not ahead.is_due:
        return hand_over
    ahead.prepare(runner)  # now: the engine takes turns with this thread once it is told
    return partial(ahead.run, runner, hand_over)


def _push(agent: Any, drawn: list[Sampled], stopped: list[bool], has_logprobs: bool, is_last: bool) -> None:
    """Hand tokens over, on the engine's loop."""
    outputs = BatchedOutputs(
        next_token_ids=_tokens(drawn), stopped=torch.from_numpy(np.array(stopped)),
        logprobs=_logprobs(drawn) if has_logprobs else None,
        extra_outputs=agent.agent_strategy.make_extra_outputs(None, last_loop_step=is_last),
    )  # fmt: skip
    agent._push_output(outputs)


def _steps(
    agent: Any, inputs: Any, loop_count: int, sampling_inputs: Any, stopping_criteria: Any, extra_inputs: Any
) -> Callable[[], None]:
    """Run steps with guesses, with a choice of blocks, or with tokens that are forbidden for a while."""
    runner, strategy, cache = agent.patched_model, agent.agent_strategy, agent.cache_engine
    speculator, hand_over = _speculator(strategy), _nothing
    is_sparse = steps_of(cache.cache_config) is not None
    for number in range(loop_count):
        is_last = number == loop_count - 1
        wishes = sampling_inputs
        if speculator is not None:
            ended = sampling_inputs.session_to_cleanup
            draws = draws_of(sampling_inputs) if speculator.takes_draws else None
            inputs = speculator.extend(inputs, extra_inputs, loop_count - 1 - number, False, ended, draws)
            wishes = speculator.rows_of(sampling_inputs)
        drawn = runner.run(runner.prepare(cache.gpu_cache, reading(cache.cache_config, inputs), wishes), hand_over)
        tokens, logprobs = _tokens(drawn), _logprobs(drawn) if wishes.max_num_logprobs >= 0 else None
        if speculator is not None:
            tokens, logprobs = speculator.settle(tokens, logprobs, sampling_inputs)
        if agent.need_output:
            stopped, stop_pos, stopping_criteria = stopping_criteria.step(
                tokens, sampling_inputs.stop_words, inputs=inputs, extra_inputs=extra_inputs
            )
            outputs = BatchedOutputs(
                next_token_ids=tokens, stopped=stopped, stop_pos=stop_pos, logprobs=logprobs,
                extra_outputs=strategy.make_extra_outputs(extra_inputs, last_loop_step=is_last),
            )  # fmt: skip
            hand_over = partial(agent._push_output, outputs)
            if is_sparse:  # what the policy chose goes with the tokens of its step, and the next step chooses before it begins
                hand_over()
                hand_over = _nothing
        if not is_last:
            inputs, extra_inputs = strategy.update_inputs_for_next_step(
                inputs, sampling_inputs, next_token_ids=tokens, model_metas=None, extra_inputs=extra_inputs
            )
    return hand_over


def _nothing() -> None:
    """Do nothing."""


class _Stops:
    """LMDeploy's criteria for sequences that get a token a step, in plain numbers: a tenth of the time."""

    def __init__(self, criteria: ARStoppingCriteria, stop_words: torch.Tensor | None) -> None:
        self._left = criteria.num_appendable_ids.tolist()
        self._words: Sequence[Sequence[int]] = [()] * len(self._left) if stop_words is None else stop_words.tolist()

    def step(self, drawn: list[Sampled]) -> list[bool]:
        """Return whether each sequence stops."""
        stopped = []
        for number, ((token, _, _), words) in enumerate(zip(drawn, self._words, strict=True)):
            self._left[number] = min(0, self._left[number] - 1) if token in words else self._left[number] - 1
            stopped.append(self._left[number] <= 0)
        return stopped


def _is_steady(agent: Any, sampling: Any, criteria: Any) -> bool:
    """Whether each step of the round follows from the tokens of the one before: nothing else changes between them."""
    return (
        type(criteria) is ARStoppingCriteria
        and _speculator(agent.agent_strategy) is None
        and steps_of(agent.cache_engine.cache_config) is None
        and (sampling.stop_words is None or max(sampling.num_ignore_eos.tolist()) <= 0)
    )


def _speculator(strategy: Any) -> Any:
    return getattr(strategy, "speculator", None)  # patch 0006 may be there alone


def _is_plain(agent: Any, inputs: Any, sampling: Any) -> bool:
    runner = agent.patched_model
    return (
        inputs.is_decoding
        and isinstance(runner, CpuRunner)
        and runner.native is not None
        and _is_known(agent.agent_strategy)
        and not agent.spec_agent.is_enabled()
        and agent.dist_config.dp == 1
        and inputs.max_q_seqlen == 1
        and (inputs.vision_inputs, inputs.local_adapter_ids) == (None, None)
        and (sampling.max_num_logprobs < 0 or agent.misc_config.logprobs_mode == "raw_logprobs")
        and not any(sampling.logits_processors)
        and not any(sampling.response_formats)
    )


def _is_known(strategy: Any) -> bool:
    """LMDeploy's own strategy, or ours with guesses that are computed in decode steps of one process."""
    if type(strategy) is ARModelAgentStrategy:
        return True
    speculator = _speculator(strategy)
    return speculator is not None and speculator.sharing is None and speculator.prompt_tokens is None


def _tokens(drawn: list[Sampled]) -> torch.Tensor:
    return torch.from_numpy(np.array([token for token, _, _ in drawn]))  # a quarter of the time of `torch.tensor`


def _logprobs(drawn: list[Sampled]) -> BatchedLogProbs:
    return BatchedLogProbs(
        vals=torch.tensor([values for _, values, _ in drawn]),
        indices=torch.tensor([ids for _, _, ids in drawn], dtype=torch.int32),
    )
