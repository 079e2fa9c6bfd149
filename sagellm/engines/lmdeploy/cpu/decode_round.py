"""Decode steps without LMDeploy's modules in between: each is one native call, from the last tokens to the next ones.

Guesses are computed and sampled in the same call.
"""

from typing import Any

import torch
from lmdeploy.pytorch.engine.model_agent import BatchedLogProbs, BatchedOutputs, cache_swapping
from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy

from sagellm.engines.lmdeploy.cpu.compiled import CpuRunner
from sagellm.engines.lmdeploy.cpu.operators.sampling import Sampled, draws_of
from sagellm.engines.lmdeploy.sparsity import reading

__all__ = ["run_round"]


def run_round(
    agent: Any, inputs: Any, loop_count: int, swap_in_map: dict | None = None, swap_out_map: dict | None = None,
    sampling_inputs: Any = None, stopping_criteria: Any = None, extra_inputs: Any = None, **more: bool,
) -> bool:  # fmt: skip
    """Run a round of decode steps as LMDeploy's agent does. Returns False, with nothing done, if it is not a plain one.

    A round is plain if its model runs natively, and no request wants logits, a response format or a processor of its own.
    With guesses the model is in one process.
    """
    if any(more.values()) or not _is_plain(agent, inputs, sampling_inputs):
        return False
    runner, strategy = agent.patched_model, agent.agent_strategy
    for session in sampling_inputs.session_to_cleanup or ():
        if agent.guided_decoding_manager:
            agent.guided_decoding_manager.remove_processor(session)
    cache_swapping(agent.cache_engine, swap_in_map=swap_in_map, swap_out_map=swap_out_map)
    speculator = getattr(strategy, "speculator", None)  # patch 0006 may be there alone
    for step in range(loop_count):
        is_last = step == loop_count - 1
        wishes = sampling_inputs
        if speculator is not None:
            ended = sampling_inputs.session_to_cleanup
            draws = draws_of(sampling_inputs) if speculator.takes_draws else None
            inputs = speculator.extend(inputs, extra_inputs, loop_count - 1 - step, False, ended, draws)
            wishes = speculator.rows_of(sampling_inputs)
        chosen = reading(agent.cache_engine.cache_config, inputs)
        drawn = runner.decode(agent.cache_engine.gpu_cache, chosen, wishes)
        tokens = torch.tensor([token for token, _, _ in drawn])
        logprobs = _logprobs(drawn) if wishes.max_num_logprobs >= 0 else None
        if speculator is not None:
            tokens, logprobs = speculator.settle(tokens, logprobs, sampling_inputs)
        if agent.need_output:  # every worker draws the tokens, one tells them
            stopping_criteria = _tell(
                agent, inputs, tokens, logprobs, stopping_criteria, sampling_inputs, extra_inputs, is_last
            )
        if not is_last:
            inputs, extra_inputs = strategy.update_inputs_for_next_step(
                inputs, sampling_inputs, next_token_ids=tokens, model_metas=None, extra_inputs=extra_inputs
            )
    return True


def _tell(
    agent: Any, inputs: Any, tokens: torch.Tensor, logprobs: Any, stopping_criteria: Any, sampling_inputs: Any,
    extra_inputs: Any, is_last: bool,
) -> Any:  # fmt: skip
    """Hand a step's tokens over, and return the criteria for the next one."""
    stopped, stop_pos, stopping_criteria = stopping_criteria.step(
        tokens, sampling_inputs.stop_words, inputs=inputs, extra_inputs=extra_inputs
    )
    agent._push_output(
        BatchedOutputs(
            next_token_ids=tokens, stopped=stopped, stop_pos=stop_pos, logprobs=logprobs,
            extra_outputs=agent.agent_strategy.make_extra_outputs(extra_inputs, last_loop_step=is_last),
        )
    )  # fmt: skip
    return stopping_criteria


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
    speculator = getattr(strategy, "speculator", None)
    return speculator is not None and speculator.sharing is None and speculator.prompt_tokens is None


def _logprobs(drawn: list[Sampled]) -> BatchedLogProbs:
    return BatchedLogProbs(
        vals=torch.tensor([values for _, values, _ in drawn]),
        indices=torch.tensor([ids for _, _, ids in drawn], dtype=torch.int32),
    )
