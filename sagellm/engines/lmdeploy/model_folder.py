"""Reads `config.json` of a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Any

from sagellm.core.errors import ConfigError

__all__ = ["read_hf_config", "text_config"]


def read_hf_config(model: Path) -> dict[str, Any]:
    """Return the content of `config.json`.

    Raises:
        ConfigError: the folder or its config.json does not exist or cannot be read.
    """
    file = model / "config.json"
    if not model.is_dir():
        raise ConfigError(f"{model} is not a folder; --model takes a local Hugging Face model folder.")
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{model} has no config.json; --model takes a local Hugging Face model folder.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def text_config(model: Path) -> dict[str, Any]:
    """Return the part of `config.json` that describes the language model, with `vocab_size` and the like.

    Raises:
        ConfigError: as `read_hf_config`.
    """
    config = read_hf_config(model)
    return config.get("text_config", config)
