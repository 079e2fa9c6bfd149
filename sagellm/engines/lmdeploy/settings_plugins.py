"""From settings to plug-ins: those that were named, and those that other settings stand for."""

import json
from pathlib import Path

from sagellm.accel.speculative.registry import engine_method
from sagellm.core.config import PluginSpec, SageConfig, SparsitySpec, SpeculativeSpec
from sagellm.core.errors import ConfigError
from sagellm.engines.lmdeploy.kv_tiers import check_tier_settings, tier_plugins
from sagellm.engines.lmdeploy.speculative.methods import check_method
from sagellm.engines.lmdeploy.speculative.reserve import check_lookahead

__all__ = [
    "all_plugins", "check_no_window", "check_settings_plugins", "check_workers_policy", "sparsity_spec", "speculative_spec",
]  # fmt: skip

STRATEGY = {
    "pytorch": "sagellm.scheduler_ir.strategy_plugin:StrategyPlugin",
    "turbomind": "sagellm.scheduler_ir.from_views:StrategyFromViews",  # it does not tell when a request ends
}

NO_BOUNDS = "blocks that come from elsewhere have no bounds of their keys"


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

        strategy = make_speculator(spec.name, **spec.options)
        if config.kv_blocks is not None:  # else the engine looks at the pool that it gets
            lookahead = strategy.lookahead if type(strategy.lookahead) is int else 0
            check_lookahead(lookahead, config.decode_round or 1, config.kv_blocks, config.block_size)
    elif config.speculative_options and config.speculative is None:
        raise ConfigError(
            f"speculative_options {config.speculative_options}: there is no speculative strategy; give --speculative."
        )
    _check_sparsity(config)


def speculative_spec(config: SageConfig) -> SpeculativeSpec | None:
    """The strategy that is asked; None also where LMDeploy's own engine guesses."""
    if config.speculative is None or engine_method(config.speculative):
        return None
    return SpeculativeSpec(name=config.speculative, options=config.speculative_options)


def sparsity_spec(config: SageConfig) -> SparsitySpec | None:
    """The sparse policy that is asked."""
    return None if config.sparsity is None else SparsitySpec(name=config.sparsity, options=config.sparsity_options)


def check_no_window(config: SageConfig, model: Path) -> None:
    """Raise ConfigError if a sparse policy is asked of a model with a sliding window. `model`: its folder."""
    if config.sparsity is None:
        return
    text = json.loads((model / "config.json").read_text())
    if text.get("use_sliding_window", True) and (window := text.get("sliding_window")):
        raise ConfigError(
            f"sparsity {config.sparsity}: the model has a sliding window of {window} tokens, which would be counted in the "
            "blocks that are read; start without --sparsity."
        )


def check_workers_policy(config: SageConfig, model: Path, device: str, dtype: str, head_size: int) -> None:
    """Check the sparse policy of several workers; that of one process is checked once it has the model.

    Args:
        model: its folder.
        dtype: type of its weights.
        head_size: numbers of a key of a head.

    Raises:
        SparsityError: as `check_policy`.
    """
    if config.sparsity is None or config.tensor_parallel == 1:
        return
    from sagellm.accel.sparsity.registry import make_sparsity
    from sagellm.engines.lmdeploy.architecture import cpu_support
    from sagellm.engines.lmdeploy.sparsity import check_policy, native_needs

    policy = make_sparsity(config.sparsity, **config.sparsity_options)
    if any(native_needs(policy).values()):
        is_native = device == "cpu" and not cpu_support(model, dtype).eager
        check_policy(policy, head_size if is_native else None)


def _check_sparsity(config: SageConfig) -> None:
    if config.sparsity is None:
        if config.sparsity_options:
            raise ConfigError(f"sparsity_options {config.sparsity_options}: there is no sparse policy; give --sparsity.")
        return
    from sagellm.accel.sparsity.registry import make_sparsity

    policy = make_sparsity(config.sparsity, **config.sparsity_options)
    of_prompts = not (policy.selects or policy.drops)
    guesses = None if of_prompts else config.speculative
    refused = {
        "speculative": (guesses, "a guess and its verification could read different blocks"),
        "engine": (config.engine if config.engine != "pytorch" else None, "its steps are not open to a choice of blocks"),
    }
    if config.tensor_parallel > 1 and policy.selects and policy.per == "layer" and policy.summaries:
        why = "a worker has the summaries of its own key heads, and the choice is for all; use per 'head', or weights"
        refused["tensor_parallel"] = config.tensor_parallel, why
    role = config.pd and config.pd.role
    if policy.drops:
        refused["role"] = role, "the engine that takes over a prompt has not seen what its queries look at"
    elif policy.wanted_summaries:
        refused["role"] = role, NO_BOUNDS
    if policy.wanted_summaries:
        refused["host_kv_blocks"] = config.host_kv_blocks or None, NO_BOUNDS
    for name, (value, why) in refused.items():
        if value is not None:
            raise ConfigError(f"sparsity {config.sparsity} with {name} {value}: {why}; give one of the two.")
