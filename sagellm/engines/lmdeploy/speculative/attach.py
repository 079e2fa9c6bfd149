"""Ties a speculative strategy to an engine that is built: the model it guesses for, and the blocks that guesses take."""

from pathlib import Path
from typing import Any

from lmdeploy import sage_device

from sagellm.accel.speculative.base import ModelRunner
from sagellm.core.errors import SpeculationError
from sagellm.core.hooks import StepResult
from sagellm.engines.lmdeploy.speculative.draft_folder import check_draft
from sagellm.engines.lmdeploy.speculative.draft_runner import DraftRunner
from sagellm.engines.lmdeploy.speculative.reserve import Reserve

__all__ = ["Speculation"]


class Target:
    """The target model of a model agent of this process, as strategies see it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.vocab_size = agent.model_config.vocab_size
        self.block_size, self.num_blocks = agent.cache_config.block_size, agent.cache_config.num_gpu_blocks
        self.device = agent.cache_config.device_type

    def load(self, folder: Path) -> ModelRunner:
        check_draft(folder, Path(self._agent.model_path))
        return DraftRunner(self._agent, folder)


class Speculation:
    """Lives as long as the engine. Raises SpeculationError: the strategy cannot work with the model."""

    def __init__(self, engine: Any) -> None:
        agent = engine.executor.model_agent
        self._speculator = agent.agent_strategy.speculator
        if engine.scheduler.is_ssm:
            raise SpeculationError(
                f"{self._speculator.name}: the model keeps a state that moves with each token, also with a wrong guess; "
                "start without --speculative."
            )
        if engine.cache_config.window_size > 0:
            # Its block manager takes blocks that are allocated ahead for history, and drops as many that are still seen.
            raise SpeculationError(
                f"{self._speculator.name}: this device drops the blocks behind the model's sliding window, and guesses need "
                "blocks ahead of the text; start without --speculative."
            )
        if not getattr(sage_device.active, "decodes_ragged", False):
            self._speculator.prompt_tokens = engine.cache_config.max_prefill_token_num
        self._reserve = Reserve(engine.scheduler, self._speculator.lookahead, engine.scheduler_config.prefill_interval)
        engine.engine_strategy.reserve = self._reserve
        engine.model_agent_strategy.choice = engine.scheduler.sage.choice
        self._speculator.bind(Target(agent))

    def give_back(self, running: list[Any]) -> None:
        """These have left the device."""
        self._reserve.give_back(running)

    def told(self, result: StepResult, running: list[Any]) -> StepResult:
        """Return the step's result with the tokens that each sequence really got."""
        computed = tuple([(seq.session_id, seq.sage_step[1]) for seq in running])
        num_tokens = sum([tokens for _, tokens in computed])
        num_context = sum([seq.num_history_ids for seq in running]) - num_tokens
        return result._replace(computed=computed, num_tokens=num_tokens, num_context_tokens=max(0, num_context))

    def report(self) -> dict[str, Any]:
        return self._speculator.report()
