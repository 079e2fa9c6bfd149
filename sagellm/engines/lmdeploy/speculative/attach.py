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
from sagellm.engines.lmdeploy.speculative.sharing import Sharing

__all__ = ["Speculation", "share"]


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


class Trees:
    """Trees of guesses in the steps of a model agent of this process, whose runner computes them."""

    def __init__(self, agent: Any) -> None:
        self._runner, self._cache = agent.patched_model, agent.cache_engine
        self.plant, self.move = self._runner.plant, self._runner.move

    @property
    def takes_trees(self) -> bool:
        return self._runner.takes_trees(self._cache.gpu_cache)


class WorkersTarget:
    """The same where the model is in worker processes. A model to load is checked; worker 0 loads it."""

    def __init__(self, engine: Any) -> None:
        self._model_path = Path(engine.model_config.hf_config.name_or_path)
        self.vocab_size = engine.model_config.vocab_size
        self.block_size, self.num_blocks = engine.cache_config.block_size, engine.cache_config.num_gpu_blocks
        self.device = engine.cache_config.device_type

    def load(self, folder: Path) -> Any:
        check_draft(folder, self._model_path)
        return None


def share(agent: Any) -> None:
    """Let the speculator of worker 0 guess for all workers. `agent`: of one of several workers, with its model and cache."""
    speculator = agent.agent_strategy.speculator
    if speculator is None or agent.world_size == 1:
        return
    speculator.sharing = Sharing(agent.dist_ctx)
    if not getattr(sage_device.active, "decodes_ragged", False):
        speculator.prompt_tokens = agent.cache_config.max_prefill_token_num
    if agent.rank == 0:
        speculator.bind(Target(agent))


class Speculation:
    """Lives as long as the engine. Raises SpeculationError: the strategy cannot work with the model."""

    def __init__(self, engine: Any) -> None:
        agent = getattr(engine.executor, "model_agent", None)
        strategy = engine.model_agent_strategy if agent is None else agent.agent_strategy
        self._speculator = strategy.speculator
        self.listeners = self._speculator.listeners
        self._latest = engine.engine_strategy.latest if agent is None else None
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
        if self._speculator.prompt_tokens is None and hasattr(getattr(agent, "patched_model", None), "takes_trees"):
            self._speculator.trees = Trees(agent)
        self._speculator.bind(WorkersTarget(engine) if agent is None else Target(agent))

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
        return self._speculator.report() | (self._latest or {})
