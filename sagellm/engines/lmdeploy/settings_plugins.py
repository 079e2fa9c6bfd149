"""From settings to plug-ins: those that were named, and those that other settings stand for."""

from sagellm.accel.speculative.registry import engine_method
from sagellm.core.config import PluginSpec, SageConfig, SpeculativeSpec
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.kv_tiers import check_tier_settings, tier_plugins
from sagellm.engines.lmdeploy.speculative.methods import check_method
from sagellm.engines.lmdeploy.speculative.reserve import check_lookahead

__all__ = ["all_plugins", "check_settings_plugins", "speculative_spec"]

STRATEGY = {
    "pytorch": "sagellm.scheduler_ir.strategy_plugin:StrategyPlugin",
    "turbomind": "sagellm.scheduler_ir.from_views:StrategyFromViews",  # it does not tell when a request ends
}


def all_plugins(config: SageConfig) -> tuple[PluginSpec, ...]:
    strategy = []
    if config.strategy is not None:
        options = {"strategy": config.strategy, "options": config.strategy_options}
        strategy = [PluginSpec(name=STRATEGY[config.engine], options=options, required=True)]
    return (*config.plugins, *strategy, *tier_plugins(config))


def check_settings_plugins(config: SageConfig) -> None:
    """Refuse what would end the engine process after the model is loaded, or serve without a word of it.

    Raises:
        ConfigError, PolicyError, TierError: as `check_tier_settings`; or options of no strategy.
        PlanError: an unknown strategy, or options that it does not take.
        SpeculationError: an unknown speculative strategy or option, a lookahead beyond the pool, or a method that the
            device cannot run.
    """
    check_tier_settings(config)
    if config.strategy is not None:
        from sagellm.scheduler_ir.strategies.registry import make_strategy

        make_strategy(config.strategy, **config.strategy_options)
    elif config.strategy_options:
        raise ConfigError(f"strategy_options {config.strategy_options}: there is no strategy; give --strategy.")
    check_method(config)
    spec = speculative_spec(config)
    if spec is not None:
        from sagellm.accel.speculative.registry import make_speculator

        if config.tensor_parallel > 1:
            raise ConfigError(
                f"speculative {spec.name} with tensor_parallel {config.tensor_parallel}: the workers do not share guesses; "
                "give one of the two."
            )
        strategy = make_speculator(spec.name, **spec.options)
        if config.kv_blocks is not None:  # else the engine looks at the pool that it gets
            lookahead = strategy.lookahead if type(strategy.lookahead) is int else 0
            check_lookahead(lookahead, config.decode_round or 1, config.kv_blocks, config.block_size)
    elif config.speculative_options and config.speculative is None:
        raise ConfigError(
            f"speculative_options {config.speculative_options}: there is no speculative strategy; give --speculative."
        )


def speculative_spec(config: SageConfig) -> SpeculativeSpec | None:
    """The strategy that is asked; None also where LMDeploy's own engine guesses."""
    if config.speculative is None or engine_method(config.speculative):
        return None
    return SpeculativeSpec(name=config.speculative, options=config.speculative_options)
