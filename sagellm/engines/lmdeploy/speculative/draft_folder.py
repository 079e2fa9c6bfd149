"""Whether a model can guess for another: what their folders say, before anything is loaded."""

import json
import logging
from pathlib import Path
from typing import Any

from sagellm.core.errors import SpeculationError
from sagellm.models.folder import text_config

__all__ = ["check_draft", "check_folder"]

logger = logging.getLogger("sagellm")

# Beside tokenizer.json: what tokenizers of transformers are made from.
TOKENIZER_FILES = ("vocab*", "*.model", "*.tiktoken", "tokenization_*.py")


def check_draft(draft: Path, target: Path) -> None:
    """Both must speak of tokens by the same numbers; either may be padded beyond its tokenizer. Where one of them has no
    tokenizer that can be read, equal sizes pass with a warning.

    Raises:
        SpeculationError: `draft` is no folder of a model, or its vocabulary or tokenizer is another; names the difference.
        ConfigError: a config.json that cannot be read.
    """
    check_folder(draft)
    sizes = [text_config(folder).get("vocab_size") for folder in (draft, target)]
    difference = _difference(draft, target)
    if difference:
        raise SpeculationError(
            f"the draft model {draft} has another tokenizer than {target}: {difference}. Give a draft model with the "
            "tokenizer of the target."
        )
    if difference is not None:
        return
    if sizes[0] != sizes[1]:
        raise SpeculationError(
            f"the draft model {draft} has a vocabulary of {sizes[0]} tokens, {target} one of {sizes[1]}, and their tokenizers "
            "cannot be compared; give a draft model with the tokenizer of the target."
        )
    logger.warning(
        "the tokenizers of the draft model %s and of %s cannot be compared; with another one its guesses are wrong",
        draft, target,
    )  # fmt: skip


def check_folder(draft: Path) -> None:
    """Raises SpeculationError: `draft` is no folder of a model."""
    if not (draft / "config.json").is_file():
        raise SpeculationError(f"the draft model {draft} has no config.json; give a local Hugging Face model folder.")
    if not any(draft.glob("*.safetensors")) and not any(draft.glob("pytorch_model*.bin")):
        raise SpeculationError(
            f"the draft model {draft} has no weights (*.safetensors or pytorch_model*.bin); give a folder that has them."
        )


def _difference(draft: Path, target: Path) -> str | None:
    """Empty where tokens have the same numbers; None where nothing can be compared."""
    for name in ("tokenizer.json", "tokenizer.model"):
        files = [folder / name for folder in (draft, target)]
        if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
            return ""
    ours, theirs = _tokens(draft), _tokens(target)
    if not (ours and theirs):
        return None
    different = [number for number in sorted({*ours, *theirs}) if ours.get(number) != theirs.get(number)]
    if not different:
        return ""
    first = different[0]
    return f"{len(different)} tokens differ, first {first}, which is {ours.get(first)!r} there and {theirs.get(first)!r} here"


def _tokens(folder: Path) -> dict[int, str]:
    """By number; empty where there is no tokenizer. Raises SpeculationError: its tokenizer.json cannot be read."""
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return _of_json(json.loads(file.read_text()))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise SpeculationError(f"{file} cannot be read as a tokenizer: {error!r}.") from None
    return _of_other_files(folder)


def _of_json(content: dict[str, Any]) -> dict[int, str]:
    vocab = content["model"]["vocab"]
    tokens = {number: text for text, number in vocab.items()} if isinstance(vocab, dict) else {
        number: item[0] for number, item in enumerate(vocab)
    }  # fmt: skip
    return tokens | {item["id"]: item["content"] for item in content.get("added_tokens", ())}


def _of_other_files(folder: Path) -> dict[int, str]:
    if not any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern)):
        return {}  # of a folder with nothing transformers makes a tokenizer without tokens at times
    from transformers import AutoTokenizer

    try:
        vocab = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, local_files_only=True).get_vocab()
        return {number: text for text, number in vocab.items()}
    except Exception as error:  # of whatever code makes this tokenizer
        logger.debug("no tokenizer in %s: %s", folder, error)
    try:
        return {number: text for text, number in json.loads((folder / "vocab.json").read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
