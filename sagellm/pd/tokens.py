"""The prompt of a request in tokens, as the engines make it, so that the proxy can say what they have cached of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sagellm.core.errors import ConfigError
from sagellm.prefix_reuse import prefix_hashes

__all__ = ["PromptTokens", "guess_tokens", "prefix_keys"]

BYTES_A_TOKEN = 4  # of English text, roughly; where there is no tokenizer


class PromptTokens:
    """Renders and tokenizes with LMDeploy's own parts and the server's own code (`sagellm.serve.prompts`).

    `folder`: of the model; its weights are not read.

    Raises:
        ConfigError: it has no tokenizer, or none that can be loaded.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._prompts = _prompts(folder)
        except Exception as error:  # libraries raise what they like where files are missing
            raise ConfigError(
                f"cannot load a tokenizer from {folder}: {error}. Give the folder of the model that the engines serve, or "
                "leave --model out; then prompts are routed by load alone."
            ) from error

    def of(self, path: str, raw: dict[str, Any]) -> list[list[int]] | None:
        """Return the tokens of each prompt of a request; None if the engine will reject it, with its own error.

        A long prompt takes some milliseconds, so event loops call this in a thread.
        """
        from sagellm.serve.parameters import Refused
        from sagellm.serve.routes import ROUTES

        try:
            given = {name: value for name, value in raw.items() if value is not None}  # as the server reads it
            return self._prompts.tokens(ROUTES[path].model.model_validate(given))
        except (Refused, ValueError):  # pydantic's error is a ValueError
            return None


def prefix_keys(tokens: list[int], block_size: int) -> list[int]:
    """As engines name the cached blocks of a prompt (`PrefixChange`): one key for each full block."""
    return prefix_hashes(tokens[: len(tokens) // block_size * block_size], block_size).tolist()


def guess_tokens(raw: dict[str, Any]) -> int:
    """How many tokens the prompt has, by its length in bytes."""
    texts: list[Any] = [raw.get("prompt"), raw.get("messages")]
    num_bytes = 0
    while texts:
        one = texts.pop()
        if isinstance(one, str):
            num_bytes += len(one.encode(errors="replace"))
        elif isinstance(one, dict):
            texts += one.values()
        elif isinstance(one, list):
            texts += one
    return max(2, num_bytes // BYTES_A_TOKEN)  # one of a single token could not be split, and is rare


def _prompts(folder: Path) -> Any:
    from lmdeploy.archs import get_model_arch
    from lmdeploy.model import ChatTemplateConfig, best_match_model
    from lmdeploy.serve.async_engine import AsyncEngine
    from lmdeploy.tokenizer import Tokenizer

    from sagellm.serve.prompts import Prompts

    class Rendering:
        """The part of LMDeploy's `AsyncEngine` that `Prompts` needs, without an engine."""

        _get_prompt_input = AsyncEngine._get_prompt_input
        backend = "turbomind"  # of the two, whose vocabulary `Prompts` finds without a pool to ask
        session_len = 1 << 24  # how much fits is for the engine to say

        def __init__(self) -> None:
            self.tokenizer = Tokenizer(str(folder))
            self.arch, config = get_model_arch(str(folder))
            vocab_size = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
            self.engine = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
            self.chat_template = ChatTemplateConfig(best_match_model(str(folder)), model_path=str(folder)).chat_template

    return Prompts(Rendering())
