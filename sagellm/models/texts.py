"""Text that every machine has: English from Python's documentation, code from its standard library."""

import hashlib
import random
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from sagellm.core.errors import ConfigError

__all__ = ["Texts", "calibration_texts", "check_same_tokens", "chunks", "fixed_texts", "prompts"]

CODE_FILES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "json/decoder.py", "tarfile.py", "typing.py")
CALIBRATION_FILES = ("pathlib.py", "subprocess.py", "heapq.py", "random.py")  # none that a model is evaluated on
PROSE_CHARS, CODE_CHARS = 160_000, 120_000  # of SmolLM2's tokenizer about 38,000 and 32,000 tokens


class Texts(NamedTuple):
    """Fixed text of this Python.

    Attributes:
        python: version, on which the text depends.
        sha256: hash of both texts.
    """

    prose: str
    code: str
    python: str
    sha256: str


def fixed_texts() -> Texts:
    """Read the texts.

    Raises:
        ConfigError: this Python comes without its documentation or the sources of its library.
    """
    prose, code = _read(CODE_FILES)
    prose, code = prose[:PROSE_CHARS], code[:CODE_CHARS]
    digest = hashlib.sha256(f"{prose}\0{code}".encode()).hexdigest()
    return Texts(prose, code, ".".join(map(str, sys.version_info[:3])), digest)


def calibration_texts() -> tuple[str, str]:
    """Read prose and code to calibrate quantized weights with. No part of it is in `fixed_texts`.

    Raises:
        ConfigError: as `fixed_texts`.
    """
    prose, code = _read(CALIBRATION_FILES)
    return prose[PROSE_CHARS:], code


def _read(files: tuple[str, ...]) -> tuple[str, str]:
    try:
        from pydoc_data.topics import topics

        library = Path(sysconfig.get_path("stdlib"))
        code = "\n".join((library / name).read_text(encoding="utf-8") for name in files)
    except (ImportError, OSError) as error:
        raise ConfigError(f"this Python lacks its documentation or the sources of its library: {error}") from None
    return "\n\n".join(topics[name] for name in sorted(topics)), code


def check_same_tokens(one: Path, other: Path) -> None:
    """Check that two models cut the texts into the same token ids, without which their scores mean nothing side by side.

    Args:
        one, other: their folders.

    Raises:
        ConfigError: the token ids differ.
    """
    from transformers import AutoTokenizer

    texts = fixed_texts()
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (one, other)]
    for text in (texts.prose, texts.code):
        ids = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for tokenizer in tokenizers]
        if ids[0] != ids[1]:
            raise ConfigError(
                f"{one} and {other} have different tokenizers: of one text they make {len(ids[0])} and {len(ids[1])} tokens, "
                "and not the same ids. Only models with the same tokens can be compared."
            )


def chunks(tokens: list[int], size: int, begin: int | None) -> list[list[int]]:
    """Cut a text into pieces that are evaluated by themselves.

    Args:
        size: tokens of a piece; a shorter rest is left out.
        begin: BOS token to put in front of each piece, or None.
    """
    step = size if begin is None else size - 1
    pieces = [tokens[at : at + step] for at in range(0, len(tokens) - step + 1, step)]
    return pieces if begin is None else [[begin, *piece] for piece in pieces]


def prompts(tokens: list[int], count: int, seed: int = 0, lengths: tuple[int, int] = (16, 96)) -> list[list[int]]:
    """Take pieces of a text at random places, for answers.

    Args:
        lengths: shortest and longest piece, in tokens.
    """
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        length = chance.randint(*lengths)
        start = chance.randrange(len(tokens) - length)
        found.append(tokens[start : start + length])
    return found
