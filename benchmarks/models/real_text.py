"""Work for a real model, from the texts of `sagellm.evaluate`: chats, code to complete, and prose."""

from pathlib import Path
from typing import Any

import numpy as np

from sagellm.models.texts import fixed_texts

__all__ = ["RealText", "model_folder"]

PASSAGE = (40, 160)  # words of a passage that a chat is about
ASKED = (
    "Explain this in plain words:\n\n{}",
    "What are the main points of this text?\n\n{}",
    "Write three questions that this text answers:\n\n{}",
    "Say this in one sentence:\n\n{}",
)
AGAIN = "Write this text again, word for word:\n\n{}"


def model_folder(name: str | Path | None) -> Path:
    """Return the folder of a model that is named as `--model` of the server names it; None is the server's default.

    Raises:
        ConfigError, ModelError: there is no such model.
    """
    from sagellm.models import find_model, prepare_model

    return prepare_model(find_model(name))


class RealText:
    """Prompts in tokens of one model; equal arguments give equal prompts.

    Attributes:
        ends: tokens that end an answer.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.ends: tuple[int, ...] = (self._tokenizer.eos_token_id,)
        texts = fixed_texts()
        self._words = texts.prose.split(" ")
        self._prose, self._code = (self._tokenizer(text, verbose=False)["input_ids"] for text in (texts.prose, texts.code))

    @property
    def tokens(self) -> list[int]:
        """All of the prose, then all of the code."""
        return self._prose + self._code

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin or end one."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def chat(self, seed: int, number: int = 0) -> list[int]:
        """A question about a passage of prose, in the chat template."""
        random = np.random.default_rng([seed, number, 1])
        return self._asked(str(random.choice(ASKED)).format(self._passage(random)))

    def copy(self, seed: int, number: int = 0) -> list[int]:
        """A request to write a passage again: most of the answer is in the prompt."""
        return self._asked(AGAIN.format(self._passage(np.random.default_rng([seed, number, 2]))))

    def completion(self, num_tokens: int, seed: int, number: int = 0) -> list[int]:
        """Code that is to be continued."""
        return self._piece(self._code, num_tokens, np.random.default_rng([seed, number, 3]))

    def prose(self, num_tokens: int, seed: int, number: int = 0) -> list[int]:
        """A piece of prose of that length."""
        return self._piece(self._prose, num_tokens, np.random.default_rng([seed, number, 4]))

    def _passage(self, random: np.random.Generator) -> str:
        count = int(random.integers(*PASSAGE))
        start = int(random.integers(len(self._words) - count))
        return " ".join(self._words[start : start + count])

    def _piece(self, tokens: list[int], count: int, random: np.random.Generator) -> list[int]:
        start = int(random.integers(len(tokens) - count))
        return tokens[start : start + count]

    def _asked(self, text: str) -> list[int]:
        chat: list[dict[str, Any]] = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(chat, add_generation_prompt=True)
