"""Guesses of a speculative strategy in LMDeploy's PyTorch engine: what the inserted lines of patch 0005 call."""

from typing import Any


def build_factory(model_config: Any, spec: str) -> Any:
    """LMDeploy's strategies with guesses, or None. `spec`: the JSON of a `HookConfig`."""
    from sagellm.core.config import HookConfig

    wanted = HookConfig.model_validate_json(spec).speculative
    if wanted is None:
        return None
    from sagellm.engines.lmdeploy.speculative.factory import SpecFactory

    return SpecFactory(model_config, wanted)
