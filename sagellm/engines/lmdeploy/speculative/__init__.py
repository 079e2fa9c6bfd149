"""Guesses of a speculative strategy in LMDeploy's PyTorch engine: what the inserted lines of patch 0005 call."""

from typing import Any


def build_factory(model_config: Any, spec: str) -> Any:
    """LMDeploy's strategies with guesses, or with news of a sparse policy, or None. `spec`: the JSON of a `HookConfig`."""
    from sagellm.core.config import HookConfig

    config = HookConfig.model_validate_json(spec)
    if config.speculative is not None:
        from sagellm.engines.lmdeploy.speculative.factory import SpecFactory

        return SpecFactory(model_config, config.speculative)
    if config.sparsity is not None:
        from sagellm.engines.lmdeploy.sparse_workers import SparseFactory

        return SparseFactory(model_config)
    return None
