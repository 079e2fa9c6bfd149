"""LMDeploy's own speculation, EAGLE and MTP: its engine guesses and checks by itself, on a GPU, and no strategy is asked."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sagellm.accel.speculative.base import MAX_LOOKAHEAD
from sagellm.accel.speculative.registry import ENGINE_OPTIONS, engine_method
from sagellm.core.config import SageConfig
from sagellm.core.errors import SpeculationError

__all__ = ["check_method", "speculative_config"]

# The draft heads of DeepSeek's models are in their own weights.
MODEL_NEEDED = {"eagle": True, "eagle3": True, "deepseek_mtp": False}


def check_method(config: SageConfig) -> None:
    """Raises SpeculationError: options that the method of `config` does not take, or a device that cannot run it. Does
    nothing where `config` names none of LMDeploy's methods."""
    method = engine_method(config.speculative)
    if method is None:
        return
    from sagellm.engines.lmdeploy.sizing import resolve_device

    if config.engine != "pytorch":
        raise SpeculationError(f"speculative {method} is a method of LMDeploy's PyTorch engine; start with --engine pytorch.")
    device = resolve_device(config.device)
    if device == "cpu":
        raise SpeculationError(
            f"speculative {method} needs LMDeploy's CUDA kernels, and this engine is on the cpu: use draft (a second model), "
            "suffix or ngram instead."
        )
    if device == "cuda" and find_spec("flash_attn_interface") is None:
        raise SpeculationError(
            f"speculative {method} needs FlashAttention-3 on cuda, and there is no module flash_attn_interface: install it, or "
            "use draft (a second model), suffix or ngram instead."
        )
    options = config.speculative_options
    if unknown := sorted(set(options) - set(ENGINE_OPTIONS)):
        raise SpeculationError(f"speculative {method} has no option {unknown[0]}; it takes {' and '.join(ENGINE_OPTIONS)}.")
    num = options.get("num_speculative_tokens", 1)
    if type(num) is not int or not 1 <= num <= MAX_LOOKAHEAD:
        raise SpeculationError(f"num_speculative_tokens is {num!r}; give a whole number from 1 to {MAX_LOOKAHEAD}.")
    model = options.get("model")
    if model is None and not MODEL_NEEDED[method]:
        return
    if not isinstance(model, (str, Path)) or not (Path(model) / "config.json").is_file():
        raise SpeculationError(f"speculative {method} with model {model!r}; give the folder of its draft model.")


def speculative_config(config: SageConfig) -> Any:
    """LMDeploy's `SpeculativeConfig`, or None where `config` names none of its methods. The options have been checked."""
    method = engine_method(config.speculative)
    if method is None:
        return None
    from lmdeploy.messages import SpeculativeConfig

    options = config.speculative_options
    return SpeculativeConfig(method, str(options.get("model") or ""), options.get("num_speculative_tokens", 1))
