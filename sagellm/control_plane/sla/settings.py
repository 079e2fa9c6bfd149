"""A plan as a file for `sagellm up`."""

from typing import Any

import yaml

from sagellm.control_plane.sla.profile import SLAProfile
from sagellm.control_plane.sla.simulate import Fleet

__all__ = ["engine_settings", "manager_yaml"]

ROUTER = "round-robin"  # as the plan was simulated


def engine_settings(
    profile: SLAProfile, fleet: Fleet, model: str, speculative: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return settings of `SageConfig` for each engine of a plan.

    Args:
        model: name or folder of the profile's model.
        speculative: strategy that guesses.
    """
    facts = profile.facts
    settings = {name: value for name, value in facts["settings"].items() if value is not None}
    settings |= {
        "model": model, "tensor_parallel": fleet.tensor_parallel, "block_size": facts["block_size"],
        "kv_blocks": fleet.kv_blocks, "max_batch_size": fleet.max_batch_size, "max_prefill_tokens": facts["max_prefill_tokens"],
        "decode_round": 1,
    }  # fmt: skip
    if fleet.lookahead:
        settings["speculative_config"] = {"method": speculative, "num_speculative_tokens": fleet.lookahead}
    return settings


def manager_yaml(profile: SLAProfile, fleet: Fleet, model: str, speculative: str | None = None) -> str:
    """Return a file for `sagellm up`: engines side by side, or one prefill/decode group."""
    settings = engine_settings(profile, fleet, model, speculative)
    if fleet.prefill:
        guesses = settings.pop("speculative_config", None)
        del settings["model"]
        flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        if guesses:
            flags += ["--speculative", guesses["method"], "--speculative-options", f'{{"lookahead": {fleet.lookahead}}}']
        group = {"kind": "group", "model": model, "prefill": fleet.prefill, "decode": fleet.decode, "policy": "always-split"}
        engines = {"group": group | {"flags": flags}}
    else:
        engines = {f"engine-{number}": {"kind": "sagellm", **settings} for number in range(1, fleet.decode + 1)}
    return yaml.safe_dump({"router": ROUTER, "engines": engines}, sort_keys=False)
