"""Whether a model can guess for another: what their folders say, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

from sagellm.core.errors import SpeculationError
from sagellm.engines.lmdeploy.sizing import read_hf_config

__all__ = ["check_draft", "check_folder", "text_config"]


def check_draft(draft: Path, target: Path) -> None:
    """Both must speak of tokens by the same numbers.

    Raises:
        SpeculationError: `draft` is no folder of a model, or its vocabulary or tokenizer is another; names the difference.
        ConfigError: a config.json that cannot be read.
    """
    check_folder(draft)
    ours, theirs = text_config(draft), text_config(target)
    sizes = ours.get("vocab_size"), theirs.get("vocab_size")
    if sizes[0] != sizes[1]:
        raise SpeculationError(
            f"the draft model {draft} has a vocabulary of {sizes[0]} tokens, {target} one of {sizes[1]}; give a draft model "
            "with the tokenizer of the target."
        )
    difference = _difference(draft / "tokenizer.json", target / "tokenizer.json")
    if difference:
        raise SpeculationError(
            f"the draft model {draft} has another tokenizer than {target}: {difference}. Give a draft model with the "
            "tokenizer of the target."
        )


def check_folder(draft: Path) -> None:
    """Raises SpeculationError: `draft` is no folder of a model."""
    if not (draft / "config.json").is_file():
        raise SpeculationError(f"the draft model {draft} has no config.json; give a local Hugging Face model folder.")
    if not any(draft.glob("*.safetensors")) and not any(draft.glob("pytorch_model*.bin")):
        raise SpeculationError(
            f"the draft model {draft} has no weights (*.safetensors or pytorch_model*.bin); give a folder that has them."
        )


def text_config(folder: Path) -> dict[str, Any]:
    """What its config.json says of text, `vocab_size` for one. Raises ConfigError: it cannot be read."""
    config = read_hf_config(folder)
    return config.get("text_config", config)


def _difference(draft: Path, target: Path) -> str:
    """Empty where tokens have the same numbers, or where one of the files is missing."""
    if not (draft.is_file() and target.is_file()) or draft.read_bytes() == target.read_bytes():
        return ""
    ours, theirs = _tokens(draft), _tokens(target)
    different = [number for number in sorted({*ours, *theirs}) if ours.get(number) != theirs.get(number)]
    if not different:
        return ""
    first = different[0]
    return f"{len(different)} tokens differ, first {first}, which is {ours.get(first)!r} there and {theirs.get(first)!r} here"


def _tokens(file: Path) -> dict[int, str]:
    try:
        content = json.loads(file.read_text())
        vocab = content["model"]["vocab"]
        tokens = {number: text for text, number in vocab.items()} if isinstance(vocab, dict) else {
            number: item[0] for number, item in enumerate(vocab)
        }  # fmt: skip
        return tokens | {item["id"]: item["content"] for item in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SpeculationError(f"{file} cannot be read as a tokenizer: {error!r}.") from None
